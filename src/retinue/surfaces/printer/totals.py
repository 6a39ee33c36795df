"""Texts about the usage and the remaining budget of a tree: the status bar, and the table and the line printed at the
end. The values come from views of the log."""

from __future__ import annotations

from collections.abc import Callable, Collection
from decimal import Decimal

from retinue.core.usage import NO_USAGE
from retinue.log.accounts import format_cost
from retinue.log.activity import Totals
from retinue.log.blocks import Role, Span, format_count
from retinue.log.runs import NOTHING, Runs, RunView
from retinue.surfaces.printer import colors, safe

CENT = Decimal("0.01")
NAME_COLUMNS = 52
_HEADS = ("state", "turns", "tools", "tokens", "time", "cost")


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


def format_summary(runs: Runs, *, color: bool = False, now: float | None = None) -> str:
    """Return the tree with the state, turns, tools, tokens and time of each run, then the totals and the counts.
    `now` is wall-clock time, by default the time when a run last started or ended."""
    every = runs.runs.values()
    if now is None:
        now = max((run.ended_at or run.started_at or run.spawned_at for run in every), default=0.0)
    branches = runs.list_branches()
    seconds = max((run.measure_seconds(now) for branch, run in branches if not branch), default=0.0)
    rows = [
        _HEADS,
        *(_make_row(run.state, [run], run.measure_seconds(now)) for _, run in branches),
        _make_row(format_count(len(every), "run"), every, seconds),
    ]
    shown = len(_HEADS) if any(run.cost for run in every) else -1  # leave out a column that has only "unknown"
    cells = [row[:shown] for row in rows]
    names: list[list[Span]] = [[], *(_make_name(branch, run) for branch, run in branches), [("plain", "total")]]
    widths = [sum(safe.measure_width(text) for _, text in name) for name in names]
    columns = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = []
    for run, name, width, row in zip([None, *(run for _, run in branches), None], names, widths, cells, strict=True):
        role: Role = "plain" if run is None or run.ended is None else "good" if run.state == "done" else "bad"
        numbers = "  ".join(cell.rjust(size) for cell, size in zip(row[1:], columns[1:], strict=True))
        space = " " * (max(widths) - width)
        line = [*name, ("plain", f"{space}  "), (role, row[0].ljust(columns[0])), ("plain", f"  {numbers}")]
        if run is None:
            line = [("faint", "".join(text for _, text in line))]
        lines.append(colors.paint_header(line, color=color, bold=False))
    return "\n".join([*lines, "", runs.counts().describe()])


def _make_row(state: str, runs: Collection[RunView], seconds: float) -> tuple[str, ...]:
    """Return the cells of one run, or of several runs together."""
    turns, tools = sum(run.turns for run in runs), sum(run.tool_count for run in runs)
    tokens = sum((run.usage for run in runs), NO_USAGE).total_tokens
    cost = format_cost(sum((run.cost for run in runs), NOTHING), sum(run.unpriced for run in runs))
    return state, str(turns), str(tools), f"{tokens:,}", f"{seconds:.1f}s", cost


def _make_name(branch: str, run: RunView) -> list[Span]:
    """Return the branch, the agent and its label."""
    label: list[Span] = [("plain", " "), ("label", f"[{run.label}]")] if run.number else []
    return colors.cut_line([("plain", f"{branch}{run.agent}"), *label], NAME_COLUMNS)


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
