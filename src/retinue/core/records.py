"""A recorded run, taken apart by its turns: what it was asked, answered and given. Made by a fold in `log/`, played by
`retinue replay`. Also how a request reads as lines of text, so that two of them can be told apart by a person."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from typing import Any

import msgspec

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
)
from retinue.core.messages import AssistantTurn, Call, Reply, ToolSpec, ToolTurn, Turn, UserTurn
from retinue.core.usage import NO_USAGE, Usage

CONTEXT_LINES = 3
_FOLDERS = re.compile(r"(?:\n\n|\A)Your workspace is .*\. You may also read: .*\.\Z")


class EndOfRecord(Stop):
    """A replayed run has come to where its record ends."""


@dataclass
class CallRecord:
    """One tool call. `steps` are what a host-side function did in it: what it said, asked and spawned."""

    body: ToolCall
    asked: ApprovalAsked | None = None
    decided: ApprovalDecided | None = None
    result: ToolResult | None = None
    steps: list[Message | CallRecord | RunRecord] = field(default_factory=list)


@dataclass
class TurnRecord:
    """One turn. `inbox` came before it; `reply` is None where the model gave none; `whole` says that it was ended."""

    number: int
    inbox: list[Inbox] = field(default_factory=list)
    reply: Reply | None = None
    calls: dict[str, CallRecord] = field(default_factory=dict)
    whole: bool = False
    usage: Usage = NO_USAGE


@dataclass
class RunRecord:
    """One run. `cut` says why its record does not go to an ending of its own making, where that is so. A run without
    a model (a callable, a client) has no turns, only `steps`."""

    number: int
    path: str
    agent: str
    spawned: RunSpawned
    turns: list[TurnRecord] = field(default_factory=list)
    steps: list[Message | CallRecord | RunRecord] = field(default_factory=list)
    children: list[RunRecord] = field(default_factory=list)
    ended: RunEnded | None = None
    cut: str = ""
    events: int = 0

    def turn(self, number: int) -> TurnRecord | None:
        return self.turns[number - 1] if 0 < number <= len(self.turns) else None

    def thread(self, number: int) -> list[Turn]:
        """What the model saw in that turn."""
        thread: list[Turn] = [UserTurn(self.spawned.task)]
        for turn in self.turns[:number]:
            thread += [UserTurn(words.text, words.source) for words in turn.inbox]
            if turn.number == number or turn.reply is None:
                break
            thread.append(AssistantTurn(turn.reply.text, turn.reply.calls, turn.reply.thoughts, turn.reply.natives))
            for call in turn.reply.calls:
                result = turn.calls[call.id].result
                if result is not None:
                    thread.append(ToolTurn(call.id, call.name, result.text, result.success))
        return thread

    def system(self) -> str:
        """The system prompt, without the folders of the run."""
        profile = plain(self.spawned.profile)
        words = profile.get("system") or profile.get("instructions") or ""
        return "\n\n".join(part for part in (words, self.spawned.task_context) if part)

    def tools(self) -> tuple[ToolSpec, ...]:
        return msgspec.convert(plain(self.spawned.tools), tuple[ToolSpec, ...])


@dataclass(frozen=True)
class Difference:
    """Where a run departs from its record: in the request, a call or the ending of which turn, as lines of a diff."""

    run: int
    path: str
    turn: int
    what: str
    lines: tuple[str, ...]


Departed = Callable[[int, str, Sequence[str], Sequence[str]], Any]


def plain(value: msgspec.Raw | Any) -> Any:
    """A part of an event that is kept as the JSON it came as."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def request_lines(system: str, thread: Sequence[Turn], tools: Sequence[ToolSpec]) -> list[str]:
    """A request as a person reads it. What a provider needs to read its own thinking again is left out, and so are the
    folders that the supervisor names."""
    lines = _part("system", words_of(system))
    for turn in thread:
        if isinstance(turn, UserTurn):
            lines += _part(f"user ({turn.source})", turn.text)
        elif isinstance(turn, ToolTurn):
            lines += _part(f"{'result' if turn.success else 'failed'} of {turn.name} ({turn.call_id})", turn.text)
        else:
            lines += reply_lines(turn.text, turn.calls, [thought.text for thought in turn.thoughts])
    for tool in tools:
        lines += [*_part(f"tool {tool.name}", tool.description), f"  {json_text(tool.schema)}"]
    return lines


def words_of(system: str) -> str:
    """A system prompt without the folders that the supervisor names in it: they are of one machine and one tree."""
    return _FOLDERS.sub("", system)


def reply_lines(text: str, calls: Sequence[Call], thoughts: Sequence[str]) -> list[str]:
    lines = [line for thought in thoughts for line in _part("thinking", thought)]
    lines += _part("assistant", text) if text else []
    return lines + [f"call {call.name} ({call.id}): {json_text(call.args)}" for call in calls]


def difference_lines(expected: Sequence[str], actual: Sequence[str], *, now: str) -> tuple[str, ...]:
    """What differs, from `recorded` to `now`."""
    diff = unified_diff(expected, actual, "recorded", now, lineterm="", n=CONTEXT_LINES)
    return tuple(diff)


def json_text(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=repr, order="sorted").decode()


def _part(title: str, text: str) -> list[str]:
    return [f"{title}:", *(f"  {line}" for line in text.split("\n"))]
