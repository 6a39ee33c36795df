"""Copies between folders of somebody who is not trusted and ours, so that no run has to be shown a path of theirs.

A path is looked up below a root that is held open, one component after the other, and no link is followed: whatever is
swapped meanwhile, nothing outside the root is read or written. Links, devices and the insides of `.git` and `.retinue`
are not copied.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Known = dict[str, tuple[int, int, int]]


class Outside(RetinueError):
    """A path that may not be used, and why."""


class Roots:
    """The folders that may be used, held open. `ours` are folders that we trust, so that none of them may be in one."""

    def __init__(self, paths: Sequence[Path], *, ours: Sequence[Path]) -> None:
        self._open: list[tuple[str, int]] = []
        for path in paths:
            real = os.path.realpath(path)
            if real == "/":
                raise ConfigError("--allow-root /: name the folder that is shared, not the whole machine")
            for folder in ours:
                if f"{os.path.realpath(folder)}/".startswith(f"{real}/"):
                    raise ConfigError(f"--allow-root {path}: {OURS.format(folder=folder)}")
            try:
                fd = os.open(real, _FOLDER)
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
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                inner = _step(fd, part, what, path, file=file and last)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

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
        about = os.stat(part, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISLNK(about.st_mode):
            raise Outside(f"{what} '{path}' leads over a link: '{part}'")
        plain = file and stat.S_ISREG(about.st_mode)
        inner = os.open(part, _FILE if plain else _FOLDER, dir_fd=fd)
    except OSError as error:
        raise Outside(f"{what} '{path}' cannot be used: {error.strerror or error}") from None
    if plain and not stat.S_ISREG(os.fstat(inner).st_mode):
        os.close(inner)
        raise Outside(f"{what} '{path}' is not a plain file or folder")
    return inner


class Copier:
    """Copies trees of files until there are too many; one for all copies of a request."""

    def __init__(self, *, most_bytes: int = COPY_BYTES, most_files: int = COPY_FILES) -> None:
        self._bytes, self._files = most_bytes, most_files
        self.skipped = 0

    def take(self, source: int, to: Path, *, what: str) -> None:
        """Copies what the descriptor is, a folder or a file, to a place of ours that does not exist yet."""
        if stat.S_ISDIR(os.fstat(source).st_mode):
            to.mkdir(mode=0o755)
            target = os.open(to, _FOLDER)
            try:
                self._folder(source, target, what, 0)
            finally:
                os.close(target)
        else:
            self._file(source, str(to), None, what)

    def _folder(self, source: int, target: int, what: str, depth: int) -> None:
        if depth > DEEPEST:
            raise Outside(f"{what} is nested deeper than {DEEPEST} folders")
        for name in os.listdir(source):
            about = _about(source, name)
            if about is None or name in PRIVATE:
                continue
            if stat.S_ISDIR(about.st_mode):
                inner = _opened(source, name, _FOLDER)
                if inner is None:
                    continue
                self._count(what)
                os.mkdir(name, 0o755, dir_fd=target)
                below = os.open(name, _FOLDER, dir_fd=target)
                try:
                    self._folder(inner, below, what, depth + 1)
                finally:
                    os.close(inner)
                    os.close(below)
            elif stat.S_ISREG(about.st_mode) and (inner := _opened(source, name, _FILE)) is not None:
                try:
                    self._file(inner, name, target, what)
                finally:
                    os.close(inner)
            else:
                self.skipped += 1

    def _file(self, source: int, name: str, target: int | None, what: str) -> None:
        about = os.fstat(source)
        if not stat.S_ISREG(about.st_mode):
            self.skipped += 1
            return
        self._count(what)
        if about.st_size > self._bytes:
            raise Outside(f"{what} is too large to be copied: hand over less of it")
        mode = 0o755 if about.st_mode & 0o100 else 0o644
        fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=target)
        try:
            os.fchmod(fd, mode)
            self._pour(source, fd, what)
        finally:
            os.close(fd)

    def _pour(self, source: int, fd: int, what: str) -> None:
        while piece := os.read(source, 1024 * 1024):
            self._bytes -= len(piece)
            if self._bytes < 0:
                raise Outside(f"{what} is too large to be copied: hand over less of it")
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]

    def _count(self, what: str) -> None:
        self._files -= 1
        if self._files < 0:
            raise Outside(f"{what} has too many files to be copied: hand over less of it")

    def give(self, source: int, target: int, before: Known, *, owner: tuple[int, int] | None) -> None:
        """Brings back into their folder what a run has changed in ours, each file whole; removes what it removed."""
        left = dict(before)
        self._give(source, target, left, owner, "")
        for gone in left:
            _forget(target, gone.split("/"))

    def _give(self, source: int, target: int, before: Known, owner: tuple[int, int] | None, path: str) -> None:
        for name in os.listdir(source):
            about, place = _about(source, name), f"{path}{name}"
            if about is None or name in PRIVATE:
                continue
            if stat.S_ISDIR(about.st_mode):
                self._give_folder(name, source, target, before, owner, place)
            elif stat.S_ISREG(about.st_mode):
                if before.pop(place, None) != _mark(about):
                    self._give_file(name, source, target, owner)
            else:
                self.skipped += 1

    def _give_folder(
        self, name: str, source: int, target: int, before: Known, owner: tuple[int, int] | None, place: str
    ) -> None:
        inner = _opened(source, name, _FOLDER)
        if inner is None:
            return
        self._count(f"the workspace after the run, at '{place}',")
        try:
            try:
                os.mkdir(name, 0o755, dir_fd=target)
                made = True
            except FileExistsError:
                made = False
            below = _opened(target, name, _FOLDER)
            if below is None:
                self.skipped += 1  # they have put something else there
                return
            try:
                if made and owner is not None:
                    os.fchown(below, *owner)
                self._give(inner, below, before, owner, f"{place}/")
            finally:
                os.close(below)
        finally:
            os.close(inner)

    def _give_file(self, name: str, source: int, target: int, owner: tuple[int, int] | None) -> None:
        inner = _opened(source, name, _FILE)
        if inner is None:
            return
        temporary = f".retinue-{secrets.token_hex(8)}"
        try:
            self._file(inner, temporary, target, "what the run has written")
            if owner is not None:
                os.chown(temporary, *owner, dir_fd=target, follow_symlinks=False)
            try:
                os.rename(temporary, name, src_dir_fd=target, dst_dir_fd=target)
            except OSError:
                self.skipped += 1  # a folder stands there
                os.unlink(temporary, dir_fd=target)
        except BaseException:
            if _about(target, temporary) is not None:
                os.unlink(temporary, dir_fd=target)
            raise
        finally:
            os.close(inner)


def known(folder: Path) -> Known:
    """What a copy holds before anybody has worked in it."""
    found: Known = {}
    for top, _, names, fd in os.fwalk(folder):
        inside = os.path.relpath(top, folder)
        for name in names:
            about = _about(fd, name)
            if about is not None:
                found[name if inside == "." else f"{inside}/{name}"] = _mark(about)
    return found


def _forget(fd: int, parts: list[str]) -> None:
    """Takes away a file that a run has removed, and the folders that are empty then; follows no link to it."""
    name, *below = parts
    about = _about(fd, name)
    if about is None:
        return
    if not below:
        if stat.S_ISREG(about.st_mode):
            os.unlink(name, dir_fd=fd)
    elif (inner := _opened(fd, name, _FOLDER)) is not None:
        try:
            _forget(inner, below)
        finally:
            os.close(inner)
        with suppress(OSError):
            os.rmdir(name, dir_fd=fd)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _mark(about: os.stat_result) -> tuple[int, int, int]:
    return about.st_ino, about.st_mtime_ns, about.st_size


def _about(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return None


def _opened(fd: int, name: str, flags: int) -> int | None:
    try:
        return os.open(name, flags, dir_fd=fd)
    except OSError:
        return None
