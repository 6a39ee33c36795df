"""`retinue ps`: the trees of this project and their runs."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from retinue.control.address_files import find_address
from retinue.core.errors import LogError
from retinue.core.ports import name_process
from retinue.log.accounts import format_cost
from retinue.log.blocks import Role, format_count
from retinue.log.listing import Listing, load_listings
from retinue.log.runs import RunView
from retinue.protocol.subagent_tools import INTERRUPTED
from retinue.surfaces.cli import output
from retinue.surfaces.cli.options import parse_age
from retinue.surfaces.printer import colors, safe

HEADS = ("RUN", "LABEL", "AGENT", "STATE", "TURNS", "TOOLS", "TOKENS", "COST", "TIME", "STARTED", "TASK")
NUMBERS = frozenset({"TURNS", "TOOLS", "TOKENS", "COST", "TIME"})
FLEXIBLE = {"LABEL": 12, "TASK": 20}  # least widths of columns that are shortened before others are dropped
LEAST_STATE = {"STATE": 10}  # shortened when no column is left to drop
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
      queued starting running waiting_approval waiting_children stalled   the run is alive; queued #1 begins next
      waiting                                                             a conversation waits for your next message
      done refused failed limited timed_out cancelled disconnected        the run has ended
      interrupted                                                         its process is gone; resume continues it

    examples:
      retinue ps
      retinue ps --all --since 1d
      retinue ps --all --json | jq '.[] | select(.status == "failed") | .path'
    """
    with output.pause_collector():
        return _list_runs(args)


def _list_runs(args: argparse.Namespace) -> int:
    project = output.open_project_log()
    now = time.time()
    since = None if args.since is None else now - args.since
    problems: list[LogError] = []
    found, left_out = asyncio.run(load_listings(project.log, problems.append, everything=args.all, since=since))
    for problem in problems:
        output.print_warning(problem)
    if args.json:
        output.print_json([each.make_row(view, now) for each in found for view in each.list_runs()])
        return 0
    if not found:
        friendly = "No runs here yet. `retinue demo` shows some; `retinue run TASK` starts one."
        friendly = UNREAD if problems else friendly
        print(friendly if since is None or not left_out else "No runs in that time.")
        return 0
    listed = [(each, view) for each in found for view in each.list_runs()]
    columns = output.make_columns(HEADS, [_make_cells(each, view, now) for each, view in listed])
    if not any(view.cost > 0 for _, view in listed):
        del columns["COST"]  # a column of nothing but "unknown" is useless
    print("\n".join(_format_columns(columns)))
    asking = columns["STATE"].count(ASKING)
    if asking:
        print(
            f"\n{format_count(asking, 'run')} {'waits' if asking == 1 else 'wait'} for your answer: retinue approvals"
        )
    for each in found:
        stored = each.stored
        if stored.writer is not None and any(view.ended is None for view in each.list_runs()):
            has_server = find_address(project.state, stored.writer) is not None
            how = "its control server is running" if has_server else "it has no control server"
            print(f"\n{each.tree} runs in {name_process(stored.pid)}; {how}")
    for each in found:
        if not each.live and not each.ended:
            print(f"\n{each.tree} was interrupted: retinue resume {each.tree}")
    if left_out:
        print(f"\n{left_out} older {'tree is' if left_out == 1 else 'trees are'} not shown: retinue ps --all")
    return 0


def _format_columns(columns: dict[str, list[str]]) -> list[str]:
    """Return the lines of the table. If the column LABEL does not fit, put labels into the empty cells of TASK."""
    fitting = output.drop_columns(columns, flexible=FLEXIBLE, expendable=EXPENDABLE)
    flexible = {head: least for head, least in {**FLEXIBLE, **LEAST_STATE}.items() if head in fitting}
    if "LABEL" not in fitting:
        fitting["TASK"] = [task or label for task, label in zip(columns["TASK"], columns["LABEL"], strict=True)]
    paint = _paint_cell if colors.wants_color(sys.stdout) else None
    return output.format_columns(fitting, right=NUMBERS, flexible=flexible, paint=paint)


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


def _make_cells(listing: Listing, view: RunView, now: float) -> tuple[str, ...]:
    """Return the cells of a run, in the order of HEADS."""
    return (
        f"{listing.tree}/{view.number}",
        "  " * view.level + safe.cut_to_width(safe.escape_line(view.label), LABEL_WIDTH),
        safe.escape_line(view.agent),
        listing.describe_state(view),
        str(view.turns),
        str(view.tool_count),
        f"{view.usage.total_tokens:,}",
        format_cost(view.cost, view.unpriced),
        output.format_duration(listing.seconds_of(view, now)),
        output.format_age(now - view.spawned_at) if view.number == 0 else "",
        _describe_task(view),
    )


def _describe_task(view: RunView) -> str:
    """Return the task of a primary, or the size of a team. Other subagents have none, because the label says it."""
    if view.number:
        return f"team of {len(view.members)}" if view.members else ""
    return safe.cut_to_width(safe.escape_line(view.spawned.task), TASK_WIDTH)
