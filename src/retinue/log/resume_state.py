"""The fold of an interrupted tree's events into the state of each run that resuming needs: its thread, its open calls
and their answers, how long it has been at work. Pure; the supervisor acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Inbox,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    ToolStarted,
)
from retinue.core.messages import Turn
from retinue.core.plans import SETUP
from retinue.log.threads import Thread

STANDING = ("run", "tool")


class OpenCall:
    """A tool call that has no result. `asked`: a person was asked. `decision`: what was answered, of the tool
    with this `seal`. `started`: the answer has taken effect, so the tool may have run."""

    def __init__(self, body: ToolCall) -> None:
        self.call_id = body.call_id
        self.name = body.name
        self.tier = body.tier
        self.host = body.host
        self.asked = False
        self.started = False
        self.decision: Decision | None = None
        self.seal = ""

    def may_have_run(self) -> bool:
        """Return whether nobody knows if it ran. A call that a person was asked about did not run before the answer
        took effect; a denied one did not run at all."""
        if self.tier == "none" or isinstance(self.decision, Deny):
            return False
        return self.started or not self.asked


class InterruptedRun:
    """One run as its process left it. `told` are the children whose ending it has been told of."""

    def __init__(self, before: Sequence[Turn]) -> None:
        self.thread = Thread(before)
        self.started = False
        self.seconds = 0.0
        self.set_up = False
        self.open: dict[str, OpenCall] = {}
        self.call_ids: set[str] = set()
        self.tools: dict[str, str] = {}  # which tool a call was of
        self.told: set[int] = set()

    def apply(self, event: Event) -> None:
        body = event.body
        self.thread.apply(body)
        match body:
            case RunStarted():
                self.started = True
            case RunResumed():
                for call in self.open.values():  # what was not answered is asked again, under another name
                    call.asked = call.asked and call.decision is not None
            case ToolCall(call_id=call_id, name=name):
                self.open[call_id] = OpenCall(body)
                self.call_ids.add(call_id)
                self.tools[call_id] = name
            case ToolResult(call_id=call_id):
                if call_id in self.open:
                    call = self.open.pop(call_id)
                    self.set_up = self.set_up or (call.host and call.name == SETUP and body.success)
            case ApprovalAsked(call_id=call_id) if call_id in self.open:
                self.open[call_id].asked = True
            case ApprovalDecided(call_id=call_id) if call_id in self.open:
                self.open[call_id].decision = Allow(args=body.args) if body.allowed else Deny(body.reason)
                self.open[call_id].seal = body.seal
            case ToolStarted(call_id=call_id) if call_id in self.open:
                self.open[call_id].started = True
            case Inbox(about=int() as about):
                self.told.add(about)
            case _:
                pass


def fold_interrupted_runs(
    events: Iterable[Event], *, before: Mapping[int, Sequence[Turn]]
) -> dict[int, InterruptedRun]:
    """Fold the events of a tree into its runs, by number. `before` are the threads that continued runs began with."""
    runs: dict[int, InterruptedRun] = {}
    clocks = _Clocks()
    for event in events:
        clocks.apply(event)
        if isinstance(event.body, RunSpawned):
            runs[event.run] = InterruptedRun(before.get(event.run, ()))
        if event.run in runs:
            runs[event.run].apply(event)
    for run, seconds in clocks.measure_seconds().items():
        runs[run].seconds = seconds
    return runs


def find_standing_answers(events: Iterable[Event]) -> Iterable[tuple[int, ApprovalDecided]]:
    """Yield the answers that hold for more than one call of a tree: for a tool in a run, or in the whole tree."""
    for event in events:
        body = event.body
        if not isinstance(body, ApprovalDecided) or body.rule:
            continue
        if body.allowed and body.scope in STANDING:
            yield event.run, body


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

    def resume(self, at: float) -> None:
        self.pauses -= 1
        if self.pauses == 0:
            self.since = at


class _Clocks:
    """The clocks of the runs of a tree, through all the processes it lived in. They stand still while a person is
    waited for, and between a crash and the resumption. Runs that are resumed together say so in a row."""

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
                for clock in self._list_clocks(event.run):
                    clock.pause(at)
            case ApprovalDecided(approval_id=asked) if asked in self._asked:
                del self._asked[asked]
                for clock in self._list_clocks(event.run):
                    clock.resume(at)
            case RunEnded():
                self._end(event.run, at)
            case RunResumed():
                self._resume(event.run, at)
            case _:
                pass
        self._resuming = isinstance(body, RunResumed)
        self._last = at

    def _resume(self, run: int, at: float) -> None:
        if not self._resuming:
            self._stop_all()
        if self._runs[run].started:
            self._runs[run].since = at

    def _end(self, run: int, at: float) -> None:
        for asked in [asked for asked, asking in self._asked.items() if asking == run]:
            del self._asked[asked]
            for clock in self._list_clocks(run):
                clock.resume(at)
        self._runs[run].stop(at)

    def _stop_all(self) -> None:
        """Stop all clocks at the last event, after which the process was gone."""
        self._asked.clear()
        for clock in self._runs.values():
            clock.stop(self._last)
            clock.pauses = 0

    def _list_clocks(self, run: int) -> Iterable[_Clock]:
        """Yield the clocks of a run and of those above it."""
        clock = self._runs.get(run)
        while clock is not None:
            yield clock
            clock = clock.parent

    def measure_seconds(self) -> dict[int, float]:
        """Return the seconds of each run until the newest event of the tree."""
        self._stop_all()
        return {run: clock.used for run, clock in self._runs.items()}
