"""The fold of a tree's events into run records, which can be replayed and compared (`core/records.py`)."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunRemote,
    RunResumed,
    RunSpawned,
    RunWaiting,
    Thinking,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    Unknown,
    UsageReported,
)
from retinue.core.messages import INTERRUPTED_TURN, NOTICE, Reply
from retinue.core.plans import SETUP
from retinue.core.records import CallRecord, RunRecord, Step, TurnRecord
from retinue.log.threads import Thread, extend_reply

NEVER_ENDED = "it never ended"
RESUMED = "it was resumed in a later process"
NO_REPLY = "its model gave no answer, and the conversation continued"
_ENDED_FROM_OUTSIDE = {
    "cancelled": "it was cancelled",
    "timed_out": "it timed out",
    "disconnected": "it was cut off",
}


def fold_records(events: Iterable[Event]) -> dict[int, RunRecord]:
    """Return the records of one tree's runs by number, in the order the runs were spawned.

    Runs that an MCP server reports are left out: a replay uses only the result of the call that made them. A run that
    we sent to a peer is marked as remote, with all below it.
    """
    folds: dict[int, _RunFold] = {}
    for event in events:
        body = event.body
        if isinstance(body, RunSpawned):
            if body.server:
                continue
            record = RunRecord(number=event.run, path=event.path, agent=event.agent, spawned=body, events=1)
            folds[event.run] = _RunFold(record)
            if body.remote_id:
                record.mark_remote()
            if body.parent is not None and body.parent in folds:
                folds[body.parent].add_child(record)
        elif event.run in folds:
            if isinstance(body, RunRemote):
                folds[event.run].record.mark_remote()
            folds[event.run].apply(body)
    for fold in folds.values():
        fold.finish()
    return {number: fold.record for number, fold in folds.items()}


class _RunFold:
    """The record of one run while its events arrive. `_inbox` are the messages since the last turn; `_open_calls` are
    calls without a result."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self._inbox: list[Inbox] = []
        self._thread = Thread(strict=False)
        self._thread.apply(record.spawned)
        self._open_calls: dict[str, CallRecord] = {}

    def apply(self, body: Body | Unknown) -> None:
        record = self.record
        if record.cut or record.ended is not None:
            return
        if isinstance(body, RunResumed):
            record.cut_off(RESUMED)
            return
        record.count_event()
        self._thread.apply(body)
        match body:
            case TurnStarted():
                thread = tuple(self._thread.turns())
                record.turns.append(TurnRecord(number=body.turn, inbox=self._inbox, thread=thread))
                self._inbox = []
            case Inbox():
                self._inbox.append(body)
            case RunWaiting(after="interrupted"):  # the loop adds the same notice
                self._inbox.insert(0, Inbox(INTERRUPTED_TURN, source=NOTICE))
            case RunWaiting(after="failed" | "refused"):
                record.cut_off(NO_REPLY)
            case Message() if body.host:
                self._find_steps().append(body)
            case ToolCall() if body.host:
                self._add_host_call(body)
            case ApprovalAsked() | ApprovalDecided() | ToolResult() if body.call_id in self._open_calls:
                self._apply_to_call(self._open_calls[body.call_id], body)
            case RunEnded():
                record.end(body)
            case _:
                if record.turns:
                    self._apply_to_turn(record.turns[-1], body)

    def add_child(self, child: RunRecord) -> None:
        """Add a child run to the steps of the call that made it. A run that continues another was started by a person,
        so it belongs to no call."""
        if child.spawned.continues is None:
            call = self._open_calls.get(child.spawned.call_id)
            (self._find_steps() if call is None else call.steps).append(child)
        self.record.children.append(child)

    def finish(self) -> None:
        """Complete the record after the last event."""
        record, ended = self.record, self.record.ended
        if not record.cut:
            record.cut_off(NEVER_ENDED if ended is None else _ENDED_FROM_OUTSIDE.get(ended.status, ""))
        if not record.turns or record.turns[-1].whole:
            return
        last = record.turns[-1]
        if ended is not None and ended.status == "refused":
            thoughts = () if last.reply is None else last.reply.thoughts
            last.set_reply(Reply(ended.final_response, thoughts=thoughts, usage=last.usage, refused=True))
        elif last.reply is not None and not last.calls and record.cut:
            last.set_reply(None)  # its calls were never written

    def _find_steps(self, within: str = "") -> list[Step]:
        """Return the list of steps for an action of a host function: the steps of call `within`, else of the model's
        newest open call, else of the run."""
        if within in self._open_calls:
            return self._open_calls[within].steps
        calls = [call for call in self._open_calls.values() if not call.body.host]
        return calls[-1].steps if calls else self.record.steps

    def _add_host_call(self, body: ToolCall) -> None:
        if body.name != SETUP:  # setup only changes the workspace, which a replay does not
            call = self._open_calls[body.call_id] = CallRecord(body)
            self._find_steps(body.within).append(call)

    def _apply_to_call(self, call: CallRecord, body: ApprovalAsked | ApprovalDecided | ToolResult) -> None:
        call.apply(body)
        if isinstance(body, ToolResult):
            del self._open_calls[body.call_id]
            if call.body.tier == "none":
                self._add_problem(body)

    def _add_problem(self, body: ToolResult) -> None:
        """Add the result of a call that could not run to the reply as its `problem`, so that a replay refuses the call
        again."""
        turn = self.record.turns[-1]
        if turn.reply is not None:
            calls = (
                structs.replace(call, problem=body.text) if call.id == body.call_id else call
                for call in turn.reply.calls
            )
            turn.set_reply(structs.replace(turn.reply, calls=tuple(calls)))

    def _apply_to_turn(self, turn: TurnRecord, body: Body | Unknown) -> None:
        """Add an event of the model's turn: usage, thought, message, call or result."""
        match body:
            case UsageReported():
                turn.add_usage(body.usage)
            case TurnEnded():
                turn.end()
            case Thinking() | Message() | ToolCall() | ToolResult():
                turn.set_reply(extend_reply(turn.reply or Reply(), body, strict=False))
        if isinstance(body, ToolCall) and body.tier != "provider":
            turn.calls[body.call_id] = self._open_calls[body.call_id] = CallRecord(body)
