"""The text that one run says, piece by piece: a fold of its deltas and events. Knows no watcher and no log.

A delta is shown at once and never again, so a reader that comes late or is slow misses some. The event of the whole
reply always comes. So pieces are given as they arrive while they follow on one another, and the rest with the event:
every reply is given once and whole.
"""

from __future__ import annotations

from retinue.core.events import Delta, Event, Message, RunEnded, TurnStarted

BETWEEN_REPLIES = "\n\n"


class SpokenText:
    """Gives each reply of a run once, with a blank line between two. Words of host-side functions and thinking are not
    part of it. A run that has no model gives its answer when it is done."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._turn = 0
        self._given = ""  # of the reply of this turn
        self._early: list[Delta] = []  # of a turn whose event has not come yet
        self._has_begun = False

    def apply(self, item: Event | Delta) -> list[str]:
        """Fold one item; return the pieces that can be given now."""
        if item.run != self._run:
            return []
        if isinstance(item, Delta):
            return self._apply_delta(item) if item.kind == "text" else []
        match item.body:
            case TurnStarted(turn=turn):
                self._turn, self._given = turn, ""
                early, self._early = self._early, []
                return [piece for delta in early for piece in self._apply_delta(delta)]
            case Message(text=text, host=False):
                return self._finish_reply(text)
            case RunEnded(status="done", structured=None, final_response=text) if not self._has_begun:
                return self._finish_reply(text)
        return []

    def _apply_delta(self, delta: Delta) -> list[str]:
        if delta.turn > self._turn:
            self._early.append(delta)
            return []
        if delta.turn == self._turn and delta.offset == 0:  # the reply begins, or begins again after a failed attempt
            self._given = delta.text
            return self._begin_reply(delta.text)
        if delta.turn == self._turn and delta.offset == len(self._given):
            self._given += delta.text
            return [delta.text]
        return []

    def _begin_reply(self, text: str) -> list[str]:
        pieces = [BETWEEN_REPLIES, text] if self._has_begun else [text]
        self._has_begun = True
        return pieces

    def _finish_reply(self, text: str) -> list[str]:
        given, self._given = self._given, ""
        if given and text.startswith(given):
            rest = text[len(given) :]
            return [rest] if rest else []
        return self._begin_reply(text) if text and text.strip() != given.strip() else []
