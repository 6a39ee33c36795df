"""The copied workspaces of runs: finding them later, showing their changes and applying them, all or none.

Knows nothing of running processes: a copy is found through its run's folder in the project's state folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from retinue.core.changes import RunCopy
from retinue.core.control import Changes
from retinue.core.errors import RetinueError
from retinue.core.events import RunSpawned, decode_raw
from retinue.core.results import ChangedFile
from retinue.workspaces import atomic_apply, merge
from retinue.workspaces.capture import describe_change, list_changed_paths
from retinue.workspaces.recording import LISTED, record_changes, record_files
from retinue.workspaces.store import Files, Import, Store, find_store
from retinue.workspaces.workspace import (
    APPLIED_FILE,
    CHANGES_FILE,
    ApplyRecord,
    ChangesRecord,
    Workspace,
    find_workspace,
    read_record,
    write_record,
)

COPIES = ("copy", "worktree")
SANDBOXED = ("isolated", "container")
NO_COPY = "{who} worked in no copy, so there is nothing to apply: its workspace is {workspace}"
ELSEWHERE = "{who} ran in the MCP server '{server}': it worked there, so there is nothing of it here to apply"
NOTHING = "{who} changed no files"
ALREADY_ALL = "all changes of {who} were already applied to {into}"
ALREADY = "the changes of {who} were already applied to {into}, {at}"
CONFLICTS = "nothing was changed: {count} of the files cannot be applied:\n{why}"
_STATUS = {"A": "added", "D": "deleted"}


@dataclass(frozen=True)
class CopiedWorkspace:
    """The copied workspace of one run and its records. `changes` is None if the end of the run was not recorded."""

    workspace: Workspace
    name: str
    changes: ChangesRecord | None
    applied: ApplyRecord | None

    @property
    def has_unapplied(self) -> bool:
        """Return True if there are, or may be, changes that were not applied."""
        return self.applied is None and (self.changes is None or self.changes.count > 0)

    @property
    def store(self) -> Store:
        """Return the store of the run's tree."""
        return find_store(self.workspace.own)

    def list_steps(self) -> list[tuple[Files, Files]]:
        """Return the changes in order: those of each run that this run continues, then its own.

        A step is a pair of a state and the next state."""
        made = self.workspace
        names = [made.base, *(made.start(index) for index in range(made.starts)), made.end]
        return list(pairwise(map(self.store.list_files, names)))

    def find_changes(self) -> ChangesRecord:
        """Return the changes of an ended run. Reads the workspace if the changes were not recorded yet."""
        return record_changes(self.workspace)[0] if self.changes is None else self.changes

    def find_start(self) -> str:
        """Return the ref of the state that the changes start from: the last apply before the run ended, or the first
        state."""
        made = self.workspace
        return made.last_apply if self.store.has_ref(made.last_apply) else made.base

    def diff(self, *options: str, live: bool = False) -> bytes:
        """Return the changes of a run as a git diff. With `live`, the run has not ended, and these are its changes so
        far."""
        store, made = self.store, self.workspace
        if live:
            record_files(made, store, store.list_files(made.base), ref=made.now)
        else:
            self.find_changes()
        return store.diff(self.find_start(), made.now if live else made.end, *options)

    def list_changed_lines(self, *, live: bool = False) -> list[dict[str, Any]]:
        """Return each changed file as a dict: status, path, added and removed lines (None for a binary file)."""
        words = ("--no-renames", "-z")
        statuses = self.diff("--name-status", *words, live=live).decode("utf-8", "backslashreplace").split("\0")
        counts = self.diff("--numstat", *words, live=live).decode("utf-8", "backslashreplace").split("\0")
        by_path = {line.split("\t", 2)[2]: line.split("\t", 2)[:2] for line in counts if line}
        found = []
        for letter, path in zip(statuses[::2], statuses[1::2], strict=False):
            added, removed = (None if number == "-" else int(number) for number in by_path.get(path, ["-", "-"]))
            status = _STATUS.get(letter, "modified")
            found.append({"status": status, "path": path, "added": added, "removed": removed, "binary": added is None})
        return found

    def explain_nothing_to_apply(self) -> str:
        """Return why an ended run has no changes to apply, or "" if it has some."""
        if self.applied is not None:
            return self._describe_apply(self.applied)
        if not self.find_changes().count:
            return NOTHING.format(who=self.name)
        store, made = self.store, self.workspace
        is_applied = store.has_ref(made.last_apply) and store.list_files(made.last_apply) == store.list_files(made.end)
        return ALREADY_ALL.format(who=self.name, into=made.source) if is_applied else ""

    def summarize(self) -> RunCopy:
        """Return the copied workspace as a `RunCopy` value, for StoredChanges."""
        made = self.workspace
        applied = "" if self.applied is None else self._describe_apply(self.applied)
        return RunCopy(tree=made.tree, run=made.run, kind=made.kind, source=made.source, applied=applied)

    def _describe_apply(self, applied: ApplyRecord) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(applied.at))
        return ALREADY.format(who=self.name, into=applied.into, at=at)

    def describe(self) -> Changes:
        """Return the changes of an ended run as a `Changes` value for Control."""
        found = self.find_changes()
        applied = "" if self.applied is None else self.applied.into
        return Changes(tuple(found.files), found.count, self.workspace.source, applied)

    def apply_to_source(self) -> Sequence[ChangedFile]:
        """Apply the changes of a run to the folder it was copied from. Returns the changes, up to the list limit."""
        why = self.explain_nothing_to_apply()
        if self.applied is not None:
            raise RetinueError(why)
        if not why:
            plan = plan_apply([self], self.workspace.source)
            carry_out_plan(plan, [self], aside=self._prepare_source())
        return self.find_changes().files

    def apply_so_far(self) -> Sequence[ChangedFile]:
        """Apply the changes that a run made since the last apply, or since it began. The run has not ended yet.

        Returns the changes, up to the list limit."""
        store, made = self.store, self.workspace
        before = store.list_files(self.find_start())
        now, _ = record_files(made, store, before, ref=made.now)
        changed = list_changed_paths(before, now)
        if not changed:
            return ()
        plan, aside = merge.plan_changes(made.source, [(before, now)], store), self._prepare_source()
        _write_changes(plan, store, aside=aside)
        with Import(store) as into:
            into.add_tree(made.last_apply, now)
        return [describe_change(path, before, now) for path in changed[:LISTED]]

    def _prepare_source(self) -> str:
        """Roll back an interrupted apply to the source. Returns the folder in which an apply stages its files."""
        source = self.workspace.source
        is_project = source == self.workspace.project
        aside = f"{source}/.retinue/applying" if is_project else f"{Path(source).parent}/applying"
        atomic_apply.recover_folder(aside, source)
        return aside


def find_copy(state: str, tree: str, run: int) -> CopiedWorkspace | None:
    """Return the copied workspace of a run, or None if the run had none."""
    own = f"{state}/runs/{tree}/{run}"
    workspace = find_workspace(own, tree, run)
    if workspace is None:
        return None
    return CopiedWorkspace(
        workspace,
        f"{tree}/{run}",
        read_record(own, CHANGES_FILE, ChangesRecord),
        read_record(own, APPLIED_FILE, ApplyRecord),
    )


def is_unmade(spawned: RunSpawned) -> bool:
    """Return True if the run's copy was never created, because no call of the run needed it."""
    profile = decode_raw(spawned.profile)
    kind, is_sandboxed = profile.get("workspace"), profile.get("runtime") in SANDBOXED
    has_copy = kind in COPIES or (kind is None and is_sandboxed)
    return has_copy and not spawned.server and not Path(spawned.workspace).exists()


def explain_missing_copy(who: str, spawned: RunSpawned) -> str:
    """Return why a run has no copied workspace."""
    if spawned.server:
        return ELSEWHERE.format(who=who, server=spawned.server)
    if is_unmade(spawned):
        return NOTHING.format(who=who)
    return NO_COPY.format(who=who, workspace=spawned.workspace)


def list_copies(state: str, tree: str) -> list[CopiedWorkspace]:
    """Return the copied workspaces of a tree, in the order of its runs."""
    folder = Path(state, "runs", tree)
    runs = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []
    return [found for found in (find_copy(state, tree, run) for run in runs) if found is not None]


def plan_apply(copies: Sequence[CopiedWorkspace], target: str) -> merge.MergePlan:
    """Plan the apply of these copies to the folder `target`, one after another."""
    store = copies[0].store
    for one in copies:
        one.find_changes()
    steps = [(store.list_files(one.find_start()), store.list_files(one.workspace.end)) for one in copies]
    plan = merge.plan_changes(target, steps, store)
    if plan.conflicts and any(one.workspace.starts for one in copies):
        # If the changes of an earlier run were applied meanwhile, only the later changes are new, so plan step by step.
        in_parts = merge.plan_changes(target, [step for one in copies for step in one.list_steps()], store)
        return plan if in_parts.conflicts else in_parts
    return plan


def _write_changes(plan: merge.MergePlan, store: Store, *, aside: str) -> None:
    """Write the changes of the plan to its folder, all or none. Raises RetinueError on a conflict."""
    if plan.conflicts:
        raise RetinueError(CONFLICTS.format(count=len(plan.conflicts), why="\n".join(plan.describe_conflicts())))
    if plan.changes:
        atomic_apply.apply_changes(plan.target, plan.changes, store, aside=aside)


def carry_out_plan(plan: merge.MergePlan, copies: Sequence[CopiedWorkspace], *, aside: str) -> None:
    """Apply the plan, all or none, and record the apply in each run's folder."""
    _write_changes(plan, copies[0].store, aside=aside)
    for one in copies:
        write_record(one.workspace.own, APPLIED_FILE, ApplyRecord(plan.target, time.time(), one.find_changes().count))
