"""Running git so that no foreign code runs: no hooks, no filters, no helpers, no network.

Git runs in two places only: in the user's own repository, to query it, and in a store of ours, without any user or
system config. It never runs where a run could have put files: neither with a workspace's `.git` nor with a workspace
as its work tree.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from retinue.core.errors import ConfigError, RetinueError
from retinue.core.limits import MIB
from retinue.core.secrets import is_named
from retinue.files.content import read_small_file
from retinue.processes.group import run_program

SECONDS = 120.0
PROJECT_SECONDS = 20.0  # timeout of read-only queries
LINE_BYTES = 8 * 1024
_FULL = ("Out of diskspace", os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
UNKNOWN_OPTION = 129  # git's exit code for an unknown option
TOO_OLD = "; this git may be too old: `retinue doctor` checks its version"
NO_GIT = "workspace 'copy' and 'worktree' need git on this machine, and there is none: install it, or use scratch"
_QUIET = (
    "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "protocol.allow=never",
    "-c", "submodule.recurse=false", "-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "core.quotePath=false",
    "-c", "core.commitGraph=false", "-c", "fastimport.unpackLimit=0", "-c", "pack.compression=0",
)  # fmt: skip
_READ_FILES = (
    "HEAD", "config", "config.worktree", "commondir", "index", "packed-refs", "shallow", "info/grafts",
    "objects/info/alternates",
)  # fmt: skip
_QUESTIONS = (
    ("--is-inside-work-tree",), ("--show-prefix",), ("--show-object-format",), ("--show-toplevel",),
    ("--absolute-git-dir",), ("--git-path", "objects"), ("--git-path", "shallow"), ("--git-path", "info/exclude"),
)  # fmt: skip
_OURS = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "HOME": "/nonexistent",
    "XDG_CONFIG_HOME": "/nonexistent",
}
_ALWAYS = {
    "LC_ALL": "C",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_PAGER": "cat",
    "GIT_AUTHOR_NAME": "retinue", "GIT_AUTHOR_EMAIL": "retinue@localhost",
    "GIT_COMMITTER_NAME": "retinue", "GIT_COMMITTER_EMAIL": "retinue@localhost",
}  # fmt: skip


@lru_cache(1)
def find_git() -> str:
    """Return the path of git. Searches the PATH of this process once, never a workspace."""
    for folder in os.get_exec_path():
        found = Path(folder, "git")
        # `access` first: `is_file` raises in a folder on PATH that this user may not enter.
        if found.is_absolute() and os.access(found, os.X_OK) and found.is_file():
            return str(found)
    raise ConfigError(NO_GIT)


def build_command(*words: str, git_dir: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment of a git that works only on the folder `git_dir`."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    return [find_git(), *_QUIET, f"--git-dir={git_dir}", *words], {**kept, **_OURS, **_ALWAYS}


def run_in_store(*words: str, git_dir: str, cwd: str | None = None, good: Sequence[int] = (0,)) -> bytes:
    """Run git on a store of ours, or on a clone that only we have touched so far. Returns its output."""
    line, env = build_command(*words, git_dir=git_dir)
    return _run_git(line, env, cwd or git_dir, good)


def run_in_project(*words: str, project: str, good: Sequence[int] = (0,)) -> bytes:
    """Run a read-only git command in the user's repository, with the user's settings. Returns its output.

    The environment has no keys, because other programs of the user can read it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") and not is_named(name)}
    return _run_git([find_git(), *_QUIET, *words], {**env, **_ALWAYS}, project, good, seconds=PROJECT_SECONDS)


def _run_git(
    line: list[str], env: dict[str, str], cwd: str, good: Sequence[int] = (0,), *, seconds: float = SECONDS
) -> bytes:
    try:
        done = run_program(line, env=env, cwd=cwd, seconds=seconds)
    except subprocess.TimeoutExpired:
        raise RetinueError(f"git {_name_command(line)} did not end within {seconds:g} s") from None
    except OSError as error:
        raise RetinueError(f"git {_name_command(line)} cannot run in {cwd}: {error.strerror or error}") from None
    if done.returncode not in good:
        more = TOO_OLD if done.returncode == UNKNOWN_OPTION else ""
        text = describe_failure(f"git {_name_command(line)}", done.stderr or b"exit code %d" % done.returncode, cwd)
        raise RetinueError(f"{text}{more}")
    return done.stdout


def describe_failure(command: str, said: bytes, folder: str, *, writes: bool = False) -> str:
    """Return one line about a git command that failed in `folder`. `said` are its last words. Names a full disk, for a
    command that `writes` also if git does not."""
    words = " ".join(said.decode("utf-8", "replace").split())
    full = f"the disk is full: {command} cannot write to {folder}"
    if any(text in words for text in _FULL):  # decided by git's text: no code exists
        return full
    if writes and _is_disk_full(folder):
        return f"{full}: {words[:300]}"
    return f"{command} failed: {words[:300]}"


def _is_disk_full(folder: str) -> bool:
    """Return True if the disk of a folder has less than 1 MiB left. Git removes what it could not finish, and does not
    say of every write why it failed."""
    try:
        disk = os.statvfs(folder)
    except OSError:  # the folder is gone
        return False
    return disk.f_bavail * disk.f_frsize < MIB


def _name_command(line: list[str]) -> str:
    return next((word for word in line[1 + len(_QUIET) :] if not word.startswith("-")), "")


@dataclass(frozen=True)
class Repository:
    """The user's repository, with the facts that a clone needs.

    `prefix` is the project's path inside the repository. `head` is empty before the first commit, `branch` if HEAD is
    detached. `above` lists the `.gitignore` files above the project, each with its folder in the repository. `top` is
    the folder of the work tree, `folder` its git folder."""

    prefix: str
    objects: str
    format: str
    head: str
    branch: str
    shallow: str
    excludes: tuple[str, ...]
    above: tuple[tuple[str, str], ...] = ()
    top: str = ""
    folder: str = ""

    @property
    def is_own(self) -> bool:
        """Return True if the repository belongs to the work tree: it is the `.git` in it, or names the work tree
        itself.

        A `.git` that is a file or a link can point to any repository of the user's. But only the owner of a repository
        can register a linked worktree or a submodule in it."""
        place = f"{os.path.realpath(self.top)}/.git"
        if os.path.realpath(self.folder) == place:
            return os.path.realpath(self.objects) == f"{place}/objects"
        named = _read_line(f"{self.folder}/gitdir")
        if named:
            return os.path.realpath(os.path.join(self.folder, named)) == os.path.realpath(place)  # noqa: PTH118
        words = ("config", "--type=path", "core.worktree")
        tree = run_in_store(*words, git_dir=self.folder, good=(0, 1)).decode("utf-8", "surrogateescape").strip("\n")
        there = os.path.realpath(os.path.join(self.folder, tree))  # noqa: PTH118
        return bool(tree) and there == os.path.realpath(self.top)


def _read_line(path: str) -> str:
    try:
        return os.fsdecode(read_small_file(path, LINE_BYTES)).strip("\n")
    except OSError:
        return ""


def find_repository(project: str) -> Repository | None:
    """Return the repository that contains the project. None if git finds none, or would block on a FIFO in it."""
    if _has_special_file(project):
        return None
    try:
        inside, prefix, kind, top, folder, *found = _describe_repository(project)
    except RetinueError:
        return None
    objects, shallow, exclude = (os.path.join(project, path) for path in found)  # noqa: PTH118 - bytes in it
    if inside != "true":
        return None
    return Repository(
        prefix=prefix,
        objects=objects,
        format=kind,
        head=_ask_git("rev-parse", "--verify", "--quiet", "HEAD^{commit}", project=project),
        branch=_ask_git("symbolic-ref", "--quiet", "HEAD", project=project),
        shallow=shallow,
        excludes=(exclude, _find_excludes_file(project)),
        above=tuple(_list_gitignores_above(project, prefix)),
        top=top,
        folder=folder,
    )


def _describe_repository(project: str) -> list[str]:
    """Return the answers to `_QUESTIONS`. Git separates them by newlines, which paths may contain, too: if there are
    more lines than questions, each question is asked on its own."""
    lines = _ask_git("rev-parse", *(word for question in _QUESTIONS for word in question), project=project).split("\n")
    if len(lines) == len(_QUESTIONS):
        return lines
    return [_ask_git("rev-parse", *question, project=project) for question in _QUESTIONS]


def _has_special_file(project: str) -> bool:
    """Return True if a file that git reads is a special file such as a FIFO, on which git would block."""
    for folder in (Path(project), *Path(project).parents):
        own = folder / ".git"
        if os.path.lexists(own):
            return any(_is_special(own / name) for name in _READ_FILES)
    return False


def _is_special(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _list_gitignores_above(project: str, prefix: str) -> Iterator[tuple[str, str]]:
    steps = prefix.rstrip("/").split("/") if prefix else []
    for up in range(len(steps), 0, -1):
        yield "/".join(steps[: len(steps) - up]), f"{project}/{'../' * up}.gitignore"


def list_tracked(project: str) -> list[str]:
    """Return the files in the index of the user's repository, relative to the project."""
    return [
        os.fsdecode(name) for name in run_in_project("ls-files", "-z", "--cached", project=project).split(b"\0") if name
    ]


def _ask_git(*words: str, project: str) -> str:
    """Return the answer of git about the user's repository, or "" if there is none."""
    answer = run_in_project(*words, project=project, good=(0, 1)).decode("utf-8", "surrogateescape")
    return answer.removesuffix("\n")


def _find_excludes_file(project: str) -> str:
    named = _ask_git("config", "--type=path", "core.excludesFile", project=project)
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111
    return named or f"{base}/git/ignore"


def quote_path(path: bytes) -> bytes:
    """Return a path in quotes, as git reads it in its files and input."""
    return b'"' + path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'
