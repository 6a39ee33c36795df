"""Callers of runs from outside their tree, and the limits left to them: levels, time, tokens and money.

Pure values. `retinue.protocol.inherited_limits` carries them from process to process.
"""

from __future__ import annotations

from decimal import Decimal

import msgspec

from retinue.core.limits import Limits, pick_smaller
from retinue.core.traces import FindOrigin, TraceOrigin


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A run in another process that makes a call here, as far as the call describes it.

    `depth` is the number of levels allowed below the calling run. `deadline` is the end of its time, in seconds since
    1970. `tokens` and `cost` are its remaining budget. Limits missing from the call are None. `parent_id` is the run
    id under which the calling run is reported, and `root_id` the id of the topmost run above it. `run_id` is the id
    for the run to be created."""

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
        """Return the caller of a primary that represents the calling run itself, and so uses up no level."""
        return self if self.depth is None else msgspec.structs.replace(self, depth=self.depth + 1)

    def narrow(self, own: Limits) -> Limits:
        """Return `own` narrowed to the limits left to this caller, for a new tree. Its primary uses up one level."""
        depth = msgspec.UNSET if self.depth is None else max(0, self.depth - 1)
        return Limits(depth=depth, tokens=self.tokens, cost=self.cost).narrow(own)

    def limit_seconds(self, own: float | msgspec.UnsetType | None, now: float) -> float | None:
        """Return the timeout of a run that starts `now`: `own` seconds, or less if the deadline comes first."""
        limit = None if own is msgspec.UNSET else own
        return limit if self.deadline is None else pick_smaller(limit, max(0.0, self.deadline - now))

    @property
    def trace(self) -> FindOrigin | None:
        """A function that returns the trace of a tree made for this caller; None if the call carries no trace."""
        return (lambda: TraceOrigin(self.traceparent, self.baggage)) if self.traceparent or self.baggage else None

    @property
    def may_spawn(self) -> bool:
        return self.depth is None or self.depth > 0


NOBODY = Caller()


class ClientRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A client's request, answered by a primary run, as the log stores it. `surface` and `client` say where the
    request came from. `context` (the conversation) and `message` are ids chosen by the client."""

    surface: str
    client: str
    context: str
    message: str


def narrow_caller(own: Caller, given: Caller) -> Caller:
    """Combine two callers: the smaller value of each limit, and the origin of `given`, or of `own` if missing. Drops
    `run_id`."""
    limits = ("depth", "deadline", "tokens", "cost")
    origin = ("traceparent", "baggage", "parent_id", "root_id")
    return Caller(
        **{name: pick_smaller(getattr(own, name), getattr(given, name)) for name in limits},
        **{name: getattr(given, name) or getattr(own, name) for name in origin},
    )
