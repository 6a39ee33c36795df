"""The changes that the runs of a project left in copied workspaces, for the commands that show and apply them.

Needs no living process: a copy is found by the folder of its run, and several are applied as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retinue.workspaces import copies
from retinue.workspaces.atomic_apply import find_interrupted, recover_folder
from retinue.workspaces.copies import CopiedWorkspace, explain_missing_copy, is_unmade, list_unapplied
from retinue.workspaces.merge import Plan

__all__ = ["CopiedWorkspace", "ProjectChanges", "explain_missing_copy", "is_unmade", "list_unapplied"]


class ProjectChanges:
    """The copied workspaces below the state folder of a project."""

    def __init__(self, state: Path) -> None:
        self._state = str(state)
        self._project = str(state.parent)
        self._aside = f"{state}/applying"

    def find_copy(self, tree: str, run: int) -> CopiedWorkspace | None:
        """Return the copy that a run worked in; None if it had none."""
        return copies.find_copy(self._state, tree, run)

    def list_project_copies(self, tree: str) -> list[CopiedWorkspace]:
        """Return the copies of the project itself that runs of a tree worked in."""
        found = copies.list_copies(self._state, tree)
        return [one for one in found if one.workspace.source == one.workspace.project]

    def recover(self) -> bool:
        """Undo what an interrupted apply had done to the project; True if there was something."""
        return recover_folder(self._aside, self._project)

    def find_interrupted(self) -> list[str]:
        """Return the files that `recover` would put back."""
        return find_interrupted(self._aside, self._project)

    def plan_apply(self, runs: Sequence[CopiedWorkspace]) -> Plan:
        """Return what applying the changes of these runs, one after the other, would do to the project."""
        return copies.plan_apply(runs, self._project)

    def carry_out_plan(self, plan: Plan, runs: Sequence[CopiedWorkspace]) -> None:
        """Change the project as planned, all or nothing, and record it for the runs."""
        copies.carry_out_plan(plan, runs, aside=self._aside)
