"""The fold of a tree's events into how long its runs have been at work, through all the processes it lived in.

Time in which a person was waited for does not count, nor does time between a crash and going on.
"""

from __future__ import annotations

from collections.abc import Iterable

from retinue.core.events import ApprovalAsked, ApprovalDecided, Event, RunEnded, RunResumed, RunSpawned, RunStarted


class _Clock:
    def __init__(self, parent: _Clock | None) -> None:
        self.parent = parent
        self.used = 0.0
        self.pauses = 0
        self.started = False
        self.since: float | None = None

    def stop(self, at: float) -> None:
        if self.since is not None:
            self.used += max(0.0, at - self.since)
            self.since = None

    def pause(self, at: float) -> None:
        self.stop(at)
        self.pauses += 1

    def go_on(self, at: float) -> None:
        self.pauses -= 1
        if self.pauses == 0:
            self.since = at


class Clocks:
    """Fed with all events of one tree, in their order. Runs that are resumed together say so in a row."""

    def __init__(self) -> None:
        self._runs: dict[int, _Clock] = {}
        self._asked: dict[str, int] = {}
        self._last = 0.0
        self._resuming = False

    def apply(self, event: Event) -> None:
        body, at = event.body, event.at
        match body:
            case RunSpawned(parent=parent):
                self._runs[event.run] = _Clock(None if parent is None else self._runs.get(parent))
            case RunStarted():
                self._runs[event.run].started = True
                self._runs[event.run].since = at
            case ApprovalAsked(approval_id=asked):
                self._asked[asked] = event.run
                for clock in self._up(event.run):
                    clock.pause(at)
            case ApprovalDecided(approval_id=asked) if asked in self._asked:
                del self._asked[asked]
                for clock in self._up(event.run):
                    clock.go_on(at)
            case RunEnded():
                self._ended(event.run, at)
            case RunResumed():
                self._resumed(event.run, at)
            case _:
                pass
        self._resuming = isinstance(body, RunResumed)
        self._last = at

    def _resumed(self, run: int, at: float) -> None:
        if not self._resuming:
            self._interrupted()
        if self._runs[run].started:
            self._runs[run].since = at

    def _ended(self, run: int, at: float) -> None:
        for asked in [asked for asked, asking in self._asked.items() if asking == run]:
            del self._asked[asked]
            for clock in self._up(run):
                clock.go_on(at)
        self._runs[run].stop(at)

    def _interrupted(self) -> None:
        """The process was gone after the last event; whatever it waited for, it waits no more."""
        self._asked.clear()
        for clock in self._runs.values():
            clock.stop(self._last)
            clock.pauses = 0

    def _up(self, run: int) -> Iterable[_Clock]:
        clock = self._runs.get(run)
        while clock is not None:
            yield clock
            clock = clock.parent

    def used(self) -> dict[int, float]:
        """Seconds of each run until the last that is known of the tree."""
        self._interrupted()
        return {run: clock.used for run, clock in self._runs.items()}
