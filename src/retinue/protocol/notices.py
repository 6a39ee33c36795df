"""Notices: one-line texts about which agent calls which tool or subagent, and when the call is over.

This module has the exact texts of A2A supervisors, a parser for agents that send nothing else, and the fold that makes
notices of a tree's events. Pure. A text is a notice only if the whole text has one of these forms. Any other text, with
or without an emoji, is an ordinary message. The plans that a model writes in brackets are shown to the user, but are
not part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from retinue.core.events import Delta, Event, Message, RunEnded, RunSpawned, ToolCall, ToolResult, TurnStarted
from retinue.core.replies import ReplyFold, ReplyPiece
from retinue.core.results import FINAL_ANSWER
from retinue.core.teams import is_team_call
from retinue.protocol.subagent_tools import CONTINUE, SPAWN
from retinue.protocol.subagents import SPAWN_ONE

STARTS, DONE, FAILED = "🔧", "✅", "❌"
PLAN_OPENS, PLAN_CLOSES = "⟦", "⟧"
NAME_CHARACTERS = 128
_NAME = rf"(?:\*\*)?(?P<target>[\w.\-/]{{1,{NAME_CHARACTERS}}})(?:\*\*)?"
_AGENT = r"(?:(?:\*\*)?(?P<agent>[\w][\w .\-]{0,63})(?:\*\*)?: )?"
_FORMS = (
    (re.compile(rf"{STARTS} {_AGENT}Calling tool: {_NAME}"), False, True),
    (re.compile(rf"(?P<mark>{DONE}|{FAILED}) {_AGENT}Tool {_NAME} (?P<how>completed|failed)"), False, False),
    (re.compile(rf"{STARTS} {_AGENT}Calling {_NAME}\.\.\."), True, True),
    (re.compile(rf"(?P<mark>{DONE}|{FAILED}) {_AGENT}{_NAME} (?P<how>completed|failed)"), True, False),
)
_WORD = re.compile(r"[^\W\d_]+")
SUBAGENT_PREFIX = "subagent_"
_SPAWNING = frozenset({SPAWN, SPAWN_ONE, CONTINUE, FINAL_ANSWER})


class Notice(msgspec.Struct, frozen=True, gc=False):
    """The start or the end of a call: `agent` calls `target`, a tool or (`is_agent`) another agent. In a parsed notice
    `agent` may be empty."""

    agent: str
    target: str
    is_agent: bool = False
    is_start: bool = True
    success: bool = True

    @property
    def text(self) -> str:
        """The line that a user reads."""
        agent, target = format_name(self.agent), format_name(self.target)
        if self.is_start:
            return (
                f"{STARTS} {agent}: Calling {target}..."
                if self.is_agent
                else f"{STARTS} {agent}: Calling tool: {target}"
            )
        what = target if self.is_agent else f"Tool {target}"
        return f"{DONE} {agent}: {what} completed" if self.success else f"{FAILED} {agent}: {what} failed"


def format_name(name: str) -> str:
    """Return a name with each word capitalized; underscores stay. Characters that a name cannot have, such as those of
    markup or of terminal escapes, become `-`."""
    kept = "".join(c if c.isalnum() or c in "_-./ " else "-" for c in name[:NAME_CHARACTERS])
    return _WORD.sub(lambda word: word[0][0].upper() + word[0][1:], kept.strip())


def parse_notice(text: str) -> Notice | None:
    """Return the notice in `text`, or None if the text as a whole is not a notice."""
    line = text.strip()
    for form, is_agent, is_start in _FORMS:
        found = form.fullmatch(line)
        if found is None:
            continue
        parts = found.groupdict()
        success = parts.get("how") != "failed"
        if not is_start and (parts["mark"] == DONE) != success:
            return None
        return Notice(parts["agent"] or "", parts["target"], is_agent=is_agent, is_start=is_start, success=success)
    return None


def remove_plans(text: str) -> str:
    """Return a text without its plans and their brackets."""
    if PLAN_OPENS not in text:
        return text
    return "".join(piece for is_plan, piece in split_plans(text, is_plan=False) if not is_plan).strip()


def split_plans(text: str, *, is_plan: bool) -> Iterator[tuple[bool, str]]:
    """Yield the pieces of a text, each with a flag that says whether the piece is part of a plan, brackets included.

    `is_plan` says whether the text begins within a plan."""
    while text:
        mark = PLAN_CLOSES if is_plan else PLAN_OPENS
        at = text.find(mark)
        if at < 0:
            yield is_plan, text
            return
        end = at + len(mark) if is_plan else at
        if end:
            yield is_plan, text[:end]
        text, is_plan = text[end:], not is_plan


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece of a plan or an answer of the primary. `part` is the number of that plan or answer. `is_new` starts the
    part, or starts it again if the model restarted the reply. `is_last` ends the part and has no text."""

    part: int
    text: str = ""
    is_plan: bool = False
    is_new: bool = False
    is_last: bool = False


class NoticeFold:
    """The fold of a tree's events and deltas for the user of a served agent: notices of calls, and the plan and the
    answer of the primary, each once, in log order. The text of a child is the result of a call, so the user does not
    see it. Notices name the primary by the parameter `primary`, or by its agent name if `primary` is empty."""

    def __init__(self, primary: str = "") -> None:
        self._names: dict[int, str] = {0: primary} if primary else {}
        self._parents: dict[int, int] = {}
        self._calls: dict[tuple[int, str], str] = {}
        self._speech = _Speech()
        self._has_answered = False

    def apply(self, item: Event | Delta) -> list[Notice | TextPiece]:
        """Return the notices and words that an event or a delta adds."""
        if isinstance(item, Delta):
            is_spoken = item.run == 0 and item.kind == "text"
            return [*self._speech.hear(item)] if is_spoken else []
        return [*self._apply_event(item)]

    def _apply_event(self, event: Event) -> Iterator[Notice | TextPiece]:
        run, body = event.run, event.body
        match body:
            case RunSpawned(parent=parent):
                self._names.setdefault(run, event.agent)
                if parent is not None:
                    self._parents[run] = parent
                    yield Notice(self._names.get(parent, ""), event.agent, is_agent=True)
            case ToolCall(name=name) if _is_shown(body):
                self._calls[run, body.call_id] = name
                yield Notice(self._names.get(run, event.agent), name)
            case ToolResult(call_id=call_id, success=success):
                name = self._calls.pop((run, call_id), "")
                if name:
                    yield Notice(self._names.get(run, event.agent), name, is_start=False, success=success)
            case TurnStarted(turn=turn) if run == 0:
                yield from self._speech.begin_turn(turn)
            case Message(text=text, final=final) if run == 0:
                self._has_answered = self._has_answered or final
                yield from self._speech.finish_reply(text)
            case RunEnded():
                yield from self._end_run(event, body)

    def _end_run(self, event: Event, body: RunEnded) -> Iterator[Notice | TextPiece]:
        run = event.run
        for key in [key for key in self._calls if key[0] == run]:
            yield Notice(self._names.get(run, event.agent), self._calls.pop(key), is_start=False, success=False)
        if run in self._parents:
            parent = self._names.get(self._parents[run], "")
            yield Notice(parent, event.agent, is_agent=True, is_start=False, success=body.status == "done")
        elif run == 0:
            is_unsaid = body.status == "done" and not self._has_answered and bool(body.final_response)
            yield from self._speech.finish_reply(body.final_response if is_unsaid else None)


def _is_shown(call: ToolCall) -> bool:
    """Return True if a call gets notices of its own. A call that makes runs does not, because the notices name the
    runs. A team member's answer or vote does not, because it is not work of the member."""
    is_spawning = call.name in _SPAWNING or call.name.startswith(SUBAGENT_PREFIX)
    return not is_spawning and not is_team_call(call) and (not call.host or bool(call.within))


class _Speech:
    """The replies of the primary, each split into parts (plan, answer)."""

    def __init__(self) -> None:
        self._replies = ReplyFold()
        self._part, self._first_part = 0, 0
        self._is_open = self._is_plan = False

    def hear(self, delta: Delta) -> Iterator[TextPiece]:
        yield from self._show(self._replies.add_delta(delta))

    def begin_turn(self, turn: int) -> Iterator[TextPiece]:
        yield from self._close()
        self._first_part = self._part
        yield from self._show(self._replies.begin_turn(turn))

    def finish_reply(self, text: str | None) -> Iterator[TextPiece]:
        """Give the rest of a reply whose full `text` is now known, and end the reply. None ends an incomplete
        reply."""
        if text is not None:
            yield from self._show(self._replies.finish_reply(text))
        yield from self._close()
        self._first_part = self._part

    def _show(self, pieces: list[ReplyPiece]) -> Iterator[TextPiece]:
        for piece in pieces:
            if piece.again:  # replace the text given so far
                self._part, self._is_open = self._first_part, False
            if piece.begins:
                self._is_plan = False
            yield from self._say(piece.text)

    def _say(self, text: str) -> Iterator[TextPiece]:
        for is_plan, piece in split_plans(text, is_plan=self._is_plan):
            shown = piece
            if is_plan != self._is_plan:
                yield from self._close()
                self._is_plan = is_plan
            if not self._is_open:
                shown = piece.lstrip()
                if not shown:
                    continue
                self._part += 1
            yield TextPiece(self._part, shown, is_plan=is_plan, is_new=not self._is_open)
            self._is_open = True
            if is_plan and piece.endswith(PLAN_CLOSES):
                yield from self._close()
                self._is_plan = False

    def _close(self) -> Iterator[TextPiece]:
        if self._is_open:
            self._is_open = False
            yield TextPiece(self._part, is_plan=self._is_plan, is_last=True)
