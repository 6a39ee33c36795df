"""A tree of runs as aligned text, for the end of a run and for lists. Lays out; what a run did is the outline's."""

from __future__ import annotations

import unicodedata

from retinue.log.accounts import cost_text
from retinue.log.outline import Outline, OutlineRow, outline, status_bar
from retinue.log.runs import Runs
from retinue.log.styled_text import Role
from retinue.surfaces.printer import colors as paint
from retinue.surfaces.printer import safe

NAME_COLUMNS = 52
_HEADS = ("state", "turns", "tools", "tokens", "time", "cost")


def summary(runs: Runs, *, color: bool = False, now: float | None = None) -> str:
    """The tree with states, turns, tools, tokens and time; totals and the status bar below it."""
    picture = outline(runs, now=now)
    shown = len(_HEADS) if picture.cost else -1  # a column of nothing but "unknown" says nothing
    cells = [row[:shown] for row in (_HEADS, *(_cells(row) for row in picture.rows), _totals(picture))]
    names = ["", *(_name(row) for row in picture.rows), "total"]
    wide = max(_width(name) for name in names)
    columns = [max(len(row[at]) for row in cells) for at in range(len(cells[0]))]
    lines = []
    for number, (name, row) in enumerate(zip(names, cells, strict=True)):
        of_run = picture.rows[number - 1] if 0 < number <= len(picture.rows) else None
        numbers = "  ".join(cell.rjust(size) for cell, size in zip(row[1:], columns[1:], strict=True))
        state = _painted_state(row[0].ljust(columns[0]), of_run, color=color)
        painted = name if of_run is None else _painted_name(name, of_run, color=color)
        line = f"{painted}{' ' * (wide - _width(name))}  {state}  {numbers}".rstrip()
        lines.append(line if of_run else paint.faint(line, color=color))
    return "\n".join([*lines, "", status_bar(runs)])


def _cells(row: OutlineRow) -> tuple[str, ...]:
    tokens, cost = f"{row.usage.total_tokens:,}", cost_text(row.cost, row.unpriced)
    return row.state, str(row.turns), str(row.tools), tokens, f"{row.seconds:.1f}s", cost


def _totals(picture: Outline) -> tuple[str, ...]:
    tokens, cost = f"{picture.usage.total_tokens:,}", cost_text(picture.cost, picture.unpriced)
    count = f"{len(picture.rows)} run{'' if len(picture.rows) == 1 else 's'}"
    return count, str(picture.turns), str(picture.tools), tokens, f"{picture.seconds:.1f}s", cost


def _name(row: OutlineRow) -> str:
    """The branch, the agent and its label; what is too long ends in dots."""
    label = f" [{safe.line(row.label)}]" if row.number else ""
    name = f"{row.prefix}{safe.line(row.agent)}{label}"
    if _width(name) <= NAME_COLUMNS:
        return name
    while _width(name) > NAME_COLUMNS - 3:
        name = name[:-1]
    return name + "..."


def _painted_name(name: str, row: OutlineRow, *, color: bool) -> str:
    start = len(row.prefix) + len(safe.line(row.agent)) + 1
    if not color or not row.number or len(name) <= start:
        return name
    return name[:start] + paint.header((("label", name[start:]),), color=True)


def _painted_state(cell: str, row: OutlineRow | None, *, color: bool) -> str:
    if row is None or not row.ended:
        return cell
    role: Role = "good" if row.state == "done" else "bad"
    return paint.header(((role, cell),), color=color)


def _width(text: str) -> int:
    """Columns on a terminal: wide letters take two, marks none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
