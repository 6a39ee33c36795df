"""Limits of runs across processes, in both directions.

Inward: a run in another process (the caller) makes a call that is served here. The limits left to the caller bound
every run of this call. Tasks started while the call is served belong to the call, and so do the runs that its runs
spawn.

Outward: a run of ours calls a server in another process. `find_remaining_limits` returns the depth, time, tokens and
money left to the run, and its trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from retinue.core.caller import Caller
from retinue.core.errors import DEPTH_EXCEEDED, SpawnRefused
from retinue.supervisor.budgets import NO_COST, Account
from retinue.supervisor.tree import Run


class ServedCall:
    """One served call. `account` is the shared budget of its runs; the first run opens it."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.account: Account | None = None

    def reported_as(self, tree: str) -> str:
        """Return the run id under which the primary of `tree` is reported: the id given by the call, or else the id of
        the caller's run."""
        return self.caller.run_id or self.caller.parent_id or f"{tree}-0"

    def shared(self, above: Account | None) -> Account | None:
        """Return the account for a run below a run with the account `above`. All runs of a call share the budget left
        to the caller."""
        if self.caller.tokens is None and self.caller.cost is None:
            return above
        if self.account is None:
            self.account = Account("the caller", tokens=self.caller.tokens, cost=self.caller.cost, parent=above)
        return above if above is not None and self.account in above.chain else self.account

    def narrow(self, max_depth: int, seconds: float | None, *, depth: int, now: float) -> tuple[int, float | None]:
        """Return the maximum depth and the timeout of a run at this depth, within the limits left to the caller."""
        left = self.caller
        if left.depth is not None:
            max_depth = min(max_depth, depth + left.depth - 1)
        return max_depth, left.limit_seconds(seconds, now)


CALL: ContextVar[ServedCall | None] = ContextVar("retinue_call", default=None)


@contextmanager
def serve_caller(caller: Caller) -> Iterator[None]:
    """Bound all runs spawned in this context by the limits left to `caller`."""
    token = CALL.set(ServedCall(caller))
    try:
        yield
    finally:
        CALL.reset(token)


def find_caller(name: object, given: Caller | None, process: Caller) -> Caller:
    """Return the given caller, else that of the call that the current task serves, else that of this whole process.
    Raises SpawnRefused if the caller has no level left for the run or profile `name`."""
    call = CALL.get()
    caller = given or (process if call is None else call.caller)
    if not caller.may_spawn:
        raise SpawnRefused(DEPTH_EXCEEDED.format(depth=0, limit=0, name=name))
    return caller


def find_remaining_limits(run: Run) -> Caller:
    """Return the remaining limits of a run: for each, the narrowest of the run and all runs above it."""
    accounts = () if run.account is None else run.account.chain
    tokens = [account.tokens - account.spent.tokens for account in accounts if account.tokens is not None]
    costs = [account.cost - account.spent.cost for account in accounts if account.cost is not None]
    seconds = [each.deadline.seconds_left for each in run.lineage if each.deadline is not None]
    return Caller(
        depth=max(0, run.max_depth - run.depth),
        deadline=run.tree.clock.wall() + max(0.0, min(seconds)) if seconds else None,
        tokens=max(0, min(tokens)) if tokens else None,
        cost=max(NO_COST, min(costs)) if costs else None,
        traceparent=f"00-{run.tree.trace_id}-{run.view.spawned.span_id}-01",
        baggage=run.tree.trace_origin.baggage,
    )
