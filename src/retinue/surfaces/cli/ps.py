"""`retinue ps`: the trees of this project and their runs."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from retinue.control.address_files import find_address
from retinue.core.errors import LogError
from retinue.log.accounts import format_cost
from retinue.log.listing import Listing, load_listings
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.options import parse_age
from retinue.surfaces.printer import safe

HEADS = ("RUN", "LABEL", "AGENT", "STATE", "TURNS", "TOOLS", "TOKENS", "COST", "TIME", "STARTED", "TASK")
NUMBERS = frozenset({"TURNS", "TOOLS", "TOKENS", "COST", "TIME"})
COST = HEADS.index("COST")
UNREAD = "No runs that can be read."
LABEL_WIDTH = 40
TASK_WIDTH = 80


def configure_ps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="list every tree, also those that were reported to another process"
    )
    parser.add_argument(
        "--since",
        metavar="AGE",
        type=parse_age,
        help="list trees that started in this time, and live ones: 1d, 12h, 30min",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array with an object for each run")


def execute_ps(args: argparse.Namespace) -> int:
    """List the runs of this project and their states, as trees, newest first.

    Without --all it lists every tree with a live run, and the latest 10.

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
    table = [HEADS, *(row for each in found for row in _make_rows(each, now))]
    if not any(view.cost for each in found for view in each.list_runs()):  # nothing but "unknown" says nothing
        table = [row[:COST] + row[COST + 1 :] for row in table]
    print("\n".join(screen.format_table(table[0], table[1:], right=NUMBERS, flexible="LABEL")))
    for each in found:
        if each.pid is not None and any(view.ended is None for view in each.list_runs()):
            print(f"\n{_describe_process(project.state, each)}")
    for each in found:
        if not each.live and not each.ended:
            print(f"\n{each.tree} was interrupted: retinue resume {each.tree}")
    if left_out:
        print(f"\n{left_out} older {'tree is' if left_out == 1 else 'trees are'} not shown: retinue ps --all")
    return 0


def _describe_process(state: Path, listing: Listing) -> str:
    """Name the process that runs a tree, and say whether it can be told something."""
    address = find_address(state / "control", listing.pid or 0)
    how = "its control server is running" if address is not None else "it has no control server"
    return f"{listing.tree} runs in process {listing.pid}; {how}"


def _make_rows(listing: Listing, now: float) -> list[tuple[str, ...]]:
    return [
        (
            f"{listing.tree}/{view.number}",
            "  " * view.spawned.depth + screen.shorten_to_width(safe.escape_line(view.label), LABEL_WIDTH),
            safe.escape_line(view.agent),
            listing.state_of(view),
            str(view.turns),
            str(view.tool_count),
            f"{view.usage.total_tokens:,}",
            format_cost(view.cost, view.unpriced),
            screen.format_duration(listing.seconds_of(view, now)),
            screen.format_age(now - view.spawned_at) if view.number == 0 else "",
            screen.shorten_to_width(safe.escape_line(view.spawned.task), TASK_WIDTH) if view.number == 0 else "",
        )
        for view in listing.list_runs()
    ]
