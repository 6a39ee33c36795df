"""The changes of runs in their copies of the project, for commands that show or apply the changes of several runs.

`StoredChanges` is a role of the Control of stored trees. `Control.diff` and `Control.apply` are about one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class RunCopy:
    """The copied workspace of one run. `kind` is copy or worktree, `source` the folder that was copied. `applied` says
    where and when the changes were applied, and is empty if they were not."""

    tree: str
    run: int
    kind: str
    source: str
    applied: str = ""

    @property
    def name(self) -> str:
        return f"{self.tree}/{self.run}"


@dataclass(frozen=True)
class ApplyPlan:
    """A plan to change `count` files of the project, shown by `diff`. With `conflicts`, one line per file, it cannot
    be carried out. `carry_out` changes the files, all or none, and records it for the runs."""

    diff: str
    count: int
    conflicts: Sequence[str]
    carry_out: Callable[[], None]


class StoredChanges(Protocol):
    """The changes of ended and running runs, found in the log and in the state folder of a project."""

    async def find_copies(self, tree: str, run: int) -> list[RunCopy]:
        """Return the copied workspace of a run, or of its presenter if the run is a team. For a primary without a
        copy, return the copies of the project used by runs below. The list is empty if the run never needed its copy.
        Raises ConfigError for a run that works in no copy."""

    def find_copy(self, tree: str, run: int) -> RunCopy | None:
        """Return the copied workspace of a run, or None if the run had none or the folder is gone."""

    def diff_copy(self, copy: RunCopy, *, stat_columns: int | None = None, live: bool = False) -> str:
        """Return the changes of a run as a git diff, or as statistics in this many columns. With `live`, the run has
        not ended, and these are its changes so far."""

    def list_changed_lines(self, copy: RunCopy, *, live: bool = False) -> list[dict[str, Any]]:
        """Return each changed file as a dict: status, path, added and removed lines (None for a binary file)."""

    def explain_nothing_to_apply(self, copy: RunCopy) -> str:
        """Return why an ended run has no changes to apply, or "" if it has some."""

    def list_unapplied(self, tree: str) -> list[str]:
        """Return the names of the runs of a tree with unapplied changes."""

    def find_unfinished_files(self) -> list[str]:
        """Return the files of the project that `recover_project` would put back."""

    def recover_project(self) -> bool:
        """Undo an interrupted apply in the project. Return True if there was one."""

    def plan_apply(self, copies: Sequence[RunCopy]) -> ApplyPlan:
        """Return a plan to apply the changes of these copies, one after the other, to the project."""
