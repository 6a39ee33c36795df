"""The fold of usage events into bills: tokens and cost by day, model, profile, tree or run.

A cost that is not known is never counted as zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import msgspec

from retinue.core.events import Event, UsageReported
from retinue.core.usage import NO_USAGE, Usage
from retinue.log.runs import NOTHING, RunView

SMALLEST = Decimal("0.0001")


class Bill(msgspec.Struct, frozen=True):
    """The tokens and cost of some model calls. `cost` covers the calls with a known price, `unpriced` counts the
    tokens of the other calls. `estimated` counts the tokens of calls that were cancelled before the provider reported
    their full usage."""

    calls: int = 0
    usage: Usage = NO_USAGE
    cost: Decimal = NOTHING
    unpriced: int = 0
    estimated: int = 0

    def __add__(self, other: Bill) -> Bill:
        return Bill(
            calls=self.calls + other.calls,
            usage=self.usage + other.usage,
            cost=self.cost + other.cost,
            unpriced=self.unpriced + other.unpriced,
            estimated=self.estimated + other.estimated,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the bill as JSON. `cost` is null if any call has no known price; `known_cost` is the cost of the
        other calls."""
        return {
            "calls": self.calls,
            "usage": msgspec.to_builtins(self.usage),
            "total_tokens": self.usage.total_tokens,
            "cost": None if self.unpriced else str(self.cost),
            "known_cost": str(self.cost),
            "unpriced_tokens": self.unpriced,
            "estimated_tokens": self.estimated,
        }


NO_BILL = Bill()
BY: dict[str, Callable[[Event, UsageReported], str]] = {
    "day": lambda event, _: time.strftime("%Y-%m-%d", time.localtime(event.at)),
    "model": lambda _, body: body.model,
    "profile": lambda event, _: event.agent,
    "tree": lambda event, _: event.tree,
    "run": lambda event, _: f"{event.tree}/{event.run}",
}


def fold_bills(events: Iterable[Event], *, by: str) -> dict[str, Bill]:
    """Sum the usage events by a key of `BY`. Days are sorted by date, other keys by cost, highest first."""
    key, found = BY[by], dict[str, Bill]()
    for event in events:
        body = event.body
        if isinstance(body, UsageReported):
            tokens, name = body.usage.total_tokens, key(event, body)
            found[name] = found.get(name, NO_BILL) + Bill(
                calls=1,
                usage=body.usage,
                cost=NOTHING if body.cost is None else body.cost,
                unpriced=tokens if body.cost is None else 0,
                estimated=tokens if body.estimated else 0,
            )
    if by == "day":
        return dict(sorted(found.items()))
    return dict(sorted(found.items(), key=lambda item: (-item[1].cost, -item[1].usage.total_tokens, item[0])))


def sum_subtree_bill(run: RunView) -> Bill:
    """Sum the tokens and the cost of a run and all runs below it. The number of calls stays 0."""
    return sum((Bill(0, each.usage, each.cost, each.unpriced) for each in run.walk()), NO_BILL)


def format_cost(cost: Decimal, unpriced: int) -> str:
    """Format a cost for people: `$0.0123`, `unknown`, or the known part followed by `+ unknown`."""
    if unpriced:
        return f"{format_dollars(cost)} + unknown" if cost else "unknown"
    return format_dollars(cost) if cost else "-"


def format_dollars(cost: Decimal) -> str:
    return f"<${SMALLEST}" if 0 < cost < SMALLEST else f"${cost:,.4f}"
