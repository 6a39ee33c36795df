"""The call of a run elsewhere that is served here: what is left to that run bounds every run that the call makes.

Tasks that start while the call is served belong to it, so runs that its runs make do too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from retinue.core.caller import Caller
from retinue.core.errors import DEPTH_EXCEEDED, SpawnRefused
from retinue.supervisor.budgets import Account


class Call:
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


CALL: ContextVar[Call | None] = ContextVar("retinue_call", default=None)


@contextmanager
def serve_caller(caller: Caller) -> Iterator[None]:
    """Bound the runs that are made inside by what is left to the caller."""
    token = CALL.set(Call(caller))
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
