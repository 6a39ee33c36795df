"""Creating copied workspaces: the files of another folder, plus a separate `.git` for a `worktree`.

A `copy` has everything but `.git` folders and our own state. A `worktree` has the files that git sees (tracked, and
untracked but not ignored) in their current state, and a clone of the repository. In both, ignored files never count as
changes. Submodules and nested repositories are copied as plain files.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import ConfigError, Failed, RetinueError
from retinue.core.events import Warned
from retinue.core.limits import MIB, WORKSPACE_MIB
from retinue.core.plans import Job
from retinue.core.ports import Emit
from retinue.files.atomic import create_folder, move_folder
from retinue.files.private import make_private_folder
from retinue.files.state_folder import find_state_folder
from retinue.files.trees import remove_tree
from retinue.workspaces import git
from retinue.workspaces.clone import Clone, make_clone
from retinue.workspaces.copy_tree import BudgetExceeded, CopyBudget, FolderCopier
from retinue.workspaces.ignores import Ignores
from retinue.workspaces.run_folders import NOT_A_REPOSITORY, RunFolders
from retinue.workspaces.store import ContentNames, Files, Import, Store, find_store
from retinue.workspaces.walk import Skipped, Walker, display_path
from retinue.workspaces.workspace import (
    ApplyRecord,
    ChangesRecord,
    Workspace,
    is_empty_folder,
    read_record,
    remove_record,
    write_record,
)

BROKEN_REPOSITORY = (
    "workspace 'worktree' needs git's repository, and git cannot use that of {project}: `git -C {project} status` says "
    "why; or use copy"
)
TOO_LARGE = (
    "the workspace would be larger than {limit} MiB (it was full at {path}): name what it does not need in .gitignore, "
    "raise workspace_max_mib in retinue.yaml, or use scratch"
)
SLOW_PATTERNS = "git cannot tell which files are ignored: a pattern in .gitignore takes it too long; use workspace copy"
GONE = "its workspace is gone: {path}; what it did there is lost, so it cannot continue"
CONTINUED_GONE = (
    "the workspace of the run that this one continues is gone: {path}; apply its changes (`retinue apply {run}`) and "
    "start a new run instead"
)
CLOSE_SECONDS = 10.0
STOP_SECONDS = 2.0

T = TypeVar("T")


class Workspaces:
    """The copied workspaces of a process. Each is created once, in a thread."""

    def __init__(self, *, max_mib: int = WORKSPACE_MIB) -> None:
        self._limit = max_mib * MIB
        self._creations: dict[str, _WorkspaceCreation] = {}
        self._tasks = TaskOwner(on_error=lambda _: None)  # the caller that awaits a task gets its exception

    def start_thread(self, work: Callable[[], T]) -> asyncio.Task[T]:
        """Run `work` on a workspace in a thread.

        `close` waits for the thread, so that no thread writes into a removed folder."""
        return self._tasks.start_thread(work)

    async def close(self) -> None:
        """Wait for threads that still copy or read a workspace. If a run was killed, nothing else waits for its
        threads."""
        await self._tasks.wait(CLOSE_SECONDS)

    async def make_for_peer(self, job: Job, emit: Emit) -> None:
        """Create the folders that the peer of a remote run may use: the workspaces of its ancestors, and its own
        workspace, with the files it starts from."""
        folders = job.folders
        if isinstance(folders, RunFolders):
            needed = folders if folders.starts_from else folders.parent
            if needed is not None:
                await self.make(needed, emit)
            make_private_folder(folders.path)

    async def make(self, folders: RunFolders, emit: Emit) -> None:
        """Create a run's workspace, after the workspaces of its ancestors. Raises Failed."""
        if folders.parent is not None:
            await self.make(folders.parent, emit)
        copy, own = folders.workspace_copy, folders.own
        if folders.is_made or not (copy is not None or folders.starts_from):
            return
        creation = self._creations.get(own)
        if creation is None:
            make = partial(self.prepare_scratch, folders) if copy is None else partial(self.prepare, copy)
            creation = self._creations[own] = _WorkspaceCreation(make, self)
        try:
            skipped = await creation.wait()
        except (RetinueError, OSError) as error:
            raise Failed(str(error)) from None
        finally:
            # Otherwise other calls still wait for it, or a new one has replaced it.
            if creation.is_over and self._creations.get(own) is creation:
                del self._creations[own]
        if not folders.is_made:
            folders.mark_made()
            if skipped.count:
                emit(Warned(f"not in the workspace: {skipped}", code="workspace_skipped"))

    def prepare_scratch(self, folders: RunFolders, stop: threading.Event) -> Skipped:
        """Fill a run's empty scratch folder with the files of the folder it starts from. Returns the skipped entries.

        A folder that is not empty stays as it is. The copy is atomic: the folder gets all files or none."""
        if folders.moves_start:
            move_folder(Path(folders.starts_from), Path(folders.path))
            return Skipped()
        if not is_empty_folder(folders.path) or is_empty_folder(folders.starts_from):
            return Skipped()
        walker = Walker(folders.starts_from, foreign=True, stop=stop)

        def fill(partial_copy: Path) -> bool:
            FolderCopier(str(partial_copy), ContentNames(), CopyBudget(self._limit)).copy(walker)
            return True

        with _explain_budget(self._limit):
            create_folder(folders.path, fill)
        return walker.skipped

    def prepare(self, workspace: Workspace, stop: threading.Event) -> Skipped:
        """Create the workspace and store its first state. Returns the skipped entries.

        A workspace from an earlier process is reused. A partial one is created again. A missing one is an error,
        because in an empty folder all files would seem to be deleted. The workspaces of a tree are created one after
        another, so that shared content is stored once."""
        if read_record(workspace.own, Workspace) is not None:
            if is_empty_folder(workspace.path) and find_store(workspace.own).list_files(workspace.base):
                raise RetinueError(GONE.format(path=workspace.path))
            remove_record(workspace.own, ChangesRecord)  # from before the run was resumed
            remove_record(workspace.own, ApplyRecord)
            return Skipped()
        if Path(workspace.path).is_dir() and not Path(workspace.path).is_symlink():
            remove_tree(workspace.path)
        make_private_folder(workspace.own)
        store = find_store(workspace.own)
        with store.hold(stop):
            store.ensure_created()
            made, skipped = create_workspace(workspace, store, limit=self._limit, stop=stop)
        write_record(workspace.own, made)
        return skipped


class _WorkspaceCreation:
    """The creation of one workspace, which several calls may await. If the last waiting call is cancelled, it stops."""

    def __init__(self, make: Callable[[threading.Event], Skipped], workspaces: Workspaces) -> None:
        self._stop = threading.Event()
        self._task = workspaces.start_thread(lambda: make(self._stop))
        self._waiting = 0

    @property
    def is_over(self) -> bool:
        return self._task.done() or self._stop.is_set()

    async def wait(self) -> Skipped:
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


def create_workspace(
    workspace: Workspace, store: Store, *, limit: int, stop: threading.Event
) -> tuple[Workspace, Skipped]:
    """Create a planned workspace and store its first state. Returns the created workspace and the skipped entries.

    Removes the workspace again if an error occurs."""
    project, is_worktree, continued = workspace.project, workspace.kind == "worktree", workspace.continued
    repository = git.find_repository(project)
    if is_worktree and repository is None:
        text = BROKEN_REPOSITORY if os.path.lexists(f"{project}/.git") else NOT_A_REPOSITORY
        raise ConfigError(text.format(project=project))
    known = _list_known_files(workspace, store)
    start = workspace.source if continued is None else continued.path
    foreign = start != project
    tracked = git.list_tracked(project) if repository is not None and not foreign else known
    starts, clone = 0, Clone()
    make_private_folder(workspace.path)
    with ExitStack() as undo, _explain_budget(limit):
        undo.callback(remove_tree, workspace.path)
        try:
            state = find_state_folder(workspace.own).stat()  # it may be inside the project, under any name
            with Ignores(tracked, repository) as ignores, Import(store) as into:
                walker = Walker(
                    start,
                    ignored=ignores,
                    inside_ignored=not is_worktree or continued is not None,
                    foreign=foreign,
                    never={(state.st_dev, state.st_ino)},
                    stop=stop,
                )
                files = FolderCopier(workspace.path, into, CopyBudget(limit)).copy(walker)
                if continued is not None and read_record(continued.own, ApplyRecord) is None:
                    starts = _import_starts(workspace, continued, into, files)
                    files = _import_files(continued, continued.base, into)
                into.add_tree(workspace.base, files)
                if is_worktree and ignores.gave_up and continued is None:  # it has files that should be ignored
                    raise RetinueError(SLOW_PATTERNS)
            if is_worktree and repository is not None:
                clone = make_clone(workspace.path, project, repository)
        except OSError as error:
            raise RetinueError(f"cannot make the workspace {workspace.path}: {error.strerror or error}") from error
        undo.pop_all()
    made = msgspec.structs.replace(
        workspace,
        source_workspace=None,
        continued=None,
        starts=starts,
        objects=clone.objects,
        foreign_objects=clone.foreign_objects,
    )
    return made, walker.skipped


@contextmanager
def _explain_budget(limit: int) -> Iterator[None]:
    try:
        yield
    except BudgetExceeded as error:
        raise RetinueError(TOO_LARGE.format(limit=limit // MIB, path=display_path(error.path))) from None


def _list_known_files(workspace: Workspace, store: Store) -> Files:
    """Return the first files of the workspace that this one continues or copies, if any."""
    continued, source = workspace.continued, workspace.source_workspace
    if continued is None:
        return {} if source is None else store.list_files(source.base)
    known = find_store(continued.own).list_files(continued.base)
    if known and is_empty_folder(continued.path):
        raise RetinueError(CONTINUED_GONE.format(path=continued.path, run=f"{continued.tree}/{continued.run}"))
    return known


def _import_starts(workspace: Workspace, continued: Workspace, into: Import, files: Files) -> int:
    """Store the states that earlier runs left; `files` is the last of these states. Returns their number."""
    for index in range(continued.starts):
        into.add_tree(workspace.start(index), _import_files(continued, continued.start(index), into))
    into.add_tree(workspace.start(continued.starts), files)
    return continued.starts + 1


def _import_files(workspace: Workspace, ref: str, into: Import) -> Files:
    """Import a state of a workspace from the store of its tree. Returns the files of the state."""
    store = find_store(workspace.own)
    files = store.list_files(ref)
    for stored in files.values():
        if not into.has_content(stored.oid):
            into.add_bytes(store.read_content(stored.oid))
    return files
