"""`retinue diff` and `retinue apply`: show and apply the changes of runs in their copies of the project."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path

import msgspec

from retinue.build.logs import open_stored_control
from retinue.config.project import find_project
from retinue.core.changes import RunCopy
from retinue.core.errors import ConfigError
from retinue.log.blocks import format_count
from retinue.log.listing import Listing, load_listing
from retinue.surfaces.cli import control_clients, output, pager
from retinue.surfaces.cli.main import FAILED
from retinue.surfaces.cli.options import RUN_HELP
from retinue.surfaces.cli.prompts import confirm
from retinue.surfaces.printer import colors, safe

QUESTION = "apply these changes?"
NO_TERMINAL = "there is no terminal to ask on: look with `retinue diff`, then give --yes"
STAT_COLUMNS = 100  # if stdout is not a terminal
RECOVERY_QUESTION = "put them back as they were before it?"


def configure_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", nargs="?", help=RUN_HELP)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--stat", action="store_true", help="show only how much changed in each file")
    how.add_argument("--json", action="store_true", help="print the changed files as a JSON list")


def execute_diff(args: argparse.Namespace) -> int:
    """Show what a run changed in its copy or worktree, also while it is at work.

    On a terminal, a diff that is longer than the screen is shown in $PAGER (less -FRX).

    examples:
      retinue diff                      what the primary of the newest tree changed
      retinue diff 7jw4p2xk9mtb/3 --stat
      retinue diff /main/coder-1 > coder.patch
      retinue diff --json | jq '.[].path'
    """
    texts = asyncio.run(_read_diffs(args))
    if texts:
        pager.print_long("".join(texts).removesuffix("\n"))
    return 0


async def _read_diffs(args: argparse.Namespace) -> list[str]:
    """Print the changed files as JSON, or return the diff of each run that changed something."""
    project, tree, shown = await _find_copies(args.name)
    control = open_stored_control(project.state)
    if args.json:
        found = [(one, file) for one in shown for file in await control.count_changed_lines(one.tree, one.run)]
        output.print_json([{"run": one.name, **msgspec.to_builtins(file)} for one, file in found])
        return []
    columns = (output.measure_screen() or STAT_COLUMNS) if args.stat else None
    texts = []
    for one in shown:
        text = await control.diff(one.tree, one.run, stat_columns=columns)
        if text:
            texts.append(_paint_diff(one, text, named=len(shown) > 1))
        else:
            live = tree.live and tree.runs.runs[one.run].ended is None
            print(f"{one.name} changed no files{' so far' if live else ''}", file=sys.stderr)
    return texts


async def _find_copies(name: str | None) -> tuple[output.ProjectLog, Listing, list[RunCopy]]:
    """Find a run by name. Return the log that has it, its tree, and the copied workspaces that it stands for. Asks no
    process: the process that runs the tree may be stopped."""
    project, found = await output.look_up(name)
    tree = await load_listing(project.log, found.tree)
    try:
        copies = await open_stored_control(project.state).list_copies(found.tree, found.run)
    except ConfigError as error:
        hint = "; `retinue diff {run}` shows what it changed there"
        where = await control_clients.suggest_reporting_run(project.log, tree.runs.runs[found.run], hint)
        raise ConfigError(f"{error}{where}") from None
    if not copies:
        print(f"{found.name} changed no files", file=sys.stderr)
    return project, tree, copies


def _paint_diff(one: RunCopy, text: str, *, named: bool) -> str:
    """Return the diff of one run as escaped text, below its name if `named`."""
    color = colors.wants_color(sys.stdout)
    source = output.shorten_path(one.source, find_project(Path.cwd()))
    whose = f"{one.name}  {one.kind} of {source}"
    head = f"{colors.paint_header((('name', whose),), color=color)}\n" if named else ""
    return head + colors.paint_diff(safe.escape_text(text), color=color)


def configure_apply(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN|TREE", nargs="?", help=RUN_HELP)
    parser.add_argument("--yes", action="store_true", help="apply without asking")


def execute_apply(args: argparse.Namespace) -> int:
    """Apply the changes of a run, or of all runs of a tree, to the project.

    Shows the diff, asks, and merges the changes into the project as it is now, like git: if you and the run changed
    different lines, both changes stay. If a file cannot be merged, Retinue names it and changes nothing at all. Nothing
    is committed or staged. For a tree whose primary worked in the project itself, the changes of all its runs are
    applied, one run after the other. Changes of a subagent are applied to the project as well, even if it worked in a
    copy of its parent's copy.

    exit codes: 0 applied or nothing to apply, 1 conflicts or you said no, 2 usage

    examples:
      retinue diff 7jw4p2xk9mtb/1        look at the changes first
      retinue apply 7jw4p2xk9mtb/1       show them again, ask, apply
      retinue apply --yes                apply the changes of the newest tree without asking
    """
    project, tree, copies = asyncio.run(_find_copies(args.name))
    if not copies:
        return 0
    runs = [one.run for one in copies]
    control = asyncio.run(control_clients.open_runs_control(project, tree, runs))
    make_plan = partial(control.plan_apply, tree.tree, runs)
    plan = asyncio.run(make_plan())
    for why in plan.skipped:
        print(safe.escape_line(why), file=sys.stderr)
    if not plan.runs:
        return 0
    if plan.unfinished:
        files = "".join(f"\n  {safe.escape_line(path)}" for path in plan.unfinished)
        shown = f"an earlier apply was interrupted while it changed these files:{files}"
        if not confirm(RECOVERY_QUESTION, shown, yes=args.yes, no_terminal=NO_TERMINAL):
            return FAILED
        if asyncio.run(control.undo_interrupted_apply()):
            output.print_warning("an earlier apply was interrupted: what it had done is undone")
        plan = asyncio.run(make_plan())
    if plan.conflicts:
        output.print_error(f"nothing was changed: {len(plan.conflicts)} of the files cannot be applied:")
        for conflict in plan.conflicts:
            print(f"  {safe.escape_line(conflict)}", file=sys.stderr)
        return FAILED
    shown = colors.paint_diff(safe.escape_text(plan.diff), color=colors.wants_color(sys.stderr))
    if plan.count and not confirm(QUESTION, shown, yes=args.yes, no_terminal=NO_TERMINAL):
        return FAILED
    asyncio.run(control.apply_planned(plan.tree, plan.runs, digest=plan.digest))
    names = ", ".join(f"{plan.tree}/{run}" for run in plan.runs)
    if plan.count:
        print(f"Applied {format_count(plan.count, 'file')} from {names}.")
    else:
        print(f"The project already has the changes of {names}.")
    return 0
