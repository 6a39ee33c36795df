"""Limits that are left to a run, for the peers it asks: levels, time, tokens and money, and its trace."""

from __future__ import annotations

from retinue.core.caller import Caller
from retinue.core.ports import Clock
from retinue.supervisor.budgets import NO_COST
from retinue.supervisor.nodes import Node
from retinue.supervisor.trees import Tree


def left_to(tree: Tree, node: Node, clock: Clock) -> Caller:
    """Return the narrowest of the limits of a run and of those above it."""
    accounts = () if node.account is None else node.account.chain
    tokens = [account.tokens - account.spent.tokens for account in accounts if account.tokens is not None]
    costs = [account.cost - account.spent.cost for account in accounts if account.cost is not None]
    return Caller(
        depth=max(0, node.max_depth - node.depth),
        deadline=_deadline(node, clock),
        tokens=max(0, min(tokens)) if tokens else None,
        cost=max(NO_COST, min(costs)) if costs else None,
        traceparent=f"00-{tree.trace_id}-{node.view.spawned.span_id}-01",
    )


def _deadline(node: Node, clock: Clock) -> float | None:
    """Return the second since 1970 at which the first of the run and those above it is out of time."""
    found: list[float] = []
    above: Node | None = node
    while above is not None:
        if above.deadline is not None:
            found.append(above.deadline.seconds_left)
        above = above.parent
    return clock.wall() + max(0.0, min(found)) if found else None
