"""Making a workspace: the files of another folder, and for a `worktree` a `.git` of its own beside them.

`copy` has everything but `.git` folders and our own state. `worktree` has what git would see (tracked, and untracked
but not ignored) as it is now, and a clone whose objects are the project's, read by path. In both, what `.gitignore`
names is never a change. Submodules and nested repositories are plain files.
"""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

from retinue.core.errors import ConfigError, RetinueError
from retinue.files.content import read_chunks, write_all
from retinue.files.opening import open_folder, open_parent
from retinue.files.private import make_private_folder
from retinue.files.trees import remove_tree
from retinue.workspaces import alternates, git
from retinue.workspaces.ignores import Ignores
from retinue.workspaces.store import Files, Import, Store, StoredFile, hash_content
from retinue.workspaces.walk import Entry, Skipped, Walker, display_path, open_entry

NOT_A_REPOSITORY = "workspace 'worktree' needs a git repository, and {project} is in none: use copy"
TOO_LARGE = (
    "the workspace would be larger than {limit} MiB (it was full at {path}): name what it does not need in .gitignore, "
    "raise workspace_max_mib in retinue.yaml, or use scratch"
)
MIB = 1024 * 1024


@dataclass
class CreatedWorkspace:
    """What came of it. `objects` are folders the workspace's git has to be able to read."""

    files: Files = field(default_factory=dict)
    skipped: Skipped = field(default_factory=Skipped)
    objects: tuple[str, ...] = ()


def create_workspace(  # noqa: PLR0913 - each by name
    workspace: str,
    *,
    kind: str,
    source: str,
    project: str,
    store: Store,
    ref: str,
    known: Files | None,
    limit: int,
    stop: threading.Event,
) -> CreatedWorkspace:
    """Makes the folder and keeps how it began under `ref`. `known` are the files of a source that is itself such a
    workspace, as it began. Leaves nothing behind when it fails."""
    repository = git.find_repository(project)
    if kind == "worktree" and repository is None:
        raise ConfigError(NOT_A_REPOSITORY.format(project=project))
    foreign = source != project
    tracked = git.list_tracked(project) if repository is not None and not foreign else list(known or ())
    place = make_private_folder(workspace)
    try:
        with Ignores(tracked, repository) as ignores, Import(store) as into:
            walker = Walker(source, ignored=ignores, inside_ignored=kind == "copy", foreign=foreign, stop=stop)
            files = _Copier(workspace, into, walker.skipped, limit).copy(walker)
            into.add_tree(ref, files)
        made = CreatedWorkspace(files, walker.skipped)
        if kind == "worktree" and repository is not None:
            made.objects = tuple(alternates.find_object_folders(repository.objects))
            _clone(workspace, project, repository, made.objects)
    except OSError as error:
        remove_tree(place)
        raise RetinueError(f"cannot make the workspace {workspace}: {error.strerror or error}") from error
    except BaseException:
        remove_tree(place)
        raise
    return made


class _Copier:
    def __init__(self, workspace: str, into: Import, skipped: Skipped, limit: int) -> None:
        self._workspace = workspace
        self._into = into
        self._skipped = skipped
        self._limit = limit
        self._left = limit

    def copy(self, walker: Walker) -> Files:
        """Copies what the walk finds; the files that count as the workspace's own, by name."""
        files: Files = {}
        top = open_folder(self._workspace)
        try:
            for entry in walker.walk_entries():
                held = self._one(entry, top)
                if held is not None and not entry.ignored:
                    files[entry.path] = held
        finally:
            os.close(top)
        for path in walker.list_hard_linked():
            self._skipped.add(path, "also a file elsewhere, by a hard link")
            files.pop(path, None)
            Path(self._workspace, path).unlink(missing_ok=True)
        return files

    def _one(self, entry: Entry, top: int) -> StoredFile | None:
        with open_parent(top, entry.path) as (folder, name):
            if entry.is_folder:
                os.mkdir(name, 0o700, dir_fd=folder)
                return None
            try:
                source = -1 if entry.is_link else open_entry(entry)
                target = os.readlink(entry.name, dir_fd=entry.folder) if entry.is_link else ""
            except OSError as error:  # swapped, gone, or not ours to read
                self._skipped.add(entry.path, error.strerror or str(error))
                return None
            if entry.is_link:
                os.symlink(target, name, dir_fd=folder)
                return StoredFile(entry.mode, self._into.add_bytes(os.fsencode(target)))
            try:
                return StoredFile(entry.mode, self._file(entry, source, folder, name))
            finally:
                os.close(source)

    def _file(self, entry: Entry, source: int, folder: int, name: str) -> str:
        mode = 0o700 if entry.status.st_mode & 0o100 else 0o600
        target = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
        try:
            size = self._fill(source, target, entry.path)
            os.utime(target, ns=(entry.status.st_atime_ns, entry.status.st_mtime_ns))
            if entry.ignored:
                return ""
            os.lseek(target, 0, os.SEEK_SET)
            oid = hash_content(size, read_chunks(target))
            os.lseek(target, 0, os.SEEK_SET)
            self._into.add_content(oid, size, read_chunks(target))
            return oid
        finally:
            os.close(target)

    def _fill(self, source: int, target: int, path: str) -> int:
        size = 0
        for chunk in read_chunks(source):
            size += len(chunk)
            self._left -= len(chunk)
            if self._left < 0:
                raise RetinueError(TOO_LARGE.format(limit=self._limit // MIB, path=display_path(path)))
            write_all(target, chunk)
        return size


def _clone(workspace: str, project: str, repository: git.Repository, objects: tuple[str, ...]) -> None:
    """A `.git` in the workspace, which no run has seen yet: no remote, no hooks, no settings but git's own."""
    folder = f"{workspace}/.git"
    words = ("init", "-q", "--template=", f"--object-format={repository.format}", workspace)
    git.run_in_store(*words, git_dir=folder, cwd=workspace)
    info = Path(folder, "objects", "info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "alternates").write_bytes(alternates.format_alternates(objects))
    if Path(repository.shallow).is_file():
        shutil.copyfile(repository.shallow, f"{folder}/shallow")
    whole = not repository.prefix
    head = repository.head if whole else _part(project, repository, folder)
    if whole and head:
        kinds = ("refs/heads", "refs/tags")
        refs = git.run_in_project("for-each-ref", "--format=%(objectname) %(refname)", *kinds, project=project)
        Path(folder, "packed-refs").write_bytes(b"# pack-refs with: \n" + refs)
    if repository.branch:
        git.run_in_store("symbolic-ref", "HEAD", repository.branch, git_dir=folder)
    if head:
        git.run_in_store("update-ref", *(() if repository.branch else ("--no-deref",)), "HEAD", head, git_dir=folder)
        git.run_in_store("read-tree", head, git_dir=folder, cwd=workspace)


def _part(project: str, repository: git.Repository, folder: str) -> str:
    """The project is a folder inside a repository: one commit with that folder's content stands for its history."""
    if not repository.head:
        return ""
    place = repository.prefix.rstrip("/")
    words = ("rev-parse", "--verify", "--quiet", f"{repository.head}:{place}")
    tree = git.run_in_project(*words, project=project, good=(0, 1)).decode().strip()
    if not tree:
        return ""
    message = f"{place} at {repository.head}"
    return git.run_in_store("commit-tree", tree, "-m", message, git_dir=folder).decode().strip()
