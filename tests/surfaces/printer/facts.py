"""Events to fold and streams to look into, for the tests of this folder."""

import itertools

from retinue.core.events import Body, Event, RunEnded, RunSpawned, Unknown

MAIN, ANNA, ANNA_TOO, BERT = (
    (0, "/main", "main"),
    (1, "/main/anna-1", "anna"),
    (2, "/main/anna-2", "anna"),
    (3, "/main/bert-3", "bert"),
)


class Facts:
    """Numbers the events of one tree."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __call__(self, who: tuple[int, str, str], body: Body | Unknown) -> Event:
        run, path, agent = who
        seq = next(self._numbers)
        return Event(seq, "t1", run, path, agent, 1_700_000_000.0 + seq, body)

    def spawn(self, who: tuple[int, str, str], label: str, *, task: str = "do it", queued: bool = False) -> Event:
        parent = None if who[0] == 0 else 0
        body = RunSpawned(parent, label, 0 if parent is None else 1, task, f"id_{who[0]}", "/w", queued=queued)
        return self(who, body)

    def end(self, who: tuple[int, str, str], status: str = "done", error: str | None = None) -> Event:
        return self(who, RunEnded(status, "the last words", 400, error))


class Recorder:
    """A stream that keeps every write apart."""

    def __init__(self) -> None:
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return False

    @property
    def text(self) -> str:
        return "".join(self.writes)
