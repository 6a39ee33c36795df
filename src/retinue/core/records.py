"""Records of model requests and of runs, and the differences between them.

A `RecordedExchange` is one model request and its reply; a cassette is a list of exchanges. A `RunRecord` is a whole
run of a log, split into its turns. Both show a request as lines of text, so that a person can read the difference.
Knows neither files nor models: `config/cassettes.py` stores exchanges, `log/threads.py` makes run records from events,
and `models/recorded.py` plays the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Any

import msgspec

from retinue.core.control import Control
from retinue.core.errors import Stop
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Inbox,
    Message,
    RunEnded,
    RunSpawned,
    ToolCall,
    ToolResult,
    decode_raw,
)
from retinue.core.messages import AssistantTurn, Reply, Request, ToolSpec, ToolTurn, Turn, UserTurn
from retinue.core.ports import Log
from retinue.core.profiles import Profile, Task
from retinue.core.usage import NO_USAGE, Usage

CONTEXT_LINES = 3


class EndOfRecord(Stop):
    """A replayed run has reached the end of its record."""


@dataclass(frozen=True)
class RecordedRequest:
    """The recorded part of a model request: the model's name and everything the model sees.

    The system prompt is kept without the run's folders, which belong to a single machine and tree."""

    model: str
    system: str
    thread: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...]

    @classmethod
    def from_request(cls, request: Request) -> RecordedRequest:
        system = request.system
        if request.folders:
            system = system.removesuffix(request.folders).removesuffix("\n\n")
        return cls(request.model, system, tuple(request.thread), request.tools)

    def format_lines(self) -> list[str]:
        """Return the request as readable lines, without data that only the provider can read."""
        lines = [f"model: {self.model}", *_format_part("system", self.system)]
        for turn in self.thread:
            if isinstance(turn, UserTurn):
                lines += _format_part(f"user ({turn.source})", turn.text)
            elif isinstance(turn, ToolTurn):
                outcome = "result" if turn.success else "failed"
                lines += _format_part(f"{outcome} of {turn.name} ({turn.call_id})", turn.text)
            else:
                lines += _format_reply(turn)
                lines += [f"call {call.name} ({call.id}): {_format_json(call.args)}" for call in turn.calls]
        for tool in self.tools:
            lines += [*_format_part(f"tool {tool.name}", tool.description), f"  {_format_json(tool.schema)}"]
        return lines


@dataclass(frozen=True)
class RecordedExchange:
    """One model request of a run and its reply. `reply` is None if the run ended before it.

    `run` is the run's path. On a cassette each part of the path is numbered below its parent, and trees are numbered
    from 1."""

    run: str
    turn: int
    agent: str
    request: RecordedRequest
    reply: Reply | None = None
    tree: int = 1

    @property
    def key(self) -> tuple[int, str, int]:
        return self.tree, self.run, self.turn


@dataclass
class CallRecord:
    """One tool call. `steps` are the messages, questions and spawns of a host-side function during the call."""

    body: ToolCall
    asked: ApprovalAsked | None = None
    decided: ApprovalDecided | None = None
    result: ToolResult | None = None
    steps: list[Step] = field(default_factory=list)

    def apply(self, body: ApprovalAsked | ApprovalDecided | ToolResult) -> None:
        """Add an event of the call."""
        match body:
            case ApprovalAsked():
                self.asked = body
            case ApprovalDecided():
                self.decided = body
            case ToolResult():
                self.result = body


@dataclass
class TurnRecord:
    """A turn. `inbox` came before the turn. `thread` is the thread as the model saw it. `reply` is None if the model
    gave none. `whole` is True if the turn ended."""

    number: int
    inbox: list[Inbox]
    thread: tuple[Turn, ...]
    reply: Reply | None = None
    calls: dict[str, CallRecord] = field(default_factory=dict)
    whole: bool = False
    usage: Usage = NO_USAGE

    def set_reply(self, reply: Reply | None) -> None:
        self.reply = reply

    def add_usage(self, usage: Usage) -> None:
        self.usage += usage

    def end(self) -> None:
        """Mark the turn as whole. A turn without any text or call has an empty reply."""
        self.whole, self.reply = True, self.reply or Reply()


@dataclass
class RunRecord:
    """One run of a log. A run without a model (a callable, a client) has no turns, only `steps`.

    `cut` says why the record stops before the run's own ending; empty if it does not."""

    number: int
    path: str
    agent: str
    spawned: RunSpawned
    turns: list[TurnRecord] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    children: list[RunRecord] = field(default_factory=list)
    ended: RunEnded | None = None
    cut: str = ""
    events: int = 0
    is_remote: bool = False

    def mark_remote(self) -> None:
        """Note that a peer ran this. The record has what the peer reported, and nothing that a replay could do again
        but the ending."""
        self.is_remote = True

    def count_event(self) -> None:
        self.events += 1

    def cut_off(self, why: str) -> None:
        """Let the record stop here, before the run's own ending."""
        self.cut = why

    def end(self, ended: RunEnded) -> None:
        self.ended = ended

    @property
    def instructions(self) -> str:
        """The system prompt without the parts that the supervisor adds: the context of the task, and the folders."""
        profile = decode_raw(self.spawned.profile)
        return str(profile.get("system") or profile.get("instructions") or "")

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        return msgspec.convert(decode_raw(self.spawned.tools), tuple[ToolSpec, ...])

    def find_turn(self, number: int) -> TurnRecord | None:
        return self.turns[number - 1] if 0 < number <= len(self.turns) else None

    def find_exchange(self, number: int) -> RecordedExchange | None:
        """Return the model call of turn `number`, with its usage from the log, or None if there is no such turn."""
        turn = self.find_turn(number)
        if turn is None:
            return None
        request = RecordedRequest(
            model=self.spawned.model,
            system="\n\n".join(part for part in (self.instructions, self.spawned.task_context) if part),
            thread=turn.thread,
            tools=self.tools,
        )
        reply = None if turn.reply is None else msgspec.structs.replace(turn.reply, usage=turn.usage)
        return RecordedExchange(run=self.path, turn=number, agent=self.agent, request=request, reply=reply)


Step = Message | CallRecord | RunRecord


@dataclass(frozen=True)
class Difference:
    """The first place where a run differs from its record, with the lines of a diff. `what` names the part: request,
    call, turn, steps, ending, or the whole run."""

    run: int
    path: str
    turn: int
    what: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class ReplayableTree:
    """A recorded tree that can be run once more. `open_control` returns the Control of the replay, which writes to a
    log and calls no model and no tool. Spawning `primary` there starts it. While it runs, `differences`, by run, and
    `notes` are added."""

    primary: tuple[Profile, Task]
    open_control: Callable[[Log, Path], Control]
    differences: Mapping[int, Difference]
    notes: Sequence[str]


def diff_lines(recorded: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Return the lines of a diff from `recorded` to `now`; none if they are equal."""
    return tuple(unified_diff(recorded, now, "recorded", "now", lineterm="", n=CONTEXT_LINES))


def compare_runs(recorded: RunRecord, now: RunRecord | None) -> Difference | None:
    """Return the first place where a run differs from its record, or None if there is none.

    Compares turn by turn, never by how runs interleaved: concurrent steps may happen in any order. Ignores times,
    prices, the ids of runs, and warnings, which depend on the moment."""

    def compare_lines(turn: int, what: str, then: list[str], lines: list[str]) -> Difference | None:
        diff = diff_lines(then, lines)
        return Difference(run=recorded.number, path=recorded.path, turn=turn, what=what, lines=diff) if diff else None

    if now is None:
        return compare_lines(0, "run", [f"{recorded.agent}: {recorded.spawned.task}"], [])
    for turn in recorded.turns:
        if recorded.cut and not turn.whole:
            return None
        found = compare_lines(turn.number, "turn", _format_turn(turn), _format_turn(now.find_turn(turn.number)))
        if found is not None:
            return found
    if recorded.cut:
        return None
    extra = now.find_turn(len(recorded.turns) + 1)
    if extra is not None:
        return compare_lines(extra.number, "turn", [], _format_turn(extra))
    steps = compare_lines(0, "steps", _format_steps(recorded.steps), _format_steps(now.steps))
    return steps or compare_lines(len(recorded.turns), "ending", _format_ending(recorded), _format_ending(now))


def _format_turn(turn: TurnRecord | None) -> list[str]:
    """Return the lines of a turn. Calls are sorted by id, because the calls of one reply run concurrently."""
    if turn is None:
        return []
    reply = turn.reply or Reply()
    lines = [f"turn {turn.number}", *_format_reply(reply)]
    lines += [f"search {done.name} ({done.id}): {_format_json(done.args)}: {done.result}" for done in reply.natives]
    for _, call in sorted(turn.calls.items()):
        lines += _format_call_record(call)
    return lines


def _format_reply(reply: Reply | AssistantTurn) -> list[str]:
    lines = [line for thought in reply.thoughts for line in _format_part("thinking", thought.text)]
    return lines + (_format_part("assistant", reply.text) if reply.text else [])


def _format_call_record(call: CallRecord) -> list[str]:
    body, decided, result = call.body, call.decided, call.result
    lines = [f"call {body.name} ({body.call_id}, {body.tier}): {_format_json(body.args)}"]
    if call.asked is not None:
        lines.append("  asked")
    if decided is not None:
        decision = "allowed" if decided.allowed else f"denied: {decided.reason}"
        edited = "" if decided.args is None else f" with {_format_json(decided.args)}"
        lines.append(f"  {decision}{edited} (by {decided.by})")
    lines += [f"  {line}" for line in _format_steps(call.steps)]
    if result is not None:
        lines.append(f"  {'result' if result.success else 'failed'}:")
        lines += [f"    {line}" for line in result.text.split("\n")]
    return lines


def _format_steps(steps: Sequence[Step]) -> list[str]:
    lines = []
    for step in steps:
        if isinstance(step, Message):
            lines.append(f"says: {step.text}")
        elif isinstance(step, CallRecord):
            lines += _format_call_record(step)
        else:
            lines.append(f"spawns {step.agent} [{step.spawned.label}]: {step.spawned.task}")
    return lines


def _format_ending(record: RunRecord) -> list[str]:
    ended = record.ended
    if ended is None:
        return ["no ending"]
    return [
        f"status: {ended.status}",
        f"error: {ended.error_details}",
        f"structured: {_format_json(ended.structured)}",
        *_format_part("response", ended.final_response),
        *_format_part("partial", ended.partial),
    ]


def _format_part(title: str, text: str) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in text.split("\n"))]


def _format_json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=repr, order="sorted").decode()
