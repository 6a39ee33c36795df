"""Recording a run's workspace: its changes in the store of the tree, and its files as a snapshot for other runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from retinue.core.errors import RetinueError
from retinue.core.limits import MIB
from retinue.files.atomic import create_folder
from retinue.files.private import make_private_folder
from retinue.files.reserved import list_all_prefixes
from retinue.files.trees import give_folder, remove_tree
from retinue.workspaces import git
from retinue.workspaces.capture import capture_folder, describe_change, list_changed_paths
from retinue.workspaces.copy_tree import BudgetExceeded, CopyBudget, FolderCopier
from retinue.workspaces.ignores import Ignores
from retinue.workspaces.run_folders import RunFolders
from retinue.workspaces.store import ContentNames, Files, Import, Store, find_store
from retinue.workspaces.walk import Skipped, Walker
from retinue.workspaces.workspace import ChangesRecord, Workspace, find_workspace, write_record

LISTED = 200
SNAPSHOT_BYTES = 64 * MIB
NO_SNAPSHOT = "no snapshot of the workspace for other runs: it {why}"
_UNSAFE = re.compile(r"[^\w.@+=, -]", re.ASCII)


def record_changes(workspace: Workspace) -> tuple[ChangesRecord, set[str]]:
    """Store the final state of a workspace. Returns the record of changes, and the names of new and changed files.

    Reads nothing of the workspace's own `.git`."""
    store = find_store(workspace.own)
    base = store.list_files(workspace.base)
    end, skipped = record_files(workspace, store, base, ref=workspace.end)
    changed = list_changed_paths(base, end)
    listed = tuple(describe_change(path, base, end) for path in changed[:LISTED])
    record = ChangesRecord(files=listed, count=len(changed), skipped=str(skipped))
    write_record(workspace.own, record)
    return record, {path for path in changed if path in end}


def record_files(workspace: Workspace, store: Store, base: Files, *, ref: str) -> tuple[Files, Skipped]:
    """Store the current state of the workspace under `ref`. Returns its files and the skipped entries."""
    store.add_known(stored.oid for stored in base.values())
    with Ignores(base, git.find_repository(workspace.project)) as ignores, Import(store) as into:
        walker = Walker(workspace.path, ignored=ignores, foreign=True)
        files = capture_folder(walker, into, base).files
        if ignores.gave_up:
            walker.skipped.add(".gitignore", "git gave up on its patterns")
        into.add_tree(ref, files)
    return files, walker.skipped


def publish_so_far(folders: RunFolders, label: str, run: int) -> tuple[str, str]:
    """Copy the current files of a run that has not ended to the snapshots folder, where its siblings can read them.

    Copies only changed files if the workspace is a copy. Returns a warning and the folder; each may be ""."""
    only: set[str] | None = None
    if folders.workspace_copy is not None:
        copy, store = folders.workspace_copy, find_store(folders.workspace_copy.own)
        if find_workspace(copy.own, copy.tree, copy.run) is None:
            return "", ""  # the copy was never created
        base = store.list_files(copy.base)
        now, _ = record_files(copy, store, base, ref=copy.now)
        only = {path for path in list_changed_paths(base, now) if path in now}
        if not only:
            return "", ""
    target = f"{folders.snapshots}/{_name_snapshot(label, run)}"
    remove_tree(target)  # left by an earlier process that was stopped here
    warning = publish_snapshot(folders, label, run, only=only)
    return warning, target if Path(target).is_dir() else ""


def _name_snapshot(label: str, run: int) -> str:
    """Return a file name for the snapshot of a run. Labels are unique in a tree; a label that cannot be a name gets the
    number of the run, so that the names are unique too."""
    name = _UNSAFE.sub("_", label).strip(". ")[:100]
    return name if name and name == label else f"{name or 'run'}-{run}"


def publish_snapshot(folders: RunFolders, label: str, run: int, *, only: set[str] | None = None) -> str:
    """Copy the files of a run, or `only` these, to the snapshots folder, where the run's siblings can read them.

    Returns a warning, or "". The snapshot appears complete or not at all."""
    name = _name_snapshot(label, run)
    target = make_private_folder(folders.snapshots) / name
    if os.path.lexists(target):
        target = target.with_name(f"{name}-{run}")
    wanted = None if only is None else list_all_prefixes(only)
    walker = Walker(folders.path, foreign=True, ignored=lambda entry: wanted is not None and entry.path not in wanted)

    def fill(partial: Path) -> bool:
        if not FolderCopier(str(partial), ContentNames(), CopyBudget(SNAPSHOT_BYTES)).copy(walker):
            return False
        if os.geteuid() == 0:  # the runs of a tree may be different users that share a group
            give_folder(str(partial), -1, partial.parent.stat().st_gid)
        return True

    try:
        create_folder(target, fill)
    except (OSError, RetinueError) as error:
        large = isinstance(error, BudgetExceeded)
        return NO_SNAPSHOT.format(why=f"is larger than {SNAPSHOT_BYTES // MIB} MiB" if large else error)
    return ""
