"""The questions of a tree, read from its events: which are open, and how one was closed."""

from __future__ import annotations

from collections.abc import AsyncIterable

from retinue.core.approvals import Approval, QuestionClosed
from retinue.core.events import ApprovalAsked, ApprovalDecided, Delta, Event, RunEnded, RunResumed, RunWaiting
from retinue.core.messages import RunRef


class Questions:
    """The fold of a tree's events into its open questions, by id and in the order they were asked.

    A run that has ended, or waits for its next message, asks nothing. A resumed run asks its questions again. A
    question without a digest is answered at a peer: it has a number, but is not open here."""

    def __init__(self) -> None:
        self.open: dict[str, Approval] = {}
        self._count = 0

    def apply(self, event: Event) -> Approval | None:
        """Fold one event. Return the question that it asks, if any."""
        match event.body:
            case ApprovalAsked() as asked:
                self._count += 1
                question = make_approval(event, asked, self._count)
                if asked.digest:
                    self.open[asked.approval_id] = question
                return question
            case ApprovalDecided(approval_id=approval_id):
                self.open.pop(approval_id, None)
            case RunResumed() | RunWaiting() | RunEnded():
                for approval_id in [each.id for each in self.open.values() if each.run == event.run]:
                    del self.open[approval_id]
        return None


def make_approval(source: Event | RunRef, asked: ApprovalAsked, number: int) -> Approval:
    """Return the question of an `approval.asked` event, as surfaces show it. `source` is the event, or the run that
    asks."""
    return Approval(
        id=asked.approval_id,
        tree=source.tree,
        run=source.run,
        path=source.path,
        agent=source.agent,
        tool=asked.tool,
        args=asked.args,
        call_id=asked.call_id,
        label=asked.label,
        preview=asked.preview,
        rule=asked.rule,
        digest=asked.digest,
        number=number,
    )


def make_closing(decided: ApprovalDecided, at: float) -> QuestionClosed:
    """Return how the answer `decided` closed its question."""
    return QuestionClosed(
        id=decided.approval_id,
        allowed=decided.allowed,
        by=decided.by,
        surface=decided.surface,
        reason=decided.reason,
        at=at,
        key=decided.key,
    )


async def find_question(events: AsyncIterable[Event], name: str) -> Approval | None:
    """Return the question of a tree with the number or id `name`, open or closed, or None if there is none."""
    questions = Questions()
    async for event in events:
        asked = questions.apply(event)
        if asked is not None and name in (str(asked.number), asked.id):
            return asked
    return None


async def find_closing(events: AsyncIterable[Event | Delta], approval_id: str) -> QuestionClosed:
    """Return how a question was closed, from the events of its tree. Pass a log's events, or those of a watch if the
    answer may not be written yet. The ending of its run closes a question without an answer."""
    async for event in events:
        if isinstance(event, Delta):
            continue
        match event.body:
            case ApprovalDecided() as decided if decided.approval_id == approval_id:
                return make_closing(decided, event.at)
            case RunEnded() if approval_id.startswith(f"{event.tree}/{event.run}/"):
                break
    return QuestionClosed(approval_id)
