"""`retinue gc`: remove old trees, their events and their folders."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict
from pathlib import Path

from retinue.build.logs import open_reader, open_stored_changes
from retinue.config.project import load_project
from retinue.log.blocks import format_count
from retinue.log.retention import RemovalReport, remove_old_trees
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.options import AGES, parse_age

FAILED = 1


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
    and trees that a kept tree continues. A log that another process is writing is left for the next time.

    examples:
      retinue gc --dry-run
      retinue gc --older-than 7d
      retinue gc --json | jq .freed_bytes
    """
    project = load_project(Path.cwd())
    seconds = project.settings.retention_days * AGES["d"] if args.older_than is None else args.older_than
    for warning in project.warnings if any(word.startswith("retention_days") for word in project.ignored) else ():
        screen.print_warning(warning)
    state = screen.check_folder(project.folder) / ".retinue"
    removing = remove_old_trees(
        open_reader(state),
        state / "runs",
        before=time.time() - seconds,
        dry_run=args.dry_run,
        interrupted=args.interrupted,
        find_unapplied=(lambda _: []) if args.force else open_stored_changes(state).list_unapplied,
    )
    report = asyncio.run(removing)
    for runs in report.kept.values():
        screen.print_warning(
            f"kept, because its changes were not applied: {', '.join(runs)} "
            f"(`retinue diff {runs[0]}`, `retinue apply {runs[0]}`, or --force)"
        )
    for part in report.held:
        screen.print_warning(f"{part} holds old trees and is being written by another process: left for later")
    for skipped in report.skipped:
        screen.print_warning(f"{skipped}: left as it is")
    if report.interrupted and not args.json:
        trees = ", ".join(report.interrupted)
        screen.print_warning(
            f"kept, because `retinue resume` can resume them (--interrupted removes them too): {trees}"
        )
    for problem in report.problems:
        screen.print_warning(problem)
    if args.json:
        screen.print_json({**asdict(report), "dry_run": args.dry_run})
    else:
        print(_describe_report(report, seconds, dry_run=args.dry_run))
    return FAILED if report.problems else 0


def _describe_report(report: RemovalReport, seconds: float, *, dry_run: bool) -> str:
    count = len(report.removed)
    if not count:
        return f"Nothing {'more ' if report.kept else ''}here is older than {_format_age(seconds)}."
    trees = f"{format_count(count, 'tree')} older than {_format_age(seconds)}"
    if dry_run:
        return "\n".join([f"Would remove {trees}:", *report.removed])
    return f"Removed {trees}; {report.freed_bytes / 1024:,.0f} KiB are free again."


def _format_age(seconds: float) -> str:
    days = seconds / AGES["d"]
    return f"{days:g} day{'' if days == 1 else 's'}" if days >= 1 else screen.format_duration(seconds)
