"""`retinue diff RUN`: what a run changed in its copy of the project."""

from __future__ import annotations

import argparse
import asyncio
import sys

from retinue.build.stored import CopiedWorkspace, open_stored_control
from retinue.core.errors import ConfigError
from retinue.core.messages import RunRef
from retinue.log.listing import Listing, load_listing
from retinue.log.lookup import find_reported_run
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.show import RUN_HELP
from retinue.surfaces.printer import colors, safe

EPILOG = """\
examples:
  retinue diff                      what the latest tree's primary changed
  retinue diff 7jw4p2xk9mtb/3 --stat
  retinue diff /main/coder-1 | less -R
  retinue diff --json | jq '.[].path'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Show what a run changed in its copy or worktree; of one that still runs, what it has so far."
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="RUN", nargs="?", help=RUN_HELP)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stat", action="store_true", help="only how much changed in which files")
    how.add_argument("--json", action="store_true", help="the files as a JSON list")


def run_command(args: argparse.Namespace) -> int:
    tree, found, shown = asyncio.run(find_copies(args.name))
    live = tree.live and tree.runs.runs[found.run].ended is None
    if args.json:
        screen.print_json([{"run": one.name, **file} for one in shown for file in one.list_changed_lines(live=live)])
        return 0
    for one in shown:
        _print_diff(one, "--stat=100" if args.stat else "-p", live=live, named=len(shown) > 1)
    return 0


async def find_copies(name: str | None) -> tuple[Listing, RunRef, list[CopiedWorkspace]]:
    """Find a run by name, and the copy it worked in; for a primary without one, the copies of the project that were
    made below it."""
    project, found = await screen.look_up(name)
    tree = await load_listing(project.log, found.tree)
    try:
        copies = await open_stored_control(project.state).find_copies(found.tree, found.run)
    except ConfigError as error:
        view = tree.runs.runs[found.run]
        home = (
            await find_reported_run(project.log, view.agent, view.spawned.subagent_id) if view.spawned.server else None
        )
        where = "" if home is None else f"; `retinue diff {home.name}` shows what it changed there"
        raise ConfigError(f"{error}{where}") from None
    if not copies:
        print(f"{found.name} changed no files", file=sys.stderr)
    return tree, found, copies


def _print_diff(one: CopiedWorkspace, how: str, *, live: bool, named: bool) -> None:
    text = one.diff(how, "-M", live=live).decode("utf-8", "backslashreplace")
    color = colors.wants_color(sys.stdout)
    if not text:
        print(f"{one.name} changed no files{' so far' if live else ''}", file=sys.stderr)
        return
    if named:
        print(
            colors.paint_header((("name", f"{one.name}  {one.workspace.kind} of {one.workspace.source}"),), color=color)
        )
    print(colors.paint_diff(safe.escape_text(text), color=color), end="")
