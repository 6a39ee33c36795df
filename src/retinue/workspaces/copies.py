"""The copied workspaces of runs: finding them later, showing their changes and applying them, all or none.

Knows nothing of running processes: a copy is found through its run's folder in the project's state folder.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec

from retinue.core.changes import ApplyPlan, ChangedLines, Changes, RunCopy
from retinue.core.errors import RetinueError
from retinue.core.events import RunSpawned
from retinue.core.profiles import COPIES
from retinue.core.results import ChangedFile
from retinue.files.state_folder import find_tree_folder, name_run_folder
from retinue.workspaces import atomic_apply, merge
from retinue.workspaces.capture import describe_change, list_changed_paths
from retinue.workspaces.recording import LISTED, record_changes, record_files
from retinue.workspaces.store import Files, Import, Store, find_store
from retinue.workspaces.workspace import (
    ApplyRecord,
    ChangesRecord,
    Workspace,
    find_workspace,
    read_record,
    write_record,
)

NO_COPY = "{who} worked in no copy, so there is nothing to apply: its workspace is {workspace}"
ELSEWHERE = "{who} ran in the MCP server '{server}': it worked there, so there is nothing of it here to apply"
NOTHING = "{who} changed no files"
ALREADY = "all changes of {who} were already {applied}"
STALE = "the files changed after the diff was shown; nothing was applied"
CONFLICTS = "nothing was changed: {count} of the files cannot be applied:\n{why}"
_STATUS = {"A": "added", "D": "deleted"}


@dataclass(frozen=True)
class CopiedWorkspace:
    """The copied workspace of one run and its records. `changes` is None if the end of the run was not recorded. With
    `live`, the run has not ended, and its changes are those so far."""

    workspace: Workspace
    name: str
    changes: ChangesRecord | None
    applied: ApplyRecord | None
    live: bool = False

    @property
    def store(self) -> Store:
        """Return the store of the run's tree."""
        return find_store(self.workspace.own)

    def list_steps(self) -> list[tuple[Files, Files]]:
        """Return the changes in order: those of each run that this run continues, then its own.

        A step is a pair of a state and the next state."""
        made = self.workspace
        names = [made.base, *(made.start(index) for index in range(made.starts))]
        return list(pairwise([*map(self.store.list_files, names), self.end_files]))

    def find_changes(self) -> ChangesRecord:
        """Return the changes of an ended run. Reads the workspace if the changes were not recorded yet."""
        return record_changes(self.workspace)[0] if self.changes is None else self.changes

    def find_start(self) -> str:
        """Return the ref of the state that the changes start from: the last apply before the run ended, or the first
        state."""
        made = self.workspace
        return made.last_apply if self.store.has_ref(made.last_apply) else made.base

    @cached_property
    def start_files(self) -> Files:
        """The files that the changes start from."""
        return self.store.list_files(self.find_start())

    @cached_property
    def end_files(self) -> Files:
        """The files that the changes lead to: those at the end of the run, or those of now, read once."""
        if self.live:
            return record_files(self.workspace, self.store, self.start_files, ref=self.workspace.now)[0]
        self.find_changes()
        return self.store.list_files(self.workspace.end)

    def diff(self, *options: str) -> bytes:
        """Return the changes as a git diff."""
        made = self.workspace
        self.end_files  # noqa: B018 - records the state that git compares
        return self.store.diff(self.find_start(), made.now if self.live else made.end, *options)

    def count_changed_lines(self) -> list[ChangedLines]:
        """Return each changed file with the numbers of its added and removed lines."""
        words = ("--no-renames", "-z")
        statuses = self.diff("--name-status", *words).decode("utf-8", "backslashreplace").split("\0")
        counts = self.diff("--numstat", *words).decode("utf-8", "backslashreplace").split("\0")
        by_path = {line.split("\t", 2)[2]: line.split("\t", 2)[:2] for line in counts if line}
        found = []
        for letter, path in zip(statuses[::2], statuses[1::2], strict=False):
            added, removed = (None if number == "-" else int(number) for number in by_path.get(path, ["-", "-"]))
            status = _STATUS.get(letter, "modified")
            found.append(ChangedLines(status=status, path=path, added=added, removed=removed, binary=added is None))
        return found

    def explain_nothing_to_apply(self) -> str:
        """Return why a run has no changes to apply, or "" if it has some."""
        if self.applied is None and list_changed_paths(self.start_files, self.end_files):
            return ""
        how = self._describe_apply()
        return ALREADY.format(who=self.name, applied=how) if how else NOTHING.format(who=self.name)

    def summarize(self) -> RunCopy:
        """Return the copied workspace as a `RunCopy` value, for Control."""
        made = self.workspace
        unapplied = self._count_unapplied()
        return RunCopy(
            tree=made.tree,
            run=made.run,
            kind=made.kind,
            source=made.source,
            applied="" if unapplied != 0 else self._describe_apply(),
            unapplied=unapplied,
        )

    def _count_unapplied(self) -> int | None:
        """Return the number of files with changes left to apply, or None if the end of the run was not recorded."""
        if self.applied is not None:
            return 0
        if self.changes is None:
            return None
        if self.find_start() == self.workspace.base:
            return self.changes.count
        return len(list_changed_paths(self.start_files, self.end_files))

    def _describe_apply(self) -> str:
        """Return that all changes were applied, with the place and time if they are recorded, or "" if there was no
        apply."""
        if self.applied is None:
            return "" if self.find_start() == self.workspace.base else "applied"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.applied.at))
        return f"applied to {self.applied.into}, {at}"

    def describe(self, target: str) -> Changes:
        """Return the changes of an ended run, which `target` gets, as a `Changes` value for Control."""
        changed = list_changed_paths(self.start_files, self.end_files)
        files = tuple(describe_change(path, self.start_files, self.end_files) for path in changed[:LISTED])
        return Changes(files, len(changed), target, "" if self.applied is None else self.applied.into)

    def record_apply(self, target: str) -> None:
        """Record that the changes were applied to `target`: of a live run those so far, so that only later ones count
        from now on."""
        if self.live:
            with Import(self.store) as into:
                into.add_tree(self.workspace.last_apply, self.end_files)
            return
        record = ApplyRecord(target, time.time(), self.find_changes().count)
        write_record(self.workspace.own, record)


def find_copy(state: str, tree: str, run: int, *, live: bool = False) -> CopiedWorkspace | None:
    """Return the copied workspace of a run, or None if the run had none. With `live`, the run has not ended."""
    own = name_run_folder(state, tree, run)
    workspace = find_workspace(own, tree, run)
    if workspace is None:
        return None
    return CopiedWorkspace(
        workspace,
        f"{tree}/{run}",
        read_record(own, ChangesRecord),
        read_record(own, ApplyRecord),
        live=live,
    )


def is_unmade(spawned: RunSpawned) -> bool:
    """Return True if the run's copy was never created, because no call of the run needed it."""
    return spawned.workspace_kind in COPIES and not Path(spawned.workspace).exists()


def explain_missing_copy(who: str, spawned: RunSpawned) -> str:
    """Return why a run has no copied workspace."""
    if spawned.server:
        return ELSEWHERE.format(who=who, server=spawned.server)
    if is_unmade(spawned):
        return NOTHING.format(who=who)
    return NO_COPY.format(who=who, workspace=spawned.workspace)


def list_copies(state: str, tree: str) -> list[CopiedWorkspace]:
    """Return the copied workspaces of a tree, in the order of its runs. Raises RetinueError if one cannot be read."""
    return [one for run in _list_run_numbers(state, tree) if (one := find_copy(state, tree, run)) is not None]


def summarize_copies(state: str, tree: str) -> list[RunCopy]:
    """Return the copied workspaces of a tree as `RunCopy` values, in the order of its runs. A copy that cannot be read
    has a `problem`."""
    found = []
    for run in _list_run_numbers(state, tree):
        try:
            if (one := find_copy(state, tree, run)) is not None:
                found.append(one.summarize())
        except RetinueError as error:
            found.append(RunCopy(tree=tree, run=run, kind="", source="", problem=str(error)))
    return found


def _list_run_numbers(state: str, tree: str) -> list[int]:
    """Return the numbers of the runs that have a folder."""
    folder = find_tree_folder(state, tree)
    if folder is None:
        return []
    try:
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RetinueError(f"cannot read {folder}: {error.strerror or error}") from None


def _describe_changes(changes: Sequence[merge.Change]) -> tuple[ChangedFile, ...]:
    before = {change.path: change.old for change in changes if change.old is not None}
    after = {change.path: change.new for change in changes if change.new is not None}
    return tuple(describe_change(change.path, before, after) for change in changes)


class TargetFolder:
    """The folder `path`, to which the changes of copied workspaces are applied. `state` is the folder with the runs."""

    def __init__(self, path: str, *, state: str) -> None:
        self.path = path
        self._aside = atomic_apply.find_staging_folder(path, state)

    def undo_interrupted_apply(self) -> bool:
        """Put back the files that an interrupted apply left half changed. Return True if there was such an apply."""
        return atomic_apply.recover_folder(self._aside, self.path)

    def plan(self, copies: Sequence[CopiedWorkspace]) -> merge.MergePlan:
        """Plan the apply of these copies, one after another."""
        store = copies[0].store
        plan = merge.plan_changes(self.path, [(one.start_files, one.end_files) for one in copies], store)
        if plan.conflicts and any(one.workspace.starts for one in copies):
            # If the changes of an earlier run were applied meanwhile, only the later changes are new, so plan by steps.
            in_parts = merge.plan_changes(self.path, [step for one in copies for step in one.list_steps()], store)
            return plan if in_parts.conflicts else in_parts
        return plan

    def carry_out(self, plan: merge.MergePlan, copies: Sequence[CopiedWorkspace]) -> None:
        """Apply the plan, all or none, and record the apply for each run. Raises RetinueError on a conflict."""
        if plan.conflicts:
            raise RetinueError(CONFLICTS.format(count=len(plan.conflicts), why="\n".join(plan.describe_conflicts())))
        if plan.changes:
            atomic_apply.apply_changes(self.path, plan.changes, copies[0].store, aside=self._aside)
        for one in copies:
            one.record_apply(self.path)

    def plan_apply(self, tree: str, copies: Sequence[CopiedWorkspace]) -> ApplyPlan:
        """Return the plan to apply the changes of these copies, for the person who approves it."""
        reasons = [(one, one.explain_nothing_to_apply()) for one in copies]
        left = [one for one, why in reasons if not why]
        unfinished = atomic_apply.find_unfinished_files(self._aside, self.path) if left else []
        about = ApplyPlan(
            tree=tree,
            runs=tuple(one.workspace.run for one in left),
            target=self.path,
            skipped=tuple(why for _, why in reasons if why),
            unfinished=tuple(unfinished),
        )
        if unfinished or not left:
            return about
        plan = self.plan(left)
        return msgspec.structs.replace(
            about,
            diff=plan.diff.decode("utf-8", "backslashreplace"),
            files=_describe_changes(plan.changes[:LISTED]),
            count=len(plan.changes),
            conflicts=tuple(plan.describe_conflicts()),
            digest=plan.digest,
        )

    def apply_planned(self, copies: Sequence[CopiedWorkspace], *, digest: str) -> None:
        """Apply the changes of these copies, if the plan for them has this `digest`. Raises RetinueError."""
        for one in copies:
            if why := one.explain_nothing_to_apply():
                raise RetinueError(why)
        plan = self.plan(copies)
        if plan.digest != digest:
            raise RetinueError(STALE)
        self.carry_out(plan, copies)

    def apply(self, one: CopiedWorkspace) -> Sequence[ChangedFile]:
        """Apply the changes of one copy, whatever they are. Returns the changes to this folder, up to the list
        limit."""
        why = one.explain_nothing_to_apply()
        if one.applied is not None:
            raise RetinueError(why)
        if why:
            return ()
        self.undo_interrupted_apply()
        plan = self.plan([one])
        self.carry_out(plan, [one])
        return _describe_changes(plan.changes[:LISTED])
