"""The `.git` of a worktree: a clone of the user's repository that reads the repository's objects by path.

It has the branches and tags, but no remotes, hooks or custom settings. Only git's own plumbing writes it, before any
run has touched the workspace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from retinue.core.errors import RetinueError
from retinue.files.content import read_small_file
from retinue.files.trees import is_open_tree
from retinue.workspaces import git

MAX_ALTERNATES_DEPTH = 5  # the same limit as git's
MAX_GIT_FILE_BYTES = 1024 * 1024
_OBJECTS_NAME = re.compile(r"[0-9a-f]{2}|info|pack|tmp[_-].*|incoming-.*|[a-z-]+\.lock")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


class Clone(NamedTuple):
    """The folders whose objects a clone reads, and those among them that may belong to another repository."""

    objects: tuple[str, ...] = ()
    foreign_objects: tuple[str, ...] = ()


def make_clone(workspace: str, project: str, repository: git.Repository) -> Clone:
    """Create a `.git` in a workspace that no run has touched yet.

    A sandboxed run of root has its own user, which may not read the objects of a repository that is closed to others,
    as root's are with umask 077. Then the clone gets copies of its objects, unless git cannot copy them, as in a
    partial clone."""
    objects = _find_object_folders(repository.objects)
    foreign_objects = _find_foreign_objects(objects, repository, project)
    _make_repository(workspace, project, repository, objects)
    if os.geteuid() == 0 and not foreign_objects and not all(map(is_open_tree, objects)):
        with suppress(RetinueError):
            git.run_in_store("repack", "-a", "-d", "-q", git_dir=f"{workspace}/.git", cwd=workspace)
            Path(workspace, ".git/objects/info/alternates").unlink()
            objects = ()
    return Clone(objects=objects, foreign_objects=foreign_objects)


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
