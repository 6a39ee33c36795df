"""The fold of a tree's events into records that can be played again, and the comparison of two of them.

Compared run by run and turn by turn, never by how runs interleaved: what happened at the same time may happen in any
order. Times, places, prices and ids are not compared; neither are warnings, which tell of the moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from msgspec import structs

from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunResumed,
    RunSpawned,
    Thinking,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    UsageReported,
)
from retinue.core.messages import Call, Native, Reply, Thought
from retinue.core.plans import SETUP
from retinue.core.records import CallRecord, Difference, RunRecord, TurnRecord, difference_lines, json_text, reply_lines

NEVER_ENDED = "it never ended"
RESUMED = "it was resumed in a later process"
_OUTSIDE = {
    "cancelled": "it was cancelled",
    "timed_out": "it timed out",
    "disconnected": "it was cut off",
}


class _Tape:
    """One run while its events come."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.waiting: list[Inbox] = []
        self.open: dict[str, CallRecord] = {}

    @property
    def turn(self) -> TurnRecord | None:
        return self.record.turns[-1] if self.record.turns else None

    def steps(self, within: str = "") -> list[Any]:
        """Where what a host-side function does belongs: the call that it names, the newest that is open, or the run
        itself."""
        if within in self.open:
            return self.open[within].steps
        calls = [call for call in self.open.values() if not call.body.host]
        return calls[-1].steps if calls else self.record.steps

    def adopt(self, child: RunRecord) -> None:
        """One that continues another was begun by a person, beside whatever this run did."""
        if child.spawned.continues is None:
            call = self.open.get(child.spawned.call_id)
            (self.steps() if call is None else call.steps).append(child)
        self.record.children.append(child)


def records(events: Iterable[Event]) -> dict[int, RunRecord]:
    """The runs of one tree by their numbers, in the order they were made."""
    tapes: dict[int, _Tape] = {}
    for event in events:
        body = event.body
        if isinstance(body, RunSpawned):
            if body.server:
                continue  # it ran elsewhere: what is played of it is the result of the call
            record = RunRecord(event.run, event.path, event.agent, body, events=1)
            tapes[event.run] = _Tape(record)
            if body.parent is not None and body.parent in tapes:
                tapes[body.parent].adopt(record)
            continue
        tape = tapes.get(event.run)
        if tape is None or tape.record.cut or tape.record.ended is not None:
            continue
        if isinstance(body, RunResumed):
            tape.record.cut = RESUMED
            continue
        tape.record.events += 1
        take = _TAKES.get(type(body))
        if take is not None:
            take(tape, body)
    for tape in tapes.values():
        _finish(tape.record)
    return {number: tape.record for number, tape in tapes.items()}


def _finish(record: RunRecord) -> None:
    ended = record.ended
    if not record.cut:
        record.cut = NEVER_ENDED if ended is None else _OUTSIDE.get(ended.status, "")
    last = record.turns[-1] if record.turns else None
    if last is None:
        return
    if ended is not None and ended.status == "refused" and not last.whole:
        last.reply = Reply(ended.final_response, (), _replied(last).thoughts, last.usage, refused=True)
    elif last.reply is not None and not last.whole and not last.calls and record.cut:
        last.reply = None  # its calls were never written


def _replied(turn: TurnRecord) -> Reply:
    return turn.reply or Reply()


def _started(tape: _Tape, body: TurnStarted) -> None:
    tape.record.turns.append(TurnRecord(body.turn, tape.waiting))
    tape.waiting = []


def _thought(tape: _Tape, body: Thinking) -> None:
    if tape.turn is not None:
        signed = body.signature, body.block_id, body.origin, body.layout
        thought = Thought(_whole(body.text, body.file), body.type, *signed)
        reply = _replied(tape.turn)
        tape.turn.reply = structs.replace(reply, thoughts=(*reply.thoughts, thought))


def _message(tape: _Tape, body: Message) -> None:
    if body.host:
        tape.steps().append(body)
    elif tape.turn is not None:
        tape.turn.reply = structs.replace(_replied(tape.turn), text=_whole(body.text, body.file))


def _usage(tape: _Tape, body: UsageReported) -> None:
    if tape.turn is not None:
        tape.turn.usage += body.usage


def _call(tape: _Tape, body: ToolCall) -> None:
    record = CallRecord(body)
    turn = tape.turn
    if body.host and body.name == SETUP:
        return  # it was done to the workspace, which is not played
    if body.tier == "provider":
        _native(turn, Native(body.call_id, body.name, body.args, ""))
        return
    if body.host:
        tape.steps(body.within).append(record)
    elif turn is not None:
        turn.calls[body.call_id] = record
        reply = _replied(turn)
        turn.reply = structs.replace(reply, calls=(*reply.calls, Call(body.call_id, body.name, body.args)))
    tape.open[body.call_id] = record


def _asked(tape: _Tape, body: ApprovalAsked) -> None:
    if body.call_id in tape.open:
        tape.open[body.call_id].asked = body


def _decided(tape: _Tape, body: ApprovalDecided) -> None:
    if body.call_id in tape.open:
        tape.open[body.call_id].decided = body


def _result(tape: _Tape, body: ToolResult) -> None:
    call = tape.open.pop(body.call_id, None)
    if call is not None:
        call.result = body
    elif tape.turn is not None:
        for done in _replied(tape.turn).natives:
            if done.id == body.call_id:
                result = structs.replace(
                    done, result=body.text, success=body.success, content=body.content, origin=body.origin
                )
                _native(tape.turn, result)


def _native(turn: TurnRecord | None, done: Native) -> None:
    """Of the calls that ran at the provider while it answered, the newest that is known of this one."""
    if turn is not None:
        reply = _replied(turn)
        others = (each for each in reply.natives if each.id != done.id)
        turn.reply = structs.replace(reply, natives=(*others, done))


def _turn_ended(tape: _Tape, _: TurnEnded) -> None:
    if tape.turn is not None:
        tape.turn.whole = True
        tape.turn.reply = _replied(tape.turn)


def _ended(tape: _Tape, body: RunEnded) -> None:
    tape.record.ended = body


_TAKES: dict[Any, Callable[[_Tape, Any], None]] = {
    TurnStarted: _started,
    Thinking: _thought,
    Message: _message,
    UsageReported: _usage,
    ToolCall: _call,
    ApprovalAsked: _asked,
    ApprovalDecided: _decided,
    ToolResult: _result,
    TurnEnded: _turn_ended,
    RunEnded: _ended,
    Inbox: lambda tape, body: tape.waiting.append(body),
}


def _whole(text: str, file: str) -> str:
    try:
        return Path(file).read_bytes().decode("utf-8", "replace") if file else text
    except OSError:  # removed since; what the event says of it is what there is
        return text


# Comparing


def compare(expected: RunRecord, actual: RunRecord | None) -> Difference | None:
    """The first place where a run was not as recorded."""

    def difference(turn: int, what: str, then: list[str], now: list[str]) -> Difference | None:
        lines = difference_lines(then, now, now="now")
        return Difference(expected.number, expected.path, turn, what, lines) if lines else None

    if actual is None:
        return difference(0, "run", [f"{expected.agent}: {expected.spawned.task}"], [])
    for turn in expected.turns:
        if expected.cut and not turn.whole:
            return None
        now = actual.turn(turn.number)
        found = difference(turn.number, "turn", _turn_lines(turn), [] if now is None else _turn_lines(now))
        if found is not None:
            return found
    if expected.cut:
        return None
    extra = actual.turn(len(expected.turns) + 1)
    if extra is not None:
        return difference(extra.number, "turn", [], _turn_lines(extra))
    steps = difference(0, "steps", _steps_lines(expected.steps), _steps_lines(actual.steps))
    return steps or difference(len(expected.turns), "ending", _ending_lines(expected), _ending_lines(actual))


def _turn_lines(turn: TurnRecord) -> list[str]:
    """Calls stand in the order of their ids: those of one reply run at once."""
    reply = _replied(turn)
    lines = [f"turn {turn.number}", *reply_lines(reply.text, (), [thought.text for thought in reply.thoughts])]
    lines += [f"search {done.name} ({done.id}): {json_text(done.args)}: {done.result}" for done in reply.natives]
    for _, call in sorted(turn.calls.items()):
        lines += _call_lines(call)
    return lines


def _call_lines(call: CallRecord) -> list[str]:
    body, decided, result = call.body, call.decided, call.result
    lines = [f"call {body.name} ({body.call_id}, {body.tier}): {json_text(body.args)}"]
    if call.asked is not None:
        lines.append("  asked")
    if decided is not None:
        words = "allowed" if decided.allowed else f"denied: {decided.reason}"
        edited = "" if decided.args is None else f" with {json_text(decided.args)}"
        lines.append(f"  {words}{edited} (by {decided.by})")
    lines += [f"  {line}" for line in _steps_lines(call.steps)]
    if result is not None:
        lines.append(f"  {'result' if result.success else 'failed'}:")
        lines += [f"    {line}" for line in result.text.split("\n")]
    return lines


def _steps_lines(steps: list[Any]) -> list[str]:
    lines = []
    for step in steps:
        if isinstance(step, Message):
            lines.append(f"says: {step.text}")
        elif isinstance(step, CallRecord):
            lines += _call_lines(step)
        else:
            lines.append(f"spawns {step.agent} [{step.spawned.label}]: {step.spawned.task}")
    return lines


def _ending_lines(record: RunRecord) -> list[str]:
    ended = record.ended
    if ended is None:
        return ["no ending"]
    lines = [f"status: {ended.status}", f"error: {ended.error_details}", f"structured: {json_text(ended.structured)}"]
    for name, text in (("response", ended.final_response), ("partial", ended.partial)):
        lines += [f"{name}:", *(f"  {line}" for line in text.split("\n"))]
    return lines
