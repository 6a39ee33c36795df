"""The fold of a tree's events and deltas for the user of a served agent: notices of calls, and the plan and the answer
of the primary. Each is given once, in log order.

The text of a child is the result of a call, so the user does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from retinue.core.events import Delta, Event, Message, RunEnded, RunSpawned, ToolCall, ToolResult, TurnStarted
from retinue.core.replies import ReplyFold, ReplyPiece
from retinue.core.results import FINAL_ANSWER
from retinue.log.blocks import is_team_call
from retinue.protocol.notices import PLAN_CLOSES, Notice, split_plans
from retinue.protocol.subagent_tools import CONTINUE, SPAWN
from retinue.protocol.subagents import SPAWN_ONE

SUBAGENT_PREFIX = "subagent_"
_SPAWNING = frozenset({SPAWN, SPAWN_ONE, CONTINUE, FINAL_ANSWER})


class TextPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece of a plan or an answer of the primary. `part` is the number of that plan or answer. `is_new` starts the
    part, or starts it again if the model restarted the reply. `is_last` ends the part and has no text."""

    part: int
    text: str = ""
    is_plan: bool = False
    is_new: bool = False
    is_last: bool = False


class NoticeFold:
    """The fold of one tree. Notices name the primary by the parameter `primary`, or by its agent name if `primary` is
    empty."""

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
