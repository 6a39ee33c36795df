"""The layout of a tree of runs as aligned text, printed at the end of a run. The values come from the log's view."""

from __future__ import annotations

from collections.abc import Collection

from retinue.core.usage import NO_USAGE
from retinue.log.accounts import format_cost
from retinue.log.blocks import format_count
from retinue.log.runs import NOTHING, Runs, RunView
from retinue.surfaces.printer import colors, safe

NAME_COLUMNS = 52
_HEADS = ("state", "turns", "tools", "tokens", "time", "cost")


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
    names = ["", *(_format_name(branch, run) for branch, run in branches), "total"]
    wide = max(safe.measure_width(name) for name in names)
    columns = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = []
    for (branch, run), name, row in zip([("", None), *branches, ("", None)], names, cells, strict=True):
        state = row[0].ljust(columns[0])
        numbers = "  ".join(cell.rjust(size) for cell, size in zip(row[1:], columns[1:], strict=True))
        space = " " * (wide - safe.measure_width(name))
        if run is None:
            lines.append(colors.paint_faint(f"{name}{space}  {state}  {numbers}".rstrip(), color=color))
            continue
        if run.ended is not None:
            state = colors.paint_header((("good" if run.state == "done" else "bad", state),), color=color)
        lines.append(f"{_paint_name(name, branch, run, color=color)}{space}  {state}  {numbers}".rstrip())
    return "\n".join([*lines, "", runs.counts().describe()])


def _make_row(state: str, runs: Collection[RunView], seconds: float) -> tuple[str, ...]:
    """Return the cells of one run, or of several runs together."""
    turns, tools = sum(run.turns for run in runs), sum(run.tool_count for run in runs)
    tokens = sum((run.usage for run in runs), NO_USAGE).total_tokens
    cost = format_cost(sum((run.cost for run in runs), NOTHING), sum(run.unpriced for run in runs))
    return state, str(turns), str(tools), f"{tokens:,}", f"{seconds:.1f}s", cost


def _format_name(branch: str, run: RunView) -> str:
    """Return the branch, the agent and its label. A long name is cut and ends in dots."""
    label = f" [{safe.escape_line(run.label)}]" if run.number else ""
    name = f"{branch}{safe.escape_line(run.agent)}{label}"
    if safe.measure_width(name) <= NAME_COLUMNS:
        return name
    while safe.measure_width(name) > NAME_COLUMNS - 3:
        name = name[:-1]
    return name + "..."


def _paint_name(name: str, branch: str, run: RunView, *, color: bool) -> str:
    start = len(branch) + len(safe.escape_line(run.agent)) + 1
    if not color or not run.number or len(name) <= start:
        return name
    return name[:start] + colors.paint_header((("label", name[start:]),), color=True)
