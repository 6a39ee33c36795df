"""The closing of a question, read from events: who answered it, on which surface, and when."""

from __future__ import annotations

from collections.abc import AsyncIterable

from retinue.core.approvals import QuestionClosed
from retinue.core.events import ApprovalDecided, Delta, Event, RunEnded


def read_closing(event: Event | Delta, approval_id: str) -> QuestionClosed | None:
    """Return how an event closes a question; None if it does not. The ending of its run closes it without an answer."""
    if isinstance(event, Delta):
        return None
    match event.body:
        case ApprovalDecided(approval_id=decided_id) as decided if decided_id == approval_id:
            return QuestionClosed(
                id=approval_id,
                allowed=decided.allowed,
                by=decided.by,
                surface=decided.surface,
                reason=decided.reason,
                at=event.at,
            )
        case RunEnded() if approval_id.startswith(f"{event.tree}/{event.run}/"):
            return QuestionClosed(approval_id)
    return None


async def find_closing(events: AsyncIterable[Event | Delta], approval_id: str) -> QuestionClosed:
    """Return how a question was closed, from the events of its tree: those of a log, or those of a watch if the answer
    may not be written yet."""
    async for event in events:
        closed = read_closing(event, approval_id)
        if closed is not None:
            return closed
    return QuestionClosed(approval_id)
