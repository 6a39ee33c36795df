"""`retinue ps`: the trees of this project and their runs."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from retinue.control.address_files import find_address
from retinue.core.errors import LogError
from retinue.log.accounts import format_cost
from retinue.log.blocks import Role, format_count
from retinue.log.listing import Listing, load_listings
from retinue.log.runs import RunView
from retinue.protocol.subagent_tools import INTERRUPTED
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.options import parse_age
from retinue.surfaces.printer import colors, safe

HEADS = ("RUN", "LABEL", "AGENT", "STATE", "TURNS", "TOOLS", "TOKENS", "COST", "TIME", "STARTED", "TASK")
NUMBERS = frozenset({"TURNS", "TOOLS", "TOKENS", "COST", "TIME"})
FLEXIBLE = {"LABEL": 12, "TASK": 20}  # the least width of columns that are shortened before others are dropped
LEAST_STATE = {"STATE": 10}  # where nothing is left to drop
EXPENDABLE = ("TOOLS", "TURNS", "COST", "TOKENS", "AGENT", "TIME", "STARTED", "LABEL")  # least important first
ASKING = "waiting_approval"
COLORS: dict[str, Role] = {
    "done": "good",
    **dict.fromkeys(("refused", "failed", "limited", "timed_out", "cancelled", "disconnected"), "bad"),
    **dict.fromkeys((ASKING, "stalled", INTERRUPTED), "warn"),
}
UNREAD = "No runs that can be read."
LABEL_WIDTH = 40
TASK_WIDTH = 80


def configure_ps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="list every tree, also those that another process shows as its subagents"
    )
    parser.add_argument(
        "--since",
        metavar="AGE",
        type=parse_age,
        help="list trees that started in the last 1d, 12h or 30min, and live ones",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array with an object for each run")


def execute_ps(args: argparse.Namespace) -> int:
    """List the runs of this project and their states: the newest tree first, subagents below their parents.

    Without --all it lists the latest 10 trees and every tree with a live run. On a narrow terminal it leaves out
    columns; --json has everything.

    states:
      queued starting running waiting_approval waiting_children stalled   the run is alive
      waiting                                                             a conversation waits for your next message
      done refused failed limited timed_out cancelled disconnected        the run has ended
      interrupted                                                         its process is gone; resume continues it

    examples:
      retinue ps
      retinue ps --all --since 1d
      retinue ps --all --json | jq '.[] | select(.status == "failed") | .path'
    """
    project = screen.open_project_log()
    now = time.time()
    since = None if args.since is None else now - args.since
    problems: list[LogError] = []
    found, left_out = asyncio.run(load_listings(project.log, problems.append, everything=args.all, since=since))
    for problem in problems:
        screen.print_warning(problem)
    if args.json:
        screen.print_json([each.make_row(view, now) for each in found for view in each.list_runs()])
        return 0
    if not found:
        friendly = "No runs here yet. `retinue demo` shows some; `retinue run TASK` starts one."
        friendly = UNREAD if problems else friendly
        print(friendly if since is None or not left_out else "No runs in that time.")
        return 0
    rows = [row for each in found for row in _make_rows(each, now)]
    has_costs = any(view.cost for each in found for view in each.list_runs())  # nothing but "unknown" says nothing
    print("\n".join(_format_rows([head for head in HEADS if has_costs or head != "COST"], rows)))
    asking = sum(each.state_of(view) == ASKING for each in found for view in each.list_runs())
    if asking:
        print(
            f"\n{format_count(asking, 'run')} {'waits' if asking == 1 else 'wait'} for your answer: retinue approvals"
        )
    for each in found:
        if each.pid is not None and any(view.ended is None for view in each.list_runs()):
            print(f"\n{_describe_process(project.state, each)}")
    for each in found:
        if not each.live and not each.ended:
            print(f"\n{each.tree} was interrupted: retinue resume {each.tree}")
    if left_out:
        print(f"\n{left_out} older {'tree is' if left_out == 1 else 'trees are'} not shown: retinue ps --all")
    return 0


def _format_rows(heads: list[str], rows: list[dict[str, str]]) -> list[str]:
    """Return the lines of the table. Without room for labels, they stand where a subagent has no task."""
    heads = [*screen.drop_columns(heads, _select_cells(heads, rows), flexible=FLEXIBLE, expendable=EXPENDABLE)]
    flexible = {head: least for head, least in {**FLEXIBLE, **LEAST_STATE}.items() if head in heads}
    if "LABEL" not in heads:
        rows = [{**row, "TASK": row["TASK"] or row["LABEL"]} for row in rows]
    paint = _paint_cell if colors.wants_color(sys.stdout) else None
    return screen.format_table(heads, _select_cells(heads, rows), right=NUMBERS, flexible=flexible, paint=paint)


def _select_cells(heads: list[str], rows: list[dict[str, str]]) -> list[tuple[str, ...]]:
    return [tuple(row[head] for head in heads) for row in rows]


def _paint_cell(head: str, cell: str, text: str) -> str:
    role: Role = "plain"
    if cell == head:
        role = "faint"
    elif head == "STATE":
        role = COLORS.get(cell, "mark")
    elif head == "RUN" and cell.endswith("/0"):
        role = "name"
    elif head == "LABEL":
        role = "label"
    elif head in NUMBERS or head in ("AGENT", "STARTED"):
        role = "faint"
    return colors.paint_header(((role, text),), color=True, bold=False)


def _describe_process(state: Path, listing: Listing) -> str:
    """Name the process that runs a tree, and say whether it can be told something."""
    address = find_address(state / "control", listing.pid or 0)
    how = "its control server is running" if address is not None else "it has no control server"
    return f"{listing.tree} runs in process {listing.pid}; {how}"


def _make_rows(listing: Listing, now: float) -> list[dict[str, str]]:
    return [
        {
            "RUN": f"{listing.tree}/{view.number}",
            "LABEL": "  " * view.level + screen.shorten_to_width(safe.escape_line(view.label), LABEL_WIDTH),
            "AGENT": safe.escape_line(view.agent),
            "STATE": listing.state_of(view),
            "TURNS": str(view.turns),
            "TOOLS": str(view.tool_count),
            "TOKENS": f"{view.usage.total_tokens:,}",
            "COST": format_cost(view.cost, view.unpriced),
            "TIME": screen.format_duration(listing.seconds_of(view, now)),
            "STARTED": screen.format_age(now - view.spawned_at) if view.number == 0 else "",
            "TASK": _describe_task(view),
        }
        for view in listing.list_runs()
    ]


def _describe_task(view: RunView) -> str:
    """Return the task of a primary; of a subagent, whose label says it, whether it is a team."""
    if view.number:
        return f"team of {len(view.members)}" if view.members else ""
    return screen.shorten_to_width(safe.escape_line(view.spawned.task), TASK_WIDTH)
