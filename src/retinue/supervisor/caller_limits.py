"""Limits of runs across processes.

The call of a run elsewhere that is served here: what is left to that run bounds every run that the call makes. Tasks
that start while the call is served belong to it, so runs that its runs make do too. And the other way: what is left to
a run of ours, for a server elsewhere that it calls: levels, time, tokens, money, and its trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from retinue.core.caller import Caller
from retinue.core.errors import DEPTH_EXCEEDED, SpawnRefused
from retinue.core.ports import Clock
from retinue.supervisor.budgets import NO_COST, Account
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree


class ServedCall:
    """One call that is served. `account` is what all its runs together may spend; the first of them opens it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.account: Account | None = None

    def reported_as(self, tree: str) -> str:
        """Return the run id under which the primary of a tree is reported, or else that of the run it stands for."""
        return self.caller.run_id or self.caller.parent_id or f"{tree}-0"

    def shared(self, above: Account | None) -> Account | None:
        """Return the account of a run below one with this account: all runs of a call share what is left to the
        caller."""
        if self.caller.tokens is None and self.caller.cost is None:
            return above
        if self.account is None:
            self.account = Account("the caller", tokens=self.caller.tokens, cost=self.caller.cost, parent=above)
        return above if above is not None and self.account in above.chain else self.account


CALL: ContextVar[ServedCall | None] = ContextVar("retinue_call", default=None)


@contextmanager
def serve_caller(caller: Caller) -> Iterator[None]:
    """Bound the runs that are made inside by what is left to the caller."""
    token = CALL.set(ServedCall(caller))
    try:
        yield
    finally:
        CALL.reset(token)


def narrow(max_depth: int, seconds: float | None, *, depth: int, now: float) -> tuple[int, float | None]:
    """Return the levels and the time of a run at this depth that is made now, within what is left to the caller."""
    call = CALL.get()
    if call is None:
        return max_depth, seconds
    left = call.caller
    if left.depth is not None:
        max_depth = min(max_depth, depth + left.depth - 1)
    return max_depth, left.limit_seconds(seconds, now)


def check_depth(name: str) -> None:
    """Raise SpawnRefused if no level is left to the caller for another run."""
    call = CALL.get()
    if call is not None and not call.caller.may_spawn:
        raise SpawnRefused(DEPTH_EXCEEDED.format(depth=0, limit=0, name=name))


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
        baggage=tree.trace_origin.baggage,
    )


def _deadline(run: Run, clock: Clock) -> float | None:
    """Return the second since 1970 at which the first of the run and those above it is out of time."""
    found = [each.deadline.seconds_left for each in run.lineage if each.deadline is not None]
    return clock.wall() + max(0.0, min(found)) if found else None
