"""The caller of a run from outside its tree, and what is left to it: levels, time, tokens and money.

Pure values. How they travel to another process is the protocol's (`retinue.protocol.inherited_limits`).
"""

from __future__ import annotations

from decimal import Decimal

import msgspec

from retinue.core.limits import Limits, pick_smaller
from retinue.core.traces import FindOrigin, TraceOrigin


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The run elsewhere that made a call, as far as that travels. `depth` is how many levels may stand below that run,
    `deadline` the second since 1970 at which it ends, `tokens` and `cost` what it may still spend; None where nothing
    is said. `parent_id` is the run id under which its caller is reported, `root_id` that of the first of its line, and
    `run_id` the one that the call gives to the run it makes."""

    depth: int | None = None
    deadline: float | None = None
    tokens: int | None = None
    cost: Decimal | None = None
    traceparent: str = ""
    baggage: str = ""
    parent_id: str = ""
    root_id: str = ""
    run_id: str = ""

    def as_client(self) -> Caller:
        """Return the caller of a primary that stands for the caller itself, and so takes no level of its own."""
        return self if self.depth is None else msgspec.structs.replace(self, depth=self.depth + 1)

    def narrow(self, own: Limits) -> Limits:
        """Return the limits of a tree that this call makes, whose primary takes one of the levels that are left."""
        depth = msgspec.UNSET if self.depth is None else max(0, self.depth - 1)
        return Limits(depth=depth, tokens=self.tokens, cost=self.cost).narrow(own)

    def limit_seconds(self, own: float | msgspec.UnsetType | None, now: float) -> float | None:
        """Return how long a run of that many seconds, which begins now, may take."""
        limit = None if own is msgspec.UNSET else own
        return limit if self.deadline is None else pick_smaller(limit, max(0.0, self.deadline - now))

    @property
    def trace(self) -> FindOrigin | None:
        """A function that returns the trace of a tree made for the caller, if that is known."""
        return (lambda: TraceOrigin(self.traceparent, self.baggage)) if self.traceparent or self.baggage else None

    @property
    def may_spawn(self) -> bool:
        return self.depth is None or self.depth > 0


NOBODY = Caller()


class ClientRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A request of a client that a primary run answers, as the log keeps it: the `surface` it came through, the
    `client`, the conversation (`context`) and the `message`, both under the ids of the client."""

    surface: str
    client: str
    context: str
    message: str


def narrow_caller(own: Caller, given: Caller) -> Caller:
    """Return the caller of two that both hold: the smaller number of each limit, and the origin of the second."""
    limits = ("depth", "deadline", "tokens", "cost")
    origin = ("traceparent", "baggage", "parent_id", "root_id")
    return Caller(
        **{name: pick_smaller(getattr(own, name), getattr(given, name)) for name in limits},
        **{name: getattr(given, name) or getattr(own, name) for name in origin},
    )
