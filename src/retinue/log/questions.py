"""The closing of a question, read from events: who answered, on which surface, and when."""

from __future__ import annotations

from collections.abc import AsyncIterable

from retinue.core.approvals import QuestionClosed
from retinue.core.events import ApprovalDecided, Delta, Event, RunEnded


async def find_closing(events: AsyncIterable[Event | Delta], approval_id: str) -> QuestionClosed:
    """Return how a question was closed, from the events of its tree. Pass a log's events, or those of a watch if the
    answer may not be written yet. The ending of its run closes a question without an answer."""
    async for event in events:
        if isinstance(event, Delta):
            continue
        match event.body:
            case ApprovalDecided() as decided if decided.approval_id == approval_id:
                return QuestionClosed(
                    id=approval_id,
                    allowed=decided.allowed,
                    by=decided.by,
                    surface=decided.surface,
                    reason=decided.reason,
                    at=event.at,
                    key=decided.key,
                )
            case RunEnded() if approval_id.startswith(f"{event.tree}/{event.run}/"):
                break
    return QuestionClosed(approval_id)
