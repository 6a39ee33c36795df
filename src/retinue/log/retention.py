"""Removal of old trees: first the folder of each tree, then its events. The next removal completes an interrupted one.

This module decides which trees to remove; the log removes their events. Knows neither log files nor locks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from retinue.core.errors import LogError, LogVersionError, RetinueError
from retinue.core.ports import LogReader, StoredTree
from retinue.files.trees import measure_folder, remove_whole_tree

_TREE = re.compile(r"[0-9a-z]+")  # our format: a tree name from a log must not lead to another path
Unapplied = Callable[[str], list[str]]


@dataclass
class RemovalReport:
    """The outcome of a removal, or of a dry run (then `freed_bytes` counts folders only).

    `held` are log files with old trees that another process is writing. `skipped` are messages about log files of
    another version of Retinue. `interrupted` are old trees that stay because they can be resumed. `kept` are old trees
    that stay because of unapplied changes, with the runs that have them.
    """

    removed: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    held: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add_problem(self, error: LogError) -> None:
        (self.skipped if isinstance(error, LogVersionError) else self.problems).append(str(error))


async def remove_old_trees(
    log: LogReader,
    runs: Path,
    *,
    before: float,
    dry_run: bool = False,
    interrupted: bool = False,
    find_unapplied: Unapplied = lambda _: [],
) -> RemovalReport:
    """Remove every tree whose newest event is older than `before`, with its folder in `runs`.

    Trees that can be resumed stay (unless `interrupted`), and so does every tree that a remaining tree continues.
    `find_unapplied` returns the runs of a tree whose changes are not applied yet; if there are any, the whole tree
    stays.
    """
    report = RemovalReport()
    trees = await log.list_trees(report.add_problem)
    old: dict[str, int] = {}
    for stored in trees:
        if stored.last_at >= before:
            continue
        if stored.ended or interrupted:
            old[stored.tree] = stored.last_seq
        else:
            report.interrupted.append(stored.tree)
    unapplied = {tree: found for tree in old if (found := _find_unapplied(tree, find_unapplied))}
    origins = _find_origins(trees, {tree for tree in old if tree not in unapplied})

    def discard(tree: str) -> bool:
        """Remove the folder of a tree, unless it has unapplied changes by now. Return True if the folder is gone."""
        if found := _find_unapplied(tree, find_unapplied):
            report.kept[tree] = found
            return False
        return _remove_folder(runs, tree, report, dry_run=dry_run)

    wanted = {tree: seq for tree, seq in old.items() if tree not in origins}
    removal = await log.remove_trees(wanted, discard=discard, dry_run=dry_run)
    report.removed, report.held = removal.removed, removal.held
    report.freed_bytes += removal.freed_bytes
    report.problems += removal.problems
    return report


def _find_origins(trees: list[StoredTree], going: set[str]) -> set[str]:
    """Return the trees that the trees outside `going` continue, directly or indirectly."""
    origins = {stored.tree: stored.origin for stored in trees}
    found: set[str] = set()
    for stored in trees:
        tree = stored.tree if stored.tree not in going else ""
        while (tree := origins.get(tree, "")) and tree not in found:
            found.add(tree)
    return found


def _find_unapplied(tree: str, find_unapplied: Unapplied) -> list[str]:
    """Return the runs of a tree with unapplied changes, or the tree itself if that cannot be determined."""
    try:
        return find_unapplied(tree) if _TREE.fullmatch(tree) else []
    except RetinueError:
        return [tree]


def _remove_folder(runs: Path, tree: str, report: RemovalReport, *, dry_run: bool) -> bool:
    """Remove the folder of a tree and return True if nothing is left. A tree whose folder stays keeps its events."""
    if not _TREE.fullmatch(tree):
        return True
    folder = runs / tree
    size = measure_folder(folder)
    try:
        if not dry_run:
            remove_whole_tree(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        report.problems.append(f"cannot remove {folder}: {error.strerror or error}")
        return False
    report.freed_bytes += size
    return True
