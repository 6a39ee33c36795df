"""Bringing a question to whoever can answer it. Fails closed: what is not a clear yes is a no."""

from __future__ import annotations

import asyncio
from copy import deepcopy

from retinue.core.approvals import Allow, Answered, Approval, Decision, Deny
from retinue.core.errors import Unconfirmed
from retinue.core.events import ApprovalAsked, ApprovalDecided
from retinue.core.messages import Call
from retinue.core.ports import Approver, Clock
from retinue.supervisor.nodes import Node
from retinue.supervisor.trees import Tree


class Desk:
    """The open questions. The first answer is taken, whoever gives it: the attached approver or somebody else."""

    def __init__(self, clock: Clock, *, wait_seconds: float | None) -> None:
        self.wait_seconds = wait_seconds
        self._clock = clock
        self._open: dict[str, tuple[Approval, asyncio.Future[tuple[Decision, str]]]] = {}
        self._answered: set[str] = set()

    def pending(self, tree: str | None = None) -> list[Approval]:
        return [
            question for question, answer in self._open.values() if tree in (None, question.tree) and not answer.done()
        ]

    def answer(self, approval_id: str, decision: Decision, *, by: str) -> Answered:
        found = self._open.get(approval_id)
        if found is None or found[1].done():
            return "stale" if approval_id in self._answered else "unknown"
        self._answered.add(approval_id)
        found[1].set_result((decision, by))
        return "taken"

    async def decide(self, question: Approval, approver: Approver | None) -> tuple[Decision, str]:
        answer: asyncio.Future[tuple[Decision, str]] = asyncio.get_running_loop().create_future()
        self._open[question.id] = question, answer
        asking = asyncio.create_task(self._ask(question, approver))
        try:
            return await answer
        finally:
            del self._open[question.id]
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, question: Approval, approver: Approver | None) -> None:
        decision: Decision
        if approver is None:
            await self._clock.sleep(self.wait_seconds or 0)
            decision = Deny(f"nobody answered within {self.wait_seconds:g} s")
            self.answer(question.id, decision, by="expiry")
            return
        try:
            decision = await approver(question)
        except Exception as error:  # noqa: BLE001 - the boundary to the approver: one that breaks has not said yes
            decision = Deny(f"the approver failed: {error}")
        if not isinstance(decision, Allow | Deny):
            decision = Deny(f"the approver answered {decision!r}, which is neither Allow nor Deny")
        self.answer(question.id, decision, by="user")


async def ask(tree: Tree, node: Node, call: Call, *, preview: str, approver: Approver | None, desk: Desk) -> Decision:
    """Asks; the answer is written before it takes effect. The clocks of the run and its ancestors stand still."""
    if approver is None and desk.wait_seconds is None:
        raise Unconfirmed(call.name)
    label = None if node.parent is None else node.ref.label
    approval_id = f"{tree.id}/{node.ref.run}/{call.id}"
    ref = node.ref
    question = Approval(
        approval_id, tree.id, ref.run, ref.path, ref.agent, call.name, deepcopy(call.args), call.id, label, preview
    )
    tree.write(node, ApprovalAsked(approval_id, call.id, call.name, deepcopy(call.args), label, preview))
    node.pause()
    try:
        decision, by = await desk.decide(question, approver)
    finally:
        node.unpause()
    allowed = isinstance(decision, Allow)
    reason = "" if isinstance(decision, Allow) else str(decision.reason or "")
    written = tree.write(node, ApprovalDecided(approval_id, call.id, allowed, reason, by=by), wait=True)
    if written is not None:
        await written
    return decision
