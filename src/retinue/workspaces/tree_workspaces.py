"""The copied workspaces of trees: prepared for a run, recorded when it has ended."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TypeVar

from retinue.concurrency import TaskOwner
from retinue.core.errors import Failed, RetinueError
from retinue.core.events import Warned
from retinue.core.limits import WORKSPACE_MIB
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.files.private import make_private_folder
from retinue.files.trees import give_folder, remove_tree
from retinue.workspaces import git
from retinue.workspaces.capture import capture_folder, describe_change, list_changed_paths
from retinue.workspaces.copy_tree import BudgetExceeded, CopyBudget, FolderCopier
from retinue.workspaces.create import MIB, CreatedWorkspace, create_workspace
from retinue.workspaces.ignores import Ignores
from retinue.workspaces.run_folders import RunFolders
from retinue.workspaces.store import ContentNames, Files, Import, Store
from retinue.workspaces.walk import Skipped, Walker
from retinue.workspaces.workspace import (
    APPLIED_FILE,
    CHANGES_FILE,
    WORKSPACE_FILE,
    ChangesRecord,
    Workspace,
    WorkspaceRecord,
    read_record,
    write_record,
)

LISTED = 200
REMEMBERED = 64
SNAPSHOT_BYTES = 64 * MIB
STORE = "workspaces.git"
NO_SNAPSHOT = "no snapshot of the workspace for other runs: it {why}"
GONE = "its workspace is gone: {path}; what it did there is lost, so it cannot go on"
CLOSE_SECONDS = 10.0
STOP_SECONDS = 2.0
T = TypeVar("T")
_UNSAFE = re.compile(r"[^\w.@+=, -]", re.ASCII)


def find_store(own: str) -> Store:
    """Return the store of the tree that a run's folder belongs to."""
    return Store(str(Path(own).parent / STORE))


class Workspaces:
    """The copied workspaces of a process, each made once, beside the event loop. Remembers the trees' stores, so that
    eight copies of a project are stored once."""

    def __init__(self, *, max_mib: int = WORKSPACE_MIB) -> None:
        self._limit = max_mib * MIB
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()
        self._making: dict[str, _Making] = {}
        self._tasks = TaskOwner(on_error=lambda _: None)  # whoever awaits a task gets its exception

    def start_thread(self, work: Callable[[], T]) -> asyncio.Task[T]:
        """Run work on a workspace in a thread. `close` waits for it, so that nothing is written in a folder that is
        gone."""
        return self._tasks.start_thread(work)

    async def close(self) -> None:
        """Wait for work that still copies or looks; nobody else does if its run was killed."""
        await self._tasks.wait(CLOSE_SECONDS)

    async def make_above(self, job: Job, link: Link) -> None:
        """Make the workspaces of the runs above one, which it may read."""
        if isinstance(job.folders, RunFolders) and job.folders.parent is not None:
            await self.make(job.folders.parent, link)

    async def make(self, folders: RunFolders, link: Link) -> None:
        """Make a run's workspace, after those of the runs above it. Raises Failed."""
        if folders.parent is not None:
            await self.make(folders.parent, link)
        copy = folders.workspace_copy
        if copy is None or folders.is_made:
            return
        making = self._making.get(copy.own)
        if making is None:
            making = self._making[copy.own] = _Making(copy, self)
        try:
            made = await making.wait()
        except (RetinueError, OSError) as error:
            raise Failed(str(error)) from None
        finally:
            if making.is_over and self._making.get(copy.own) is making:  # else others wait for it, or for the next one
                del self._making[copy.own]
        if not folders.is_made:
            folders.is_made = True
            if made.skipped.count:
                link.emit(Warned(f"not in the workspace: {made.skipped}", code="workspace_skipped"))

    def prepare(self, workspace: Workspace, stop: threading.Event) -> CreatedWorkspace:
        """Make the workspace and store its first state.

        A workspace that an earlier process made is used as it is; one that was half made is made anew; one that was
        removed since is an error, for in an empty folder everything would seem to be deleted. The workspaces of a tree
        are made one after the other, so that what they have in common is stored once."""
        if read_record(workspace.own, WORKSPACE_FILE, WorkspaceRecord) is not None:
            if _is_empty(workspace.path) and find_store(workspace.own).list_files(workspace.base):
                raise RetinueError(GONE.format(path=workspace.path))
            for name in (CHANGES_FILE, APPLIED_FILE):  # of the run before it was resumed
                Path(workspace.own, name).unlink(missing_ok=True)
            return CreatedWorkspace()
        if Path(workspace.path).is_dir() and not Path(workspace.path).is_symlink():
            remove_tree(workspace.path)
        with self._lock:
            if workspace.tree not in self._stores and len(self._stores) >= REMEMBERED:
                self._stores.clear()
            store = self._stores.setdefault(workspace.tree, find_store(workspace.own))
        make_private_folder(workspace.own)
        store.ensure_created()
        source = workspace.source_workspace
        known = None if source is None else store.list_files(source.base)
        with store.hold(stop):
            made = create_workspace(workspace, store, known=known, limit=self._limit, stop=stop)
        record = WorkspaceRecord(
            kind=workspace.kind,
            path=workspace.path,
            source=workspace.source,
            project=workspace.project,
            objects=made.objects,
        )
        write_record(workspace.own, WORKSPACE_FILE, record)
        return made


class _Making:
    """One workspace that is being made; several calls may wait for it. The last that gives up stops it."""

    def __init__(self, workspace: Workspace, workspaces: Workspaces) -> None:
        self._stop = threading.Event()
        self._task = workspaces.start_thread(lambda: workspaces.prepare(workspace, self._stop))
        self._waiting = 0

    @property
    def is_over(self) -> bool:
        return self._task.done() or self._stop.is_set()

    async def wait(self) -> CreatedWorkspace:
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._waiting == 1:
                self._stop.set()
                await asyncio.wait([self._task], timeout=STOP_SECONDS)
            raise
        finally:
            self._waiting -= 1


def _is_empty(folder: str) -> bool:
    try:
        return not any(Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return True


def record_changes(workspace: Workspace) -> tuple[ChangesRecord, set[str]]:
    """Store what a run left; return the record of its changes, and the new and changed files by name. Nothing of the
    workspace's own `.git` is read."""
    store = find_store(workspace.own)
    base = store.list_files(workspace.base)
    end, skipped = record_files(workspace, store, base, ref=workspace.end)
    changed = list_changed_paths(base, end)
    listed = tuple(describe_change(path, base, end) for path in changed[:LISTED])
    record = ChangesRecord(files=listed, count=len(changed), skipped=str(skipped))
    write_record(workspace.own, CHANGES_FILE, record)
    return record, {path for path in changed if path in end}


def record_files(workspace: Workspace, store: Store, base: Files, *, ref: str) -> tuple[Files, Skipped]:
    """Store the workspace as it is now under `ref`; return its files and what was left out."""
    store.add_known(stored.oid for stored in base.values())
    with Ignores(base, git.find_repository(workspace.project)) as ignores, Import(store) as into:
        walker = Walker(workspace.path, ignored=ignores, foreign=True)
        files = capture_folder(walker, into, base).files
        if ignores.gave_up:
            walker.skipped.add(".gitignore", "git gave up on its patterns")
        into.add_tree(ref, files)
    return files, walker.skipped


def publish_snapshot(workspace: str, snapshots: str, label: str, run: int, *, only: set[str] | None = None) -> str:
    """Copy what a run left to where its siblings can read it: all of a folder, or `only` these files of it. Returns a
    warning, or "". The snapshot appears whole or not at all."""
    name = (_UNSAFE.sub("_", label).strip(". ")[:100]) or "run"
    target = Path(make_private_folder(snapshots), name)
    if os.path.lexists(target):
        target = target.with_name(f"{name}-{run}")
    partial = target.with_name(f".{target.name}.new")
    wanted = None if only is None else {*only, *(str(above) for path in only for above in PurePath(path).parents)}
    walker = Walker(workspace, foreign=True, ignored=lambda entry: wanted is not None and entry.path not in wanted)
    budget = CopyBudget(SNAPSHOT_BYTES)
    try:
        make_private_folder(partial)
        if FolderCopier(str(partial), ContentNames(), budget).copy(walker):
            if os.geteuid() == 0:  # the runs of a tree may be users of their own, with a group in common
                give_folder(str(partial), -1, partial.parent.stat().st_gid)
            partial.rename(target)
    except (OSError, RetinueError) as error:
        large = isinstance(error, BudgetExceeded)
        return NO_SNAPSHOT.format(why=f"is larger than {SNAPSHOT_BYTES // MIB} MiB" if large else error)
    finally:
        remove_tree(partial)
    return ""
