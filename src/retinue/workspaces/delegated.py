"""Workspaces of delegated runs: copied from folders of an untrusted peer, and copied back there.

The peer names paths. Each path is opened below an allowed root that is held open, one component at a time, without
following links. So nothing outside the root is read or written, even if the peer swaps folders meanwhile. The run
works in a copy and never sees a path of the peer. Copying and comparing use the same code as every other workspace.
Links are not copied in either direction.

This module brings changes back in its own way, not by `merge` and `atomic_apply`, which apply all changes or, in a
conflict, none. Nobody is there to settle a conflict, and others work in the peer's folder too. So the changes are
copied back file by file, each atomically. In a conflict the run wins, and the notes list the files it replaced.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from retinue.core.errors import ConfigError, RetinueError
from retinue.files.atomic import is_temporary_name, open_replacement
from retinue.files.content import read_chunks, write_all
from retinue.files.failpoints import reach_failpoint
from retinue.files.opening import (
    FileId,
    RefusedFile,
    file_id,
    make_folder,
    open_folder,
    open_parent,
    open_regular_file,
    stat_entry,
)
from retinue.files.reserved import find_git_folder, is_git_name, is_reserved_name, is_state_name, list_all_prefixes
from retinue.files.trees import remove_tree, walk_tree
from retinue.workspaces.capture import capture_folder, list_changed_paths, read_current_at
from retinue.workspaces.copy_tree import PUBLIC_MODES, BudgetExceeded, CopyBudget, FolderCopier
from retinue.workspaces.store import ContentNames, Files, StoredFile
from retinue.workspaces.walk import EXECUTABLE_MODE, LINK_MODE, Skipped, Walker, display_path

MAX_BYTES = 1024**3
MAX_FILES = 50_000
TRIES = 20
SHOWN = 10
OURS = (
    "it contains {folder}, and the container could change the settings and logs there: run `retinue watch` in a "
    "folder that is not shared"
)
REPLACED = "changed by this run and by somebody else meanwhile, and now as this run left them: {files}"
REMOVED = "removed by this run, although somebody else had changed them meanwhile: {files}"
BLOCKED = "not brought back, as something else stands there or it cannot be read or written: {files}"
SKIPPED = "not brought back: {files}"
IN_GIT_FOLDER = "not brought back, as git would read its settings there: {files}"
UNUSED = "nothing was brought back, as the run never had the files of its workspace"
WRITTEN = "what the run has written"
# The parts of the peer's state folder that a run may read.
_OWN_RUNS = re.compile(r"runs/[^/]+/(?:snapshots|\d+/workspace)(?:/.*)?")


class RefusedPath(RetinueError):
    """A path that may not be used. The text gives the reason."""


class AllowedRoots:
    """The folders that the peer may name, held open.

    `ours` lists trusted folders, none of which may be inside a root. `never` holds descriptors of folders that no run
    may see, such as the outbox."""

    def __init__(self, paths: Sequence[Path], *, ours: Sequence[Path], never: Sequence[int] = ()) -> None:
        self.never = frozenset(map(file_id, never))
        self._open: list[tuple[str, int]] = []
        for path in paths:
            real = os.path.realpath(path)
            if real == "/":
                raise ConfigError("--allow-root /: name the folder that is shared, not the whole machine")
            for folder in ours:
                if f"{os.path.realpath(folder)}/".startswith(f"{real}/"):
                    raise ConfigError(f"--allow-root {path}: {OURS.format(folder=folder)}")
            try:
                fd = open_folder(real)
            except OSError as error:
                raise ConfigError(f"--allow-root {path}: {error.strerror or error}") from None
            self._open += [(name, fd) for name in dict.fromkeys((real, str(path.absolute())))]

    def close(self) -> None:
        for fd in {fd for _, fd in self._open}:
            os.close(fd)

    @contextmanager
    def open_path(self, path: str, *, what: str, file: bool = False) -> Iterator[int]:
        """Open a folder below a root, or a regular file with `file`. `what` names the path's role in errors."""
        parts, root = self._find_root(path, what)
        open_step = partial(self._open_step, what=what, path=path)
        with open_parent(root, [".", *parts], open_step=open_step) as (folder, name):
            fd = open_step(folder, name, file=file)
        try:
            yield fd
        finally:
            os.close(fd)

    def _open_step(self, folder: int, name: str, *, what: str, path: str, file: bool = False) -> int:
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                raise RefusedPath(f"{what} '{path}' leads over a link: '{name}'")
            is_file = file and stat.S_ISREG(status.st_mode)
            fd = open_regular_file(name, dir_fd=folder) if is_file else open_folder(name, dir_fd=folder)
        except OSError as error:
            raise RefusedPath(f"{what} '{path}' cannot be used: {error.strerror or error}") from None
        if self.never and file_id(fd) in self.never:
            os.close(fd)
            raise RefusedPath(f"{what} '{path}' is the outbox, or in it")
        return fd

    def _find_root(self, path: str, what: str) -> tuple[list[str], int]:
        for root, fd in sorted(self._open, key=lambda each: -len(each[0])):
            if path == root or path.startswith(f"{root}/"):
                parts = path[len(root) :].split("/")[1:]
                _check_private(parts, what, path)
                return parts, fd
        raise RefusedPath(f"{what} '{path}' is not below a folder that the host allows (--allow-root)")


def _check_private(parts: list[str], what: str, path: str) -> None:
    for number, part in enumerate(parts):
        if is_git_name(part):
            raise RefusedPath(f"{what} '{path}' is inside a .git folder")
        if is_state_name(part) and not _OWN_RUNS.fullmatch("/".join(parts[number + 1 :])):
            raise RefusedPath(f"{what} '{path}' is inside a .retinue folder and cannot be a workspace")


class DelegatedWorkspace:
    """The copies for one delegated run, in the folder `stage`, and the transfer of its changes back to the peer.

    All copies together may use `max_bytes` and `max_files`, and so may the changes. Folders in `never` are neither
    copied nor written."""

    def __init__(
        self, stage: Path, *, never: Collection[FileId], max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES
    ) -> None:
        self.path = stage / "workspace"
        self._stage, self._never = stage, never
        self._max_bytes, self._max_files = max_bytes, max_files
        self._budget = CopyBudget(max_bytes, max_files)
        self._base: Files = {}
        self._base_folders: set[str] = set()

    def copy_workspace(self, source: int) -> None:
        """Copy an open folder to `path` and remember its files as the base for later comparison."""
        self._base, self._base_folders = self._copy(source, self.path, "workspace")

    def copy_context(self, source: int, name: str, *, what: str) -> Path:
        """Copy an open folder or file into the stage. Returns the path of the copy."""
        context = self._stage / "context"
        context.mkdir(exist_ok=True)
        context.chmod(PUBLIC_MODES[0])  # the umask may have taken bits away
        if stat.S_ISDIR(os.fstat(source).st_mode):
            self._copy(source, context / name, what)
        else:
            with _refuse_large_copies(what):
                FolderCopier(str(context), ContentNames(), self._budget, modes=PUBLIC_MODES).copy_file(source, name)
        return context / name

    def _copy(self, source: int, to: Path, what: str) -> tuple[Files, set[str]]:
        """Copy an open folder. Returns the files and folders of the copy."""
        to.mkdir()
        to.chmod(PUBLIC_MODES[0])  # the umask may have taken bits away
        copier = FolderCopier(str(to), ContentNames(), self._budget, modes=PUBLIC_MODES)
        with _refuse_large_copies(what):
            return copier.copy(Walker(source, links=False, never=self._never)), copier.folders

    def bring_back(self, workspace: Path, target: int) -> list[str]:
        """Copy the run's changes in `workspace` back to the open folder `target`, and remove the workspace. Returns
        notes for the peer.

        Raises RefusedPath, before any change, if the changes exceed the budget. If `path` was not moved to `workspace`,
        the run has not seen the peer's files. Missing files are then no changes, so nothing is brought back."""
        if self.path.is_dir() or not workspace.is_dir():
            return [UNUSED]
        walker = Walker(str(workspace), foreign=True, links=False)
        end = capture_folder(walker, ContentNames(), self._base)
        changed = [path for path in list_changed_paths(self._base, end.files) if path in end.files]
        self._check_size(workspace, changed)
        transfer = _ChangeTransfer(str(workspace), target, self._base, self._never)
        for path in sorted(self._base.keys() - end.files.keys()):
            transfer.remove_file(path)
        for path in sorted(self._base_folders - end.folders, reverse=True):  # subfolders first
            if not end.is_unseen(path):
                transfer.remove_folder(path)
        planned = list_all_prefixes((*end.files, *end.folders))
        for path in sorted(end.folders - self._base_folders):
            if find_git_folder(workspace, f"{path}/", planned) is None:
                transfer.make_folder(path)
        for path in changed:
            if find_git_folder(workspace, path, planned) is None:
                transfer.replace_file(path, end.files[path])
            else:
                transfer.refuse_file(path)
        remove_tree(workspace)
        return transfer.describe(walker.skipped)

    def _check_size(self, workspace: Path, changed: Sequence[str]) -> None:
        budget = CopyBudget(self._max_bytes, self._max_files)
        with _refuse_large_copies(WRITTEN):
            for path in changed:
                budget.spend_entry(path)
                with suppress(OSError):
                    budget.spend_bytes(os.lstat(workspace / path).st_size, path)


@contextmanager
def _refuse_large_copies(what: str) -> Iterator[None]:
    try:
        yield
    except BudgetExceeded as error:
        how = "is too large" if error.reason == "bytes" else "has too many files"
        raise RefusedPath(f"{what} {how} to be copied: hand over less of it") from None


class _ChangeTransfer:
    """The transfer of one run's changes into a folder of the peer, with notes on each conflict."""

    def __init__(self, workspace: str, target: int, base: Files, never: Collection[FileId]) -> None:
        self._workspace, self._target, self._base, self._never = workspace, target, base, never
        self._make_parent = partial(open_parent, target, create=True, inherit_owner=True, never=never)
        self._notes: dict[str, list[str]] = {text: [] for text in (REPLACED, REMOVED, BLOCKED, IN_GIT_FOLDER)}

    def describe(self, skipped: Skipped) -> list[str]:
        """Return the notes for the peer."""
        told = [text.format(files=_join_paths(paths)) for text, paths in self._notes.items() if paths]
        return [*told, SKIPPED.format(files=skipped)] if skipped.count else told

    def refuse_file(self, path: str) -> None:
        """Skip a file inside a folder that git takes for a repository, because no person reviews these changes."""
        self._notes[IN_GIT_FOLDER].append(path)

    def remove_file(self, path: str) -> None:
        """Remove a file that the run removed. An entry that is no longer a regular file stays."""
        try:
            with open_parent(self._target, path, never=self._never) as (folder, name):
                found = read_current_at(folder, name, ContentNames())
                if found.mode == LINK_MODE:
                    raise RefusedFile("link", path)
                os.unlink(name, dir_fd=folder)
        except (FileNotFoundError, NotADirectoryError):  # gone already
            return
        except OSError:
            self._notes[BLOCKED].append(path)
            return
        if found != self._base[path]:
            self._notes[REMOVED].append(path)

    def remove_folder(self, path: str) -> None:
        """Remove a folder that the run removed. A folder that is not empty stays."""
        with suppress(OSError), open_parent(self._target, path, never=self._never) as (folder, name):
            os.rmdir(name, dir_fd=folder)

    def make_folder(self, path: str) -> None:
        """Create a folder that the run created."""

        def make() -> None:
            with self._make_parent(path) as (folder, name):
                make_folder(name, dir_fd=folder, mode=0o755, inherit_owner=True)
                os.close(open_folder(name, dir_fd=folder))

        self._attempt(path, make)

    def replace_file(self, path: str, stored: StoredFile) -> None:
        """Replace a file with the run's version, atomically."""

        def replace() -> None:
            found = self._place_file(path, stored)
            if found not in (self._base.get(path), stored):
                self._notes[REPLACED].append(path)

        self._attempt(path, replace)

    def _place_file(self, path: str, stored: StoredFile) -> StoredFile | None:
        """Replace a file with the run's version. Returns the file that was replaced, or None."""
        found: StoredFile | None = None
        with open_parent(self._workspace, path) as (folder, name):
            source = open_regular_file(name, dir_fd=folder)
        try:
            with self._make_parent(path) as (folder, name):

                def look() -> None:
                    nonlocal found
                    reach_failpoint("half_given")
                    with suppress(OSError):
                        found = read_current_at(folder, name, ContentNames())

                mode = 0o755 if stored.mode == EXECUTABLE_MODE else 0o644
                with open_replacement(name, dir_fd=folder, mode=mode, before_rename=look) as fd:
                    if os.geteuid() == 0:  # files written by root must belong to the folder's owner
                        owner = os.fstat(self._target)
                        os.fchown(fd, owner.st_uid, owner.st_gid)
                    for chunk in read_chunks(source):
                        write_all(fd, chunk)
        finally:
            os.close(source)
        return found

    def _attempt(self, path: str, act: Callable[[], None]) -> None:
        """Call `act`, and retry up to TRIES times if another process removes a folder meanwhile."""
        for _ in range(TRIES):
            try:
                act()
            except FileNotFoundError:
                continue
            except OSError:
                break
            return
        self._notes[BLOCKED].append(path)


def remove_temporary_files(folder: int) -> None:
    """Remove the temporary files that a killed process left below an open folder."""
    for visit in walk_tree(folder):
        visit.folders[:] = [name for name in visit.folders if not is_reserved_name(name)]
        for name in filter(is_temporary_name, visit.others):
            status = stat_entry(name, visit.fd)
            if status is not None and stat.S_ISREG(status.st_mode):
                with suppress(OSError):
                    os.unlink(name, dir_fd=visit.fd)


def _join_paths(paths: list[str]) -> str:
    """Return the first paths as text, and the number of the others."""
    shown = ", ".join(map(display_path, paths[:SHOWN]))
    return shown if len(paths) <= SHOWN else f"{shown} and {len(paths) - SHOWN} more"
