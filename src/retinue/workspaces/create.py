"""Creating copied workspaces: the files of another folder, plus a separate `.git` for a `worktree`.

A `copy` has everything but `.git` folders and our own state. A `worktree` has the files that git sees (tracked, and
untracked but not ignored) in their current state, and a clone of the repository. In both, ignored files never count as
changes. Submodules and nested repositories are copied as plain files.

The clone reads the objects of the user's repository by path. It has the branches and tags, but no remotes, hooks or
custom settings. Only git's own plumbing writes it, before any run has touched the workspace.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from retinue.files.content import read_small_file
from retinue.files.private import make_private_folder
from retinue.files.state_folder import find_state_folder
from retinue.files.trees import is_public_tree, remove_tree
from retinue.workspaces import git
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
MAX_ALTERNATES_DEPTH = 5  # the same limit as git's
MAX_GIT_FILE_BYTES = 1024 * 1024
_OBJECTS_NAME = re.compile(r"[0-9a-f]{2}|info|pack|tmp[_-].*|incoming-.*|[a-z-]+\.lock")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}

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
    starts, objects, foreign_objects = 0, tuple[str, ...](), tuple[str, ...]()
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
                objects, foreign_objects = make_clone(workspace.path, project, repository)
        except OSError as error:
            raise RetinueError(f"cannot make the workspace {workspace.path}: {error.strerror or error}") from error
        undo.pop_all()
    made = msgspec.structs.replace(
        workspace,
        source_workspace=None,
        continued=None,
        starts=starts,
        objects=objects,
        foreign_objects=foreign_objects,
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


# The clone of a worktree


def make_clone(workspace: str, project: str, repository: git.Repository) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Create the `.git` of a new workspace. Returns the folders with its objects, and the folders among them which may
    belong to another repository.

    A sandboxed run of root has its own user, who may not read the objects of a repository closed to others, as root's
    are with umask 077. Then the clone gets copies of its objects, unless git cannot copy them, as in a partial
    clone."""
    objects = _find_object_folders(repository.objects)
    foreign_objects = _find_foreign_objects(objects, repository, project)
    _make_repository(workspace, project, repository, objects)
    if os.geteuid() == 0 and not foreign_objects and not all(map(is_public_tree, objects)):
        with suppress(RetinueError):
            git.run_in_store("repack", "-a", "-d", "-q", git_dir=f"{workspace}/.git", cwd=workspace)
            Path(workspace, ".git/objects/info/alternates").unlink()
            objects = ()
    return objects, foreign_objects


def _make_repository(workspace: str, project: str, repository: git.Repository, objects: tuple[str, ...]) -> None:
    folder = f"{workspace}/.git"
    words = ("init", "-q", "--template=", f"--object-format={repository.format}", workspace)
    git.run_in_store(*words, git_dir=folder, cwd=workspace)
    info = Path(folder, "objects", "info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "alternates").write_bytes(b"".join(_quote_alternate(os.fsencode(path)) + b"\n" for path in objects))
    with suppress(FileNotFoundError):
        Path(folder, "shallow").write_bytes(read_small_file(repository.shallow, MAX_GIT_FILE_BYTES))
    whole = not repository.prefix
    head = repository.head if whole else _commit_subfolder(project, repository, folder)
    if whole and head:
        kinds = ("refs/heads", "refs/tags")
        refs = git.run_in_project("for-each-ref", "--format=%(objectname) %(refname)", *kinds, project=project)
        Path(folder, "packed-refs").write_bytes(b"# pack-refs with: \n" + refs)
    if repository.branch:
        git.run_in_store("symbolic-ref", "HEAD", repository.branch, git_dir=folder)
    if head:
        git.run_in_store("update-ref", *(() if repository.branch else ("--no-deref",)), "HEAD", head, git_dir=folder)
        git.run_in_store("read-tree", head, git_dir=folder, cwd=workspace)


def _commit_subfolder(project: str, repository: git.Repository, folder: str) -> str:
    """Create a commit with the content of a project that is a subfolder of a repository. Returns its hash.

    The commit replaces the repository's history. Returns "" if HEAD has no such folder."""
    if not repository.head:
        return ""
    place = repository.prefix.rstrip("/")
    words = ("rev-parse", "--verify", "--quiet", f"{repository.head}:{place}")
    tree = git.run_in_project(*words, project=project, good=(0, 1)).decode().strip()
    if not tree:
        return ""
    message = f"{place} at {repository.head}"
    return git.run_in_store("commit-tree", tree, "-m", message, git_dir=folder).decode().strip()


def _find_object_folders(objects: str) -> tuple[str, ...]:
    """Return the object folder and all its alternates, without duplicates and with links resolved.

    A repository cloned with `--shared` or `--reference` also reads the objects of another repository, which may do the
    same. These folders are mounted into the sandbox, so each must look like an object folder."""
    found = {os.path.realpath(objects): None}
    layer = list(found)
    for depth in range(MAX_ALTERNATES_DEPTH):
        layer = [path for folder in layer for path in _read_alternates(folder, relative=not depth) if path not in found]
        found |= dict.fromkeys(layer)
    return tuple(found)


def _find_foreign_objects(objects: Sequence[str], repository: git.Repository, project: str) -> tuple[str, ...]:
    """Return the object folders that are neither in the project nor part of its own repository.

    The files of a clone can name any repository of the user's as an alternate."""
    own = os.path.realpath(repository.objects) if repository.is_own else None
    inside = f"{os.path.realpath(project)}/"
    return tuple(path for path in objects if path != own and not path.startswith(inside))


def _read_alternates(objects: str, *, relative: bool) -> Iterator[str]:
    try:
        named = read_small_file(f"{objects}/info/alternates", MAX_GIT_FILE_BYTES, follow=True).split(b"\n")
    except OSError:
        return
    for line in named:
        if not line or line.startswith(b"#") or b"\0" in _unquote_alternate(line):
            continue
        path = os.fsdecode(_unquote_alternate(line))
        if (path.startswith("/") or relative) and _is_objects(real := os.path.realpath(os.path.join(objects, path))):  # noqa: PTH118
            yield real


def _is_objects(folder: str) -> bool:
    try:
        names = [path.name for path in Path(folder).iterdir()]
    except OSError:
        return False
    return "pack" in names and all(map(_OBJECTS_NAME.fullmatch, names))


def _quote_alternate(path: bytes) -> bytes:
    """Return a path as a line of an alternates file, quoted if git could misread it."""
    if not path.startswith((b"#", b'"')) and b"\n" not in path:
        return path
    return git.quote_path(path)


def _unquote_alternate(line: bytes) -> bytes:
    if not (line.startswith(b'"') and line.endswith(b'"') and len(line) > 1):
        return line
    return _ESCAPE.sub(_unescape, line[1:-1])


def _unescape(found: re.Match[bytes]) -> bytes:
    letter = found[1]
    return bytes([int(letter, 8) & 0xFF]) if letter.isdigit() and len(letter) == 3 else _LETTERS.get(letter, letter)
