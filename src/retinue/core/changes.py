"""The changes of runs in their copied workspaces: what `Control` tells about them, and the plan to apply them."""

from __future__ import annotations

import msgspec

from retinue.core.results import ChangedFile


class RunCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The copied workspace of one run. `kind` is copy or worktree, `source` the folder that was copied. `applied` says
    that all changes were applied, and is empty if some were not. `unapplied` is the number of files with changes left
    to apply, or None if the end of the run was not recorded, so that it may have some. `problem` says why the records
    of the run cannot be read; then nothing else is known."""

    tree: str
    run: int
    kind: str
    source: str
    applied: str = ""
    unapplied: int | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return f"{self.tree}/{self.run}"

    @property
    def has_unapplied(self) -> bool:
        return self.unapplied != 0


class Changes(msgspec.Struct, frozen=True):
    """The changes of a run in its copied workspace, without those that were applied before its end. `files` has as many
    changed files as fit in a list, of `count` in all. `target` is the folder to apply them to; `applied` is the folder
    they were already applied to, if any."""

    files: tuple[ChangedFile, ...]
    count: int
    target: str
    applied: str = ""


class ChangedLines(msgspec.Struct, frozen=True, kw_only=True):
    """A changed file and the numbers of its added and removed lines, which are None for a binary file."""

    status: str
    path: str
    added: int | None
    removed: int | None
    binary: bool


class ApplyPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan to apply the changes of `runs` to the folder `target`, one run after another.

    `diff` shows what changes there, in `count` files, of which `files` has as many as fit in a list. `digest`
    identifies exactly these changes. A plan with `conflicts`, one line per file, cannot be carried out. `skipped` has
    one line for each other run, which has nothing to apply. `unfinished` are files of the target that an interrupted
    apply left half changed: they must be put back first, so the plan has no changes yet."""

    tree: str
    runs: tuple[int, ...]
    target: str
    skipped: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    diff: str = ""
    files: tuple[ChangedFile, ...] = ()
    count: int = 0
    conflicts: tuple[str, ...] = ()
    digest: str = ""
