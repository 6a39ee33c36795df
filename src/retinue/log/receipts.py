"""The fold of events into receipts of the messages that people send to running runs: queued, delivered, or too
late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterable

import msgspec

from retinue.core.events import Event, Inbox, RunEnded, RunWaiting, TurnStarted
from retinue.core.messages import USER_WORDS
from retinue.core.ports import Receipt

ENDED_UNREAD = "the run ended before it read the message"


class MessageReceipt(Receipt, frozen=True, kw_only=True):
    """A receipt made from the log, with the run and the text of the message."""

    run: int
    text: str


class Receipts:
    """The fold of a tree's events, in log order. A message to an idle conversation is its next task and gets no
    receipt."""

    def __init__(self) -> None:
        self._queued: defaultdict[int, list[MessageReceipt]] = defaultdict(list)
        self._idle: set[int] = set()

    def apply(self, event: Event) -> list[MessageReceipt]:
        """Return the new or changed receipts after an event."""
        run = event.run
        match event.body:
            case RunWaiting():
                self._idle.add(run)
            case Inbox(text=text, source=source) if source in USER_WORDS and run not in self._idle:
                receipt = MessageReceipt(seq=event.seq, run=run, text=text, state="queued")
                self._queued[run].append(receipt)
                return [receipt]
            case TurnStarted(turn=turn):
                self._idle.discard(run)
                if run in self._queued:
                    read = self._queued.pop(run)
                    return [msgspec.structs.replace(each, state="delivered", turn=turn) for each in read]
            case RunEnded() if run in self._queued:
                return [
                    msgspec.structs.replace(each, state="too_late", why=ENDED_UNREAD) for each in self._queued.pop(run)
                ]
        return []


async def find_unread(events: AsyncIterable[Event], run: int) -> list[MessageReceipt]:
    """Return the messages of people to a run that it has not read, or never read, from the events of its tree."""
    receipts, newest = Receipts(), dict[int, MessageReceipt]()
    async for event in events:
        if event.run == run:
            newest |= {each.seq: each for each in receipts.apply(event)}
    return [each for each in newest.values() if each.state != "delivered"]
