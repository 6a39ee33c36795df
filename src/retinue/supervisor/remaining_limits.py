"""The remaining limits of a run, for a server elsewhere that it calls: levels, time, tokens, money, and its trace."""

from __future__ import annotations

from retinue.core.caller import Caller
from retinue.core.ports import Clock
from retinue.supervisor.budgets import NO_COST
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree


def left_to(tree: Tree, run: Run, clock: Clock) -> Caller:
    """Return the narrowest of the run's own limits and of those above it."""
    accounts = () if run.account is None else run.account.chain
    tokens = [account.tokens - account.spent.tokens for account in accounts if account.tokens is not None]
    costs = [account.cost - account.spent.cost for account in accounts if account.cost is not None]
    return Caller(
        depth=max(0, run.max_depth - run.depth),
        deadline=_deadline(run, clock),
        tokens=max(0, min(tokens)) if tokens else None,
        cost=max(NO_COST, min(costs)) if costs else None,
        traceparent=f"00-{tree.trace_id}-{run.view.spawned.span_id}-01",
    )


def _deadline(run: Run, clock: Clock) -> float | None:
    """Return the second since 1970 at which the first of the run and those above it is out of time."""
    found: list[float] = []
    above: Run | None = run
    while above is not None:
        if above.deadline is not None:
            found.append(above.deadline.seconds_left)
        above = above.parent
    return clock.wall() + max(0.0, min(found)) if found else None
