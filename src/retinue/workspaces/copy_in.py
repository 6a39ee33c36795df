"""Copies between folders of somebody who is not trusted and ours, so that no run has to be shown a path of theirs.

A path is looked up below a root that is held open, one component after the other, and no link is followed: whatever is
swapped meanwhile, nothing outside the root is read or written. Links, devices and the insides of `.git` and `.retinue`
are not copied. Others write there at the same time: what vanishes or is replaced between two looks is no error.
`returns` brings back what a run has changed.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from retinue.core.errors import ConfigError, RetinueError

COPY_BYTES = 1024**3
COPY_FILES = 50_000
PRIVATE = (".git", ".retinue")
OURS = (
    "{folder} is in it, whose settings and logs the container could then write; watch from a folder that is not shared"
)
DEEPEST = 100
# Of the folder in which the asking side keeps its runs, what a run may be shown.
_OWN_RUNS = re.compile(r"runs/[^/]+/(?:snapshots|\d+/workspace)(?:/.*)?")
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
HALF = re.compile(r"\.retinue-[0-9a-f]{16}")  # what we are writing into a folder of theirs, not yet in its place
Mark = tuple[int, int, int, bool]
Same = tuple[int, int]


class Outside(RetinueError):
    """A path that may not be used, and why."""


class Was(NamedTuple):
    """How a file was when it was copied, theirs and our copy of it; a folder has no marks."""

    theirs: Mark | None = None
    ours: Mark | None = None


Taken = dict[str, Was]


class Roots:
    """The folders that may be used, held open. `ours` are folders that we trust, so that none of them may be in one;
    `never` are descriptors of folders of theirs that no run is shown."""

    def __init__(self, paths: Sequence[Path], *, ours: Sequence[Path], never: Sequence[int] = ()) -> None:
        self.never = frozenset(_same(fd) for fd in never)
        self._open: list[tuple[str, int]] = []
        for path in paths:
            real = os.path.realpath(path)
            if real == "/":
                raise ConfigError("--allow-root /: name the folder that is shared, not the whole machine")
            for folder in ours:
                if f"{os.path.realpath(folder)}/".startswith(f"{real}/"):
                    raise ConfigError(f"--allow-root {path}: {OURS.format(folder=folder)}")
            try:
                fd = os.open(real, FOLDER)
            except OSError as error:
                raise ConfigError(f"--allow-root {path}: {error.strerror or error}") from None
            self._open += [(name, fd) for name in dict.fromkeys((real, str(path.absolute())))]

    def close(self) -> None:
        for fd in {fd for _, fd in self._open}:
            os.close(fd)

    @contextmanager
    def opened(self, path: str, *, what: str, file: bool = False) -> Iterator[int]:
        """A descriptor of a folder (or a plain file, where one may be) below a root."""
        parts, fd = self._below(path, what)
        fd = os.dup(fd)
        try:
            self._check(fd, what, path)
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                inner = _step(fd, part, what, path, file=file and last)
                os.close(fd)
                fd = inner
                self._check(fd, what, path)
            yield fd
        finally:
            os.close(fd)

    def _check(self, fd: int, what: str, path: str) -> None:
        if is_one_of(fd, self.never):
            raise Outside(f"{what} '{path}' is the outbox, or in it")

    def _below(self, path: str, what: str) -> tuple[list[str], int]:
        for root, fd in sorted(self._open, key=lambda each: -len(each[0])):
            if path == root or path.startswith(f"{root}/"):
                parts = path[len(root) :].split("/")[1:]
                _check_private(parts, what, path)
                return parts, fd
        raise Outside(f"{what} '{path}' is not below a folder that the host allows (--allow-root)")


def _check_private(parts: list[str], what: str, path: str) -> None:
    for number, part in enumerate(parts):
        if part == ".git":
            raise Outside(f"{what} '{path}' is inside a .git folder")
        if part == ".retinue" and not _OWN_RUNS.fullmatch("/".join(parts[number + 1 :])):
            raise Outside(f"{what} '{path}' is inside a .retinue folder and is no workspace")


def _step(fd: int, part: str, what: str, path: str, *, file: bool) -> int:
    try:
        status = os.stat(part, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            raise Outside(f"{what} '{path}' leads over a link: '{part}'")
        plain = file and stat.S_ISREG(status.st_mode)
        inner = os.open(part, FILE if plain else FOLDER, dir_fd=fd)
    except OSError as error:
        raise Outside(f"{what} '{path}' cannot be used: {error.strerror or error}") from None
    if plain and not stat.S_ISREG(os.fstat(inner).st_mode):
        os.close(inner)
        raise Outside(f"{what} '{path}' is not a plain file or folder")
    return inner


class Copier:
    """Copies trees of files until there are too many; one for all copies of a request. Folders that are one of `never`
    are left out wherever they stand."""

    def __init__(
        self, *, most_bytes: int = COPY_BYTES, most_files: int = COPY_FILES, never: Collection[Same] = ()
    ) -> None:
        self.never = never
        self._bytes, self._files = most_bytes, most_files

    def take(self, source: int, to: Path, *, what: str) -> Taken:
        """Copies what the descriptor is, a folder or a file, to a place of ours that does not exist yet."""
        taken: Taken = {}
        if stat.S_ISDIR(os.fstat(source).st_mode):
            to.mkdir(mode=0o755)
            target = os.open(to, FOLDER)
            try:
                self._folder(source, target, what, "", taken)
            finally:
                os.close(target)
        else:
            self.count(what)
            self.file(source, str(to), None, what)
        return taken

    def _folder(self, source: int, target: int, what: str, path: str, taken: Taken) -> None:
        if path.count("/") > DEEPEST:
            raise Outside(f"{what} is nested deeper than {DEEPEST} folders")
        for name in listed(source):
            status = about(source, name)
            if status is None:
                continue
            place = f"{path}{name}"
            if stat.S_ISDIR(status.st_mode):
                if (inner := opened(source, name, FOLDER)) is not None:
                    try:
                        self._subfolder(inner, target, what, place, taken)
                    finally:
                        os.close(inner)
            elif stat.S_ISREG(status.st_mode) and (inner := opened(source, name, FILE)) is not None:
                self.count(what)
                try:
                    was = self.file(inner, name, target, what)
                finally:
                    os.close(inner)
                if was is not None:
                    taken[place] = was

    def _subfolder(self, inner: int, target: int, what: str, place: str, taken: Taken) -> None:
        if is_one_of(inner, self.never):
            return
        self.count(what)
        name = place.rpartition("/")[2]
        os.mkdir(name, 0o755, dir_fd=target)
        taken[place] = Was()
        below = os.open(name, FOLDER, dir_fd=target)
        try:
            self._folder(inner, below, what, f"{place}/", taken)
        finally:
            os.close(below)

    def file(
        self, source: int, name: str, target: int | None, what: str, *, owner: tuple[int, int] | None = None
    ) -> Was | None:
        """A new file with what an open one holds; None when that is no plain file."""
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            return None
        self.check_room(status.st_size, what)
        mode = 0o755 if status.st_mode & 0o100 else 0o644
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=target)
        try:
            os.fchmod(fd, mode)
            if owner is not None:
                os.fchown(fd, *owner)
            self._pour(source, fd, what)
            return Was(mark(status), mark(os.fstat(fd)))
        finally:
            os.close(fd)

    def _pour(self, source: int, fd: int, what: str) -> None:
        while piece := os.read(source, 1024 * 1024):
            self.check_room(len(piece), what)
            self._bytes -= len(piece)
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]

    def check_room(self, size: int, what: str) -> None:
        if size > self._bytes:
            raise Outside(f"{what} is too large to be copied: hand over less of it")

    def count(self, what: str) -> None:
        self._files -= 1
        if self._files < 0:
            raise Outside(f"{what} has too many files to be copied: hand over less of it")


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def sweep(fd: int, depth: int = 0) -> None:
    """Takes away what somebody who was killed had not yet put in its place, in a folder and those below it."""
    for name in os.listdir(fd):
        status = about(fd, name)
        if status is None or name in PRIVATE:
            continue
        if stat.S_ISREG(status.st_mode) and HALF.fullmatch(name):
            with suppress(OSError):
                os.unlink(name, dir_fd=fd)
        elif stat.S_ISDIR(status.st_mode) and depth < DEEPEST and (inner := opened(fd, name, FOLDER)) is not None:
            try:
                sweep(inner, depth + 1)
            finally:
                os.close(inner)


def listed(fd: int) -> list[str]:
    """The names in a folder that may be copied, each once: a folder that is changed may show one twice."""
    return sorted({name for name in os.listdir(fd) if name not in PRIVATE and not HALF.fullmatch(name)})


def mark(status: os.stat_result) -> Mark:
    """By which a file is known to be the one it was."""
    return status.st_ino, status.st_mtime_ns, status.st_size, bool(status.st_mode & 0o100)


def is_one_of(fd: int, folders: Collection[Same]) -> bool:
    return bool(folders) and _same(fd) in folders


def _same(fd: int) -> Same:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def about(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None


def opened(fd: int, name: str, flags: int) -> int | None:
    try:
        return os.open(name, flags, dir_fd=fd)
    except OSError:
        return None
