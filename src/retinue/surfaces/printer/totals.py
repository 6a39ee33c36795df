"""Texts about the usage and the remaining budget of a tree: the status bar, and the line printed at the end."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from retinue.log.accounts import format_cost
from retinue.log.activity import Totals
from retinue.log.blocks import format_count
from retinue.log.runs import NOTHING, Runs
from retinue.surfaces.printer import safe

CENT = Decimal("0.01")


def format_status(totals: Totals, *, width: int) -> str:
    """Return the status bar: `Agents: 1 primary, 2 running, 1 finished`, then time, tokens, cost and remaining budget.
    If the text is wider than `width`, shorten the numbers; then drop tokens, cost, remaining budget and time, in this
    order."""
    pieces = {
        "time": format_elapsed(totals.seconds),
        "tokens": format_count_of_tokens(totals.tokens),
        "cost": format_cost(totals.cost, totals.unpriced) if totals.cost else "",
        "left": _format_left(totals, format_count_of_tokens),
    }
    short = {"tokens": _shorten_tokens(totals.tokens), "left": _format_left(totals, _shorten_tokens)}
    if totals.cost >= CENT and not totals.unpriced:
        short["cost"] = f"${totals.cost:.2f}"
    agents = totals.agents.describe()
    for change in ({}, short, {"tokens": ""}, {"cost": ""}, {"left": ""}, {"time": ""}):
        pieces.update(change)
        line = " · ".join([agents, *(piece for piece in pieces.values() if piece)])
        if safe.measure_width(line) <= width:
            break
    return line


def _format_left(totals: Totals, format_tokens: Callable[[int], str]) -> str:
    left = format_amounts(totals.tokens_left, totals.cost_left, totals.seconds_left, format_tokens=format_tokens)
    return f"{left} left" if left else ""


def _shorten_tokens(tokens: int) -> str:
    """Return a short token count: 950 tok, 23k tok, 1.2M tok."""
    if tokens < 1000:
        return f"{tokens} tok"
    return f"{tokens // 1000}k tok" if tokens < 1_000_000 else f"{tokens / 1e6:.1f}M tok"


def format_totals(runs: Runs, now: float) -> str:
    """Return the line about an ended tree: agents, turns, tool calls, tokens, cost and time."""
    every = runs.runs.values()
    root = runs.runs.get(min(runs.runs, default=0))
    cost, unpriced = sum((run.cost for run in every), NOTHING), sum(run.unpriced for run in every)
    pieces = [
        runs.tree,
        format_count(len(every), "agent"),
        format_count(sum(run.turns for run in every), "turn"),
        format_count(sum(run.tool_count for run in every), "tool call"),
        format_count_of_tokens(runs.usage().total_tokens),
        *([format_cost(cost, unpriced)] if cost else []),
        f"{0.0 if root is None else root.measure_seconds(now):.1f}s",
    ]
    return " · ".join(pieces)


def format_count_of_tokens(tokens: int) -> str:
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def format_amounts(
    tokens: int | None,
    cost: Decimal | None,
    seconds: float | None,
    *,
    format_tokens: Callable[[int], str] = format_count_of_tokens,
) -> str:
    """Return the known amounts of a budget, or of its remainder, as text."""
    amounts = [
        "" if tokens is None else format_tokens(tokens),
        "" if cost is None else f"${cost:.2f}",
        "" if seconds is None else format_elapsed(seconds),
    ]
    return ", ".join(amount for amount in amounts if amount)


def format_elapsed(seconds: float) -> str:
    """Format an elapsed time: 3s, 1m05s, 2h10m."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02}m"
