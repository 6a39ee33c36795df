"""The call that is being served for a caller outside: what is left to the caller holds for all runs that the call makes.

Tasks that start while a call is served belong to it too, and so do the runs that they make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from retinue.core.caller import Caller
from retinue.core.errors import DEPTH_EXCEEDED, SpawnRefused
from retinue.core.ports import Clock
from retinue.supervisor.budgets import Account
from retinue.supervisor.nodes import Node


class Call:
    """One call that is served. `account` is what all its runs together may spend, opened with the first of them."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.account: Account | None = None

    def reported_as(self, tree: str) -> str:
        """Return the run id under which the primary of a tree is reported, or else the run that it stands for."""
        return self.caller.run_id or self.caller.parent_id or f"{tree}-0"

    def shared(self, above: Account | None) -> Account | None:
        """Return the account of a run below one with the account `above`: all runs of a call share what is left to
        the caller."""
        if self.caller.tokens is None and self.caller.cost is None:
            return above
        if self.account is None:
            self.account = Account("the caller", tokens=self.caller.tokens, cost=self.caller.cost, parent=above)
        return above if above is not None and self.account in above.chain else self.account


CALL: ContextVar[Call | None] = ContextVar("retinue_call", default=None)


@contextmanager
def serve_caller(caller: Caller) -> Iterator[None]:
    """Around whatever makes runs for the call."""
    token = CALL.set(Call(caller))
    try:
        yield
    finally:
        CALL.reset(token)


def narrow(node: Node, clock: Clock) -> None:
    """Give a run that is made now no more levels and no more time than are left to the caller."""
    call = CALL.get()
    if call is not None:
        left = call.caller
        if left.depth is not None:
            node.max_depth = min(node.max_depth, node.depth + left.depth - 1)
        node.seconds = left.seconds(node.seconds, clock.wall())


def check_depth(name: str) -> None:
    """Raise SpawnRefused when no level is left to the caller for a run that would be made now."""
    call = CALL.get()
    if call is not None and not call.caller.may_spawn:
        raise SpawnRefused(DEPTH_EXCEEDED.format(depth=0, limit=0, name=name))
