"""Removing old trees: their folders first, then their lines. Whoever is stopped in between goes on the next time.

A log file is changed only under its lock, so never while somebody writes it, and in place: one transaction, then
VACUUM, both of which SQLite makes safe against a crash. (A new file moved over the old one would not be: readers
still have its journal open by name.)
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import apsw

from retinue.core.errors import LogError, RetinueError
from retinue.core.events import RunSpawned
from retinue.log import schema
from retinue.log.archive import Archive, event_of
from retinue.log.locks import sign, take

_TREE = re.compile(r"[0-9a-z]+")  # as we make them; what a file claims must not lead anywhere else


@dataclass
class Report:
    """What was removed, or would be (then `freed_bytes` are those of folders only). `held` are files with old trees
    that another process writes just now, `skipped` tells of those that another version of us has written;
    `interrupted` are old trees that were kept because they can go on, `kept` those with something in their folder that
    is still wanted."""

    removed: list[str] = field(default_factory=list)
    freed_bytes: int = 0
    held: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    kept: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


Wanted = Callable[[Path], list[str]]


def collect(
    state: Path, *, before: float, dry_run: bool = False, interrupted: bool = False, wanted: Wanted = lambda _: []
) -> Report:
    """Removes every tree of which nothing was heard since that time of the wall clock, but for those that can still go
    on (unless `interrupted` are to go too) and those that a tree which stays continues. `wanted` says what in a tree's
    folder must stay; then the whole tree does."""
    report = Report()
    archive = Archive(state)
    kept = _kept(state, before, report, interrupted=interrupted, wanted=wanted)
    for file in archive.files():
        try:
            _collect(state, file, before, report, dry_run=dry_run, kept=kept, wanted=wanted)
        except schema.OtherVersion as error:
            report.skipped.append(str(error))
        except LogError as error:
            report.problems.append(str(error))
        except (apsw.Error, OSError) as error:
            report.problems.append(f"cannot clean up {file}: {schema.one_line(error)}")
    return report


def _kept(state: Path, before: float, report: Report, *, interrupted: bool, wanted: Wanted) -> frozenset[str]:
    """Old trees that stay all the same, but for those that only have something wanted in their folders."""
    archive = Archive(state)
    origins: dict[str, str] = {}
    old: set[str] = set()
    for file in archive.files():
        with suppress(LogError, apsw.Error):
            old |= set(_old_trees(file, before))
    stay: list[str] = []
    for stored in archive.trees():
        body = stored.first.body
        origins[stored.tree] = body.origin if isinstance(body, RunSpawned) else ""
        if stored.tree in old and not interrupted and not archive.has_ended(stored):
            report.interrupted.append(stored.tree)
            old.discard(stored.tree)
        if stored.tree not in old or _wanted(state, stored.tree, wanted):
            stay.append(stored.tree)
    kept = set(report.interrupted)
    for name in stay:
        while (name := origins.get(name, "")) and name not in kept:
            kept.add(name)
    return frozenset(kept)


def _collect(
    state: Path, file: Path, before: float, report: Report, *, dry_run: bool, kept: frozenset[str], wanted: Wanted
) -> None:
    if not _gone(file, before, kept):
        return
    lock = take(file)
    if lock is None:
        report.held.append(str(file))
        return
    try:
        old = []
        for tree in _gone(file, before, kept):  # again: somebody may have written it since
            if stays := _wanted(state, tree, wanted):
                report.kept[tree] = stays
            else:
                old.append(tree)
        if dry_run:
            report.removed += old
            report.freed_bytes += sum(_size(state / "runs" / tree) for tree in old)
            return
        gone = [tree for tree in old if _remove_folder(state / "runs", tree, report)]
        size = _size_of_log(file)
        db = schema.open_writer(file)
        try:
            sign(lock, schema.next_row(db))  # whoever looks now sees that nothing in it lives
            schema.remove(db, frozenset(gone))
        finally:
            db.close()
        report.removed += gone
        report.freed_bytes += max(0, size - _size_of_log(file))
    finally:
        os.close(lock)


def _wanted(state: Path, tree: str, wanted: Wanted) -> list[str]:
    """What in its folder must stay; all of it when that cannot be told."""
    try:
        return wanted(state / "runs" / tree) if _TREE.fullmatch(tree) else []
    except RetinueError:
        return [tree]


def _gone(file: Path, before: float, kept: frozenset[str]) -> list[str]:
    return [tree for tree in _old_trees(file, before) if tree not in kept]


def _old_trees(file: Path, before: float) -> list[str]:
    db = schema.open_reader(file)
    try:
        return [tree for tree, line in schema.last_lines(db).items() if event_of(line, file).at < before]
    finally:
        db.close()


def _remove_folder(runs: Path, tree: str, report: Report) -> bool:
    """Whether there is nothing left; a tree whose folder stays keeps its log."""
    if not _TREE.fullmatch(tree):
        return True
    folder = runs / tree
    size = _size(folder)
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        report.problems.append(f"cannot remove {folder}: {error.strerror or error}")
        return False
    report.freed_bytes += size
    return True


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        total += sum(os.lstat(Path(parent, name)).st_size for name in names)
    return total


def _size_of_log(file: Path) -> int:
    """With what has not yet been moved into it."""
    files = (file, file.with_name(file.name + "-wal"))
    return sum(each.stat().st_size for each in files if each.exists())
