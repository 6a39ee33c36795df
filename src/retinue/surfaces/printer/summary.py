"""The layout of a tree of runs as aligned text, for the end of a run. What a run did is the outline's to say."""

from __future__ import annotations

from retinue.log.accounts import format_cost
from retinue.log.outline import Outline, OutlineRow, format_status_bar, make_outline
from retinue.log.runs import Runs
from retinue.log.styled_text import Role
from retinue.surfaces.printer import colors, safe

NAME_COLUMNS = 52
_HEADS = ("state", "turns", "tools", "tokens", "time", "cost")


def format_summary(runs: Runs, *, color: bool = False, now: float | None = None) -> str:
    """Return the tree with states, turns, tools, tokens and time; totals and the status bar below it."""
    picture = make_outline(runs, now=now)
    shown = len(_HEADS) if picture.cost else -1  # a column of nothing but "unknown" says nothing
    cells = [row[:shown] for row in (_HEADS, *(_format_cells(row) for row in picture.rows), _format_totals(picture))]
    names = ["", *(_format_name(row) for row in picture.rows), "total"]
    wide = max(safe.measure_width(name) for name in names)
    columns = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = []
    for number, (name, row) in enumerate(zip(names, cells, strict=True)):
        of_run = picture.rows[number - 1] if 0 < number <= len(picture.rows) else None
        numbers = "  ".join(cell.rjust(size) for cell, size in zip(row[1:], columns[1:], strict=True))
        state = _paint_state(row[0].ljust(columns[0]), of_run, color=color)
        painted = name if of_run is None else _paint_name(name, of_run, color=color)
        line = f"{painted}{' ' * (wide - safe.measure_width(name))}  {state}  {numbers}".rstrip()
        lines.append(line if of_run else colors.paint_faint(line, color=color))
    return "\n".join([*lines, "", format_status_bar(runs)])


def _format_cells(row: OutlineRow) -> tuple[str, ...]:
    tokens, cost = f"{row.usage.total_tokens:,}", format_cost(row.cost, row.unpriced)
    return row.state, str(row.turns), str(row.tools), tokens, f"{row.seconds:.1f}s", cost


def _format_totals(picture: Outline) -> tuple[str, ...]:
    tokens, cost = f"{picture.usage.total_tokens:,}", format_cost(picture.cost, picture.unpriced)
    count = f"{len(picture.rows)} run{'' if len(picture.rows) == 1 else 's'}"
    return count, str(picture.turns), str(picture.tools), tokens, f"{picture.seconds:.1f}s", cost


def _format_name(row: OutlineRow) -> str:
    """Return the branch, the agent and its label; a long name ends in dots."""
    label = f" [{safe.escape_line(row.label)}]" if row.number else ""
    name = f"{row.prefix}{safe.escape_line(row.agent)}{label}"
    if safe.measure_width(name) <= NAME_COLUMNS:
        return name
    while safe.measure_width(name) > NAME_COLUMNS - 3:
        name = name[:-1]
    return name + "..."


def _paint_name(name: str, row: OutlineRow, *, color: bool) -> str:
    start = len(row.prefix) + len(safe.escape_line(row.agent)) + 1
    if not color or not row.number or len(name) <= start:
        return name
    return name[:start] + colors.paint_header((("label", name[start:]),), color=True)


def _paint_state(cell: str, row: OutlineRow | None, *, color: bool) -> str:
    if row is None or not row.ended:
        return cell
    role: Role = "good" if row.state == "done" else "bad"
    return colors.paint_header(((role, cell),), color=color)
