"""`retinue gc`: remove old trees, first the folder of each tree and then its events. The next removal completes an
interrupted one. Also removes leftovers: folders of trees whose events are in no log any more.

This module decides which trees to remove; the log removes their events. Knows neither log files, locks nor workspaces.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from retinue.build.logs import (
    are_unchanged_since,
    list_workspaces,
    open_log_reader,
    open_stored_control,
    remove_workspaces,
)
from retinue.concurrency import finish_despite_cancel
from retinue.config.project import load_project
from retinue.core.control import Control
from retinue.core.errors import LogError, LogVersionError, RetinueError
from retinue.core.ports import LogReader, StoredTree
from retinue.files.state_folder import RUNS_FOLDER
from retinue.log.blocks import format_count
from retinue.surfaces.cli import output
from retinue.surfaces.cli.main import FAILED
from retinue.surfaces.cli.options import AGES, parse_age

STARTING_SECONDS = 3600.0


def configure_gc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than",
        metavar="AGE",
        type=parse_age,
        help="age of the trees to remove, such as 30d or 12h (default: `retention_days` in retinue.yaml)",
    )
    parser.add_argument(
        "--interrupted", action="store_true", help="also remove interrupted trees, which could be resumed"
    )
    parser.add_argument("--force", action="store_true", help="also remove trees with changes that nobody applied")
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed, and remove nothing")
    parser.add_argument("--json", action="store_true", help="print what was removed as one JSON object")


def execute_gc(args: argparse.Namespace) -> int:
    """Remove old trees: their events and their folders.

    Removes every tree whose last event is older than `retention_days` in retinue.yaml (30 days): its events, and its
    folder in .retinue/runs with the workspaces of its runs. These trees are kept: trees at work, interrupted trees,
    which `retinue resume` can continue (unless --interrupted), trees with changes that nobody applied (unless --force),
    and trees that a kept tree continues. A log that another process is writing is left for the next time. A folder
    whose events are lost, because the log was deleted, is removed if nothing in it was changed for as long.

    examples:
      retinue gc --dry-run
      retinue gc --older-than 7d
      retinue gc --json | jq .freed_bytes
    """
    project = load_project(Path.cwd())
    seconds = project.settings.retention_days * AGES["d"] if args.older_than is None else args.older_than
    if any(each.key == "retention_days" for each in project.ignored):
        output.print_warning(project.trust_warning)
    output.check_folder(project.folder)
    state = project.state
    removing = remove_old_trees(
        open_log_reader(state),
        state,
        before=time.time() - seconds,
        dry_run=args.dry_run,
        interrupted=args.interrupted,
        changes=None if args.force else open_stored_control(state),
    )
    report = asyncio.run(removing)
    for runs in report.kept.values():
        output.print_warning(
            f"kept, because its changes were not applied: {', '.join(runs)} "
            f"(`retinue diff {runs[0]}`, `retinue apply {runs[0]}`, or --force)"
        )
    for folder in report.kept_leftovers:
        output.print_warning(
            f"kept, because changes in it were not applied, though its events are lost: {folder} "
            "(take what you need from it, then --force)"
        )
    for part in report.held:
        output.print_warning(f"{part} holds old trees and is being written by another process: left for later")
    for skipped in report.skipped:
        output.print_warning(f"{skipped}: left as it is")
    if report.interrupted and not args.json:
        trees = ", ".join(report.interrupted)
        output.print_warning(
            f"kept, because `retinue resume` can resume them (--interrupted removes them too): {trees}"
        )
    for problem in report.problems:
        output.print_warning(problem)
    if args.json:
        output.print_json({**asdict(report), "dry_run": args.dry_run})
    else:
        print(_describe_report(report, seconds, dry_run=args.dry_run))
    return FAILED if report.problems else 0


def _describe_report(report: RemovalReport, seconds: float, *, dry_run: bool) -> str:
    age = _format_age(seconds)
    trees = f"{format_count(len(report.removed), 'tree')} older than {age}"
    folders = f"{format_count(len(report.leftovers), 'folder')} without events, unchanged for {age}"
    found = [(trees, report.removed), (folders, report.leftovers)]
    if dry_run and (report.removed or report.leftovers):
        return "\n".join(line for what, names in found if names for line in (f"Would remove {what}:", *names))
    if not (report.removed or report.leftovers):
        return f"Nothing {'more ' if report.kept or report.kept_leftovers else ''}here is older than {age}."
    removed = " and ".join(what for what, names in found if names)
    return f"Removed {removed}; {report.freed_bytes / 1024:,.0f} KiB are free again."


def _format_age(seconds: float) -> str:
    days = seconds / AGES["d"]
    return f"{days:g} day{'' if days == 1 else 's'}" if days >= 1 else output.format_duration(seconds)


# The removal


@dataclass
class RemovalReport:
    """The outcome of a removal, or of a dry run (then `freed_bytes` counts folders only).

    `held` are log files with old trees that another process is writing. `skipped` are messages about log files of
    another version of Retinue. `interrupted` are old trees that stay because they can be resumed. `kept` are old trees
    that stay because of unapplied changes, with the runs that have them. `leftovers` are removed folders of trees whose
    events are lost, and `kept_leftovers` such folders that stay because of unapplied changes.
    """

    removed: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    held: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    kept_leftovers: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_problem(self, error: LogError) -> None:
        (self.skipped if isinstance(error, LogVersionError) else self.problems).append(str(error))


async def remove_old_trees(
    log: LogReader,
    state: Path,
    *,
    before: float,
    dry_run: bool = False,
    interrupted: bool = False,
    changes: Control | None = None,
) -> RemovalReport:
    """Remove every tree whose newest event is older than `before`, with its folder in the state folder.

    Trees that can be resumed stay (unless `interrupted`), and so does every tree that a remaining tree continues.
    Folders whose tree is in no log are removed by the time of the last change in them.
    The Control `changes` tells which runs have changes that are not applied yet; if a tree has any, the whole tree
    stays.
    """
    report = RemovalReport()
    folders = await asyncio.to_thread(list_workspaces, state)  # before the trees, whose first event is later
    trees = await log.list_trees(report.add_problem)
    lost = set(folders) - {stored.tree for stored in trees}
    if not (report.problems or report.skipped):  # else the events may be in a file that cannot be read
        await _remove_leftovers(report, state, sorted(lost), before=before, dry_run=dry_run, changes=changes)
    old: dict[str, int] = {}
    for stored in trees:
        if stored.last_at >= before:
            continue
        if stored.ended or interrupted:
            old[stored.tree] = stored.last_seq
        else:
            report.interrupted.append(stored.tree)
    unapplied = {tree: found for tree in old if (found := await _find_unapplied(tree, changes))}
    origins = _find_origins(trees, {tree for tree in old if tree not in unapplied})

    async def discard(tree: str) -> bool:
        """Remove the folder of a tree, unless it has unapplied changes by now. Return True if the folder is gone."""
        if found := await _find_unapplied(tree, changes):
            report.kept[tree] = found
            return False
        removing = asyncio.to_thread(remove_workspaces, state, tree, dry_run=dry_run)
        try:  # a cancel waits for the removal: the log stays ours until then
            report.freed_bytes += await finish_despite_cancel(removing)
        except RetinueError as error:  # a tree whose folder stays keeps its events
            report.problems.append(str(error))
            return False
        return True

    wanted = {tree: seq for tree, seq in old.items() if tree not in origins}
    removal = await log.remove_trees(wanted, discard=discard, dry_run=dry_run)
    report.removed, report.held = removal.removed, removal.held
    report.freed_bytes += removal.freed_bytes
    report.problems += removal.problems
    return report


async def _remove_leftovers(
    report: RemovalReport, state: Path, trees: list[str], *, before: float, dry_run: bool, changes: Control | None
) -> None:
    """Remove the folders of trees without events that have not changed since `before`. A folder of the last hour stays
    in any case: a run may be starting in it, whose first event is not written yet."""
    before = min(before, time.time() - STARTING_SECONDS)
    for tree in trees:
        try:
            if not await asyncio.to_thread(are_unchanged_since, state, tree, before):
                continue
            folder = str(state / RUNS_FOLDER / tree)
            if await _find_unapplied(tree, changes):
                report.kept_leftovers.append(folder)
                continue
            removing = asyncio.to_thread(remove_workspaces, state, tree, dry_run=dry_run)
            report.freed_bytes += await finish_despite_cancel(removing)
            report.leftovers.append(folder)
        except RetinueError as error:
            report.problems.append(str(error))


def _find_origins(trees: list[StoredTree], removed: set[str]) -> set[str]:
    """Return the trees that are continued by trees outside `removed`, directly or indirectly."""
    origins = {stored.tree: stored.origin for stored in trees}
    found: set[str] = set()
    for stored in trees:
        tree = stored.tree if stored.tree not in removed else ""
        while (tree := origins.get(tree, "")) and tree not in found:
            found.add(tree)
    return found


async def _find_unapplied(tree: str, changes: Control | None) -> list[str]:
    """Return the runs of a tree with unapplied changes, or the tree itself if that cannot be determined."""
    if changes is None:
        return []
    try:
        return [copy.name for copy in await changes.list_copies(tree) if copy.has_unapplied]
    except RetinueError:
        return [tree]
