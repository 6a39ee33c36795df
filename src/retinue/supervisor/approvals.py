"""Bringing a question to whoever can answer it. Fails closed: what is not a clear yes is a no."""

from __future__ import annotations

from copy import deepcopy

from retinue.core.approvals import Allow, Approval, Decision, Deny
from retinue.core.errors import Unconfirmed
from retinue.core.events import ApprovalAsked, ApprovalDecided
from retinue.core.messages import Call
from retinue.core.ports import Approver
from retinue.supervisor.nodes import Node
from retinue.supervisor.trees import Tree


async def ask(tree: Tree, node: Node, call: Call, *, preview: str, approver: Approver | None) -> Decision:
    """Asks; the answer is written before it takes effect. The clocks of the run and its ancestors stand still."""
    if approver is None:
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
        decision = await approver(question)
    except Exception as error:  # noqa: BLE001 - the boundary to the approver: one that breaks has not said yes
        decision = Deny(f"the approver failed: {error}")
    finally:
        node.unpause()
    if not isinstance(decision, Allow | Deny):
        decision = Deny(f"the approver answered {decision!r}, which is neither Allow nor Deny")
    allowed = isinstance(decision, Allow)
    reason = "" if isinstance(decision, Allow) else str(decision.reason or "")
    written = tree.write(node, ApprovalDecided(approval_id, call.id, allowed, reason, by="user"), wait=True)
    if written is not None:
        await written
    return decision
