"""`retinue diff` and `retinue apply`: show and apply the changes of runs in their copies of the project."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from retinue.build.logs import open_stored_changes
from retinue.config.project import find_project
from retinue.core.changes import RunCopy, StoredChanges
from retinue.core.errors import ConfigError
from retinue.core.messages import RunRef
from retinue.log.blocks import format_count
from retinue.log.listing import Listing, load_listing
from retinue.log.lookup import find_reported_run
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import pager
from retinue.surfaces.cli.options import RUN_HELP
from retinue.surfaces.cli.prompts import ask_yes_no, at_terminal
from retinue.surfaces.printer import colors, safe

QUESTION = "apply these changes?"
STAT_COLUMNS = 100  # if stdout is not a terminal
RECOVERY_QUESTION = "put them back as they were before it?"
FAILED = 1


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
    changes, tree, found, shown = asyncio.run(find_copies(args.name))
    live = tree.live and tree.runs.runs[found.run].ended is None
    if args.json:
        screen.print_json(
            [{"run": one.name, **file} for one in shown for file in changes.list_changed_lines(one, live=live)]
        )
        return 0
    columns = (screen.measure_screen() or STAT_COLUMNS) if args.stat else None
    texts = []
    for one in shown:
        text = changes.diff_copy(one, stat_columns=columns, live=live)
        if text:
            texts.append(_paint_diff(one, text, named=len(shown) > 1))
        else:
            print(f"{one.name} changed no files{' so far' if live else ''}", file=sys.stderr)
    if texts:
        pager.print_long("".join(texts).removesuffix("\n"))
    return 0


async def find_copies(name: str | None) -> tuple[StoredChanges, Listing, RunRef, list[RunCopy]]:
    """Find a run by name, and return the changes of its project, its tree, the run, and the copied workspace of the
    run.

    For a primary without a copy, return the copies of the project that the runs below it worked in."""
    project, found = await screen.look_up(name)
    tree = await load_listing(project.log, found.tree)
    try:
        changes = open_stored_changes(project.state)
        copies = await changes.find_copies(found.tree, found.run)
    except ConfigError as error:
        view = tree.runs.runs[found.run]
        home = (
            await find_reported_run(project.log, view.agent, view.spawned.subagent_id) if view.spawned.server else None
        )
        where = "" if home is None else f"; `retinue diff {home.name}` shows what it changed there"
        raise ConfigError(f"{error}{where}") from None
    if not copies:
        print(f"{found.name} changed no files", file=sys.stderr)
    return changes, tree, found, copies


def _paint_diff(one: RunCopy, text: str, *, named: bool) -> str:
    """Return the diff of one run as escaped text, below its name if `named`."""
    color = colors.wants_color(sys.stdout)
    source = screen.shorten_path(one.source, find_project(Path.cwd()))
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
    applied, one run after the other.

    exit codes: 0 applied or nothing to apply, 1 conflicts or you said no, 2 usage

    examples:
      retinue diff 7jw4p2xk9mtb/1        look at the changes first
      retinue apply 7jw4p2xk9mtb/1       show them again, ask, apply
      retinue apply --yes                apply the changes of the newest tree without asking
    """
    changes, tree, _, copies = asyncio.run(find_copies(args.name))
    runs = _select_unapplied(changes, tree, copies)
    if not runs:
        return 0
    interrupted = changes.find_unfinished_files()
    if interrupted and not args.yes and not _ask_recovery(interrupted):
        print("Nothing was changed.", file=sys.stderr)
        return FAILED
    if changes.recover_project():
        screen.print_warning("an earlier apply was interrupted: what it had done is undone")
    plan = changes.plan_apply(runs)
    if plan.conflicts:
        screen.print_error(f"nothing was changed: {len(plan.conflicts)} of the files cannot be applied:")
        for conflict in plan.conflicts:
            print(f"  {safe.escape_line(conflict)}", file=sys.stderr)
        return FAILED
    if not args.yes and not _ask_user(plan.diff):
        print("Nothing was changed.", file=sys.stderr)
        return FAILED
    plan.carry_out()
    print(f"Applied {format_count(plan.count, 'file')} from {', '.join(one.name for one in runs)}.")
    return 0


def _select_unapplied(changes: StoredChanges, tree: Listing, runs: list[RunCopy]) -> list[RunCopy]:
    """Return the runs with changes to apply. Print the reason for each run without any."""
    left = []
    for one in runs:
        view = tree.runs.runs.get(one.run)
        if tree.live and view is not None and view.ended is None:
            raise ConfigError(f"{one.name} has not ended yet: wait for it, or `retinue cancel {one.name}`")
        why = changes.explain_nothing_to_apply(one)
        if why:
            print(safe.escape_line(why), file=sys.stderr)
        else:
            left.append(one)
    return left


def _ask_recovery(paths: list[str]) -> bool:
    """Ask whether the files that an interrupted apply was changing may be put back."""
    _require_terminal()
    shown = "".join(f"\n  {safe.escape_line(path)}" for path in paths)
    print(f"an earlier apply was interrupted while it changed these files:{shown}", file=sys.stderr)
    return ask_yes_no(RECOVERY_QUESTION, default=False)


def _ask_user(diff: str) -> bool:
    _require_terminal()
    print(colors.paint_diff(safe.escape_text(diff), color=colors.wants_color(sys.stderr)), file=sys.stderr)
    return ask_yes_no(QUESTION, default=False)


def _require_terminal() -> None:
    if not at_terminal():
        raise ConfigError("there is no terminal to ask on: look with `retinue diff`, then give --yes")
