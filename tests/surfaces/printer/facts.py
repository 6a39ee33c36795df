"""Events to fold and streams to look into, for the tests of this folder."""

import itertools
import time

from retinue.core.events import (
    Body,
    Event,
    RunEnded,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    TurnStarted,
    Unknown,
)

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


def make_call_events(*, agents: int, calls: int) -> list[Event]:
    """Return the events of subagents that all make calls at once; each call is an event, and its result another."""
    events: list[Event] = []

    def add(run: int, body: Body) -> None:
        path, agent = ("/main", "main") if run == 0 else (f"/main/a-{run}", "a")
        events.append(Event(len(events) + 1, "t1", run, path, agent, time.time(), body))  # type: ignore[arg-type]

    add(0, RunSpawned(None, "main", 0, "x", "id", "/w", model="m"))
    add(0, RunStarted())
    for run in range(1, agents + 1):
        add(run, RunSpawned(0, f"agent {run}", 1, "x", f"id{run}", "/w", model="m"))
        add(run, RunStarted())
        add(run, TurnStarted(1))
    for call in range(calls):
        for run in range(1, agents + 1):
            add(run, ToolCall(f"c{call}", "glob", {"pattern": f"{call}.txt"}))
            add(run, ToolResult(f"c{call}", "glob", "", True))
    return events


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
