"""The fold of a dead tree's events into what going on needs of each run: where it stopped, what it had asked for, what
was answered, how long it has been at work. Pure; `supervisor.resume` acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Inbox,
    RunResumed,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    ToolStarted,
)
from retinue.core.messages import Turn
from retinue.core.plans import SETUP
from retinue.log.active_time import Clocks
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
        """Whether nobody knows if it ran. One that was asked about did not run before its answer took effect; one
        that was denied did not run at all."""
        if self.tier == "none" or isinstance(self.decision, Deny):
            return False
        return self.started or not self.asked


class Interrupted:
    """One run as its process left it."""

    def __init__(self, before: Sequence[Turn]) -> None:
        self.thread = Thread(before)
        self.started = False
        self.seconds = 0.0
        self.set_up = False
        self.open: dict[str, OpenCall] = {}
        self.call_ids: set[str] = set()
        self.tools: dict[str, str] = {}  # which tool a call was of
        self.told: set[int] = set()  # the children whose ending it has been told of

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


def interrupted(events: Iterable[Event], *, before: Mapping[int, Sequence[Turn]]) -> dict[int, Interrupted]:
    """Every run of a tree, by its number; `before` are the threads that continued ones began with."""
    runs: dict[int, Interrupted] = {}
    clocks = Clocks()
    for event in events:
        clocks.apply(event)
        if isinstance(event.body, RunSpawned):
            runs[event.run] = Interrupted(before.get(event.run, ()))
        if event.run in runs:
            runs[event.run].apply(event)
    for run, seconds in clocks.used().items():
        runs[run].seconds = seconds
    return runs


def standing(events: Iterable[Event]) -> Iterable[tuple[int, ApprovalDecided]]:
    """The answers that were given for more than one call of a tree: to a tool in a run, or in the whole tree."""
    for event in events:
        body = event.body
        if not isinstance(body, ApprovalDecided) or body.by.startswith("rule: "):
            continue
        if body.allowed and body.scope in STANDING:
            yield event.run, body
