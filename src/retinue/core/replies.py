"""The fold of one run's deltas and events into its replies: each reply once and complete.

Deltas are shown at once and never replayed. So they can arrive before the event that begins their turn, and a late or
slow reader misses some. The event with the whole reply always comes. The fold gives the pieces of a reply as they
arrive while they are contiguous, and the rest with the event. This module is in core because a `RunHandle` streams
the text of its run; the views of a tree, in `log/`, fold replies by it too.
"""

from __future__ import annotations

import msgspec

from retinue.core.events import Delta, Event, Message, RunEnded, TurnStarted

BETWEEN_REPLIES = "\n\n"


class ReplyPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece of a reply. `begins` marks the first piece of a reply; `again` says that the same reply begins again,
    because the model was asked once more after a failure."""

    text: str
    begins: bool = False
    again: bool = False


class ReplyFold:
    """The fold of the deltas, turns and whole replies of one run."""

    def __init__(self) -> None:
        self._turn = 0
        self._given = ""  # text of this turn's reply, as far as it was given
        self._is_whole = False  # the whole reply was given: later deltas of this turn are late
        self._early: list[Delta] = []  # deltas of a turn that has not begun yet

    def begin_turn(self, turn: int) -> list[ReplyPiece]:
        self._turn, self._given, self._is_whole = turn, "", False
        early, self._early = self._early, []
        return [piece for delta in early for piece in self.add_delta(delta)]

    def add_delta(self, delta: Delta) -> list[ReplyPiece]:
        """Fold a delta of the kind `text`."""
        if delta.turn > self._turn:
            self._early.append(delta)
            return []
        if self._is_whole or delta.turn < self._turn:
            return []
        if delta.offset == 0:
            again, self._given = bool(self._given), delta.text
            return [ReplyPiece(delta.text, begins=True, again=again)]
        if delta.offset == len(self._given):
            self._given += delta.text
            return [ReplyPiece(delta.text)]
        return []

    def finish_reply(self, text: str) -> list[ReplyPiece]:
        """Fold the whole text of a reply. A remote run may give several replies in one turn: of all but the first, only
        the whole text is given."""
        given, self._given, self._is_whole = self._given, "", True
        # The given text need not belong to this reply: the deltas of the last attempt may have been dropped, an A2A
        # agent may replace what it streamed, and the deltas of a program's own model may differ from its reply. No
        # field of the event tells these cases, so the texts decide.
        if given and text.startswith(given):
            return [ReplyPiece(text[len(given) :])] if len(text) > len(given) else []
        if not text or text.strip() == given.strip():
            return []
        return [ReplyPiece(text, begins=True, again=bool(given))]


class SpokenText:
    """The fold of a run's deltas and events into its text, with a blank line between two replies. Thinking and messages
    of host-side functions are left out. A run without a model gives its answer when it is done."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._replies = ReplyFold()
        self._has_begun = False

    def apply(self, item: Event | Delta) -> list[str]:
        """Fold an item. Return the pieces of text to show now."""
        return [text for piece in self._fold_item(item) for text in self._separate(piece)]

    def _fold_item(self, item: Event | Delta) -> list[ReplyPiece]:
        if item.run != self._run:
            return []
        if isinstance(item, Delta):
            return self._replies.add_delta(item) if item.kind == "text" else []
        match item.body:
            case TurnStarted(turn=turn):
                return self._replies.begin_turn(turn)
            case Message(text=text, host=False):
                return self._replies.finish_reply(text)
            case RunEnded(status="done", structured=None, final_response=text) if not self._has_begun:
                return self._replies.finish_reply(text)
        return []

    def _separate(self, piece: ReplyPiece) -> list[str]:
        has_begun, self._has_begun = self._has_begun, True
        return [BETWEEN_REPLIES, piece.text] if piece.begins and has_begun else [piece.text]
