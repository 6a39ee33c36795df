"""The fold of a tree's runs into the rows of a tree picture, its totals, and the text of the status bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal

import msgspec

from retinue.core.events import RunEnded
from retinue.core.usage import Usage
from retinue.log.runs import NOTHING, Runs, RunView


class OutlineRow(msgspec.Struct, frozen=True):
    """One run. `prefix` draws the branch it hangs on; `state` is the status once it has ended."""

    prefix: str
    number: int
    path: str
    agent: str
    label: str
    state: str
    ended: bool
    turns: int
    tools: int
    usage: Usage
    seconds: float
    cost: Decimal = NOTHING
    unpriced: int = 0


class Outline(msgspec.Struct, frozen=True):
    """All rows, parents before children, and their sums; `seconds` is how long the whole tree took."""

    rows: tuple[OutlineRow, ...]
    turns: int
    tools: int
    usage: Usage
    seconds: float
    cost: Decimal = NOTHING
    unpriced: int = 0


def make_outline(runs: Runs, *, now: float | None = None) -> Outline:
    """Draw the tree at this time of the wall clock; without one, at the time when a run last started or ended."""
    if now is None:
        now = max((run.ended_at or run.started_at or run.spawned_at for run in runs.runs.values()), default=0.0)
    tops = [run for run in runs.runs.values() if run.spawned.parent not in runs.runs]
    rows = tuple(row for top in tops for row in _make_rows(top, now, "", ""))
    return Outline(
        rows,
        sum(row.turns for row in rows),
        sum(row.tools for row in rows),
        runs.usage(),
        max((row.seconds for row in rows if row.prefix == ""), default=0.0),
        sum((row.cost for row in rows), NOTHING),
        sum(row.unpriced for row in rows),
    )


def format_status_bar(runs: Runs) -> str:
    """Return the text of the status bar: `Agents: 1 primary, 2 running, 1 finished`."""
    primary, running, finished = runs.counts()
    return f"Agents: {primary} primary, {running} running, {finished} finished"


def _make_rows(run: RunView, now: float, prefix: str, below: str) -> Iterator[OutlineRow]:
    yield OutlineRow(
        prefix,
        run.number,
        run.path,
        run.agent,
        run.label,
        run.state,
        run.ended is not None,
        run.turns,
        run.tool_count,
        run.usage,
        _measure_seconds(run.ended, run.started_at, now),
        run.cost,
        run.unpriced,
    )
    children: Sequence[RunView] = run.children
    for child in children:
        last = child is children[-1]
        yield from _make_rows(child, now, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))


def _measure_seconds(ended: RunEnded | None, started_at: float | None, now: float) -> float:
    """Return how long a run took, or has taken until now; a queued run has taken nothing."""
    if ended is not None:
        return ended.duration_ms / 1000
    return 0.0 if started_at is None else max(0.0, now - started_at)
