"""The call of a run elsewhere that is being served here: what is left to that run holds for whatever the call makes.

Tasks that are begun while it is served are of the call too, so what its runs make is as well."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from retinue.core.limits import Limits
from retinue.core.ports import Clock
from retinue.supervisor.nodes import Node
from retinue.wire.travel import Caller

CALLER: ContextVar[Caller | None] = ContextVar("retinue_caller", default=None)


@contextmanager
def serving(caller: Caller) -> Iterator[None]:
    """Around whatever makes runs for the call."""
    token = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(token)


def too_deep() -> bool:
    """Whether no level is left to the caller for a run that would be made now."""
    caller = CALLER.get()
    return caller is not None and not caller.may_spawn


def within(limits: Limits) -> Limits:
    """The limits of a run that is made now: its own, and no more than is left to the caller."""
    caller = CALLER.get()
    return limits if caller is None else caller.narrow(limits)


def narrow(node: Node, clock: Clock) -> None:
    """Gives a run that is made now no more levels and no more time than are left to the caller."""
    caller = CALLER.get()
    if caller is not None:
        if caller.depth is not None:
            node.max_depth = min(node.max_depth, node.depth + caller.depth - 1)
        node.seconds = caller.seconds(node.seconds, clock.wall())
