"""A folder shared with somebody who is not trusted: one file a message, written beside its place and renamed into it.

Everything is done below the folder's own descriptor, follows no link and opens nothing but plain files: what the other
side puts there can be refused, never followed.
"""

from __future__ import annotations

import os
import secrets
import signal
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from retinue.core.errors import ConfigError

FAILPOINT = "RETINUE_FAILPOINT"
OLD_SECONDS = 3600.0
MOST_NAMES = 20_000


class Unreadable(Exception):
    """What stands there is not a message; the text says why."""


def reached(point: str) -> None:
    """Kills this process if a test has armed this point of the outbox."""
    if os.environ.get(FAILPOINT) == f"outbox_{point}":
        os.kill(os.getpid(), signal.SIGKILL)


class Mailbox:
    """One open folder. `side` begins the names of what is being written here; `close` lets it go."""

    def __init__(self, folder: Path, side: str) -> None:
        self.folder = folder
        self._half = f".{side}-"
        try:
            self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot open the outbox {folder}: {error.strerror or error}") from None
        self.owner = os.fstat(self.fd).st_uid

    def close(self) -> None:
        os.close(self.fd)

    def names(self) -> list[str]:
        """What is there, in order; of a flood only the beginning."""
        found: list[str] = []
        with os.scandir(self.fd) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) == MOST_NAMES:
                    break
        return sorted(found)

    def changed(self) -> int:
        """When a name last came or went; of two changes at once it may tell only one."""
        return os.fstat(self.fd).st_mtime_ns

    def exists(self, name: str) -> bool:
        """Whether anything of that name stands there, whatever it is."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def read(self, name: str, *, most: int, owners: Collection[int] = ()) -> tuple[bytes, int]:
        """The whole of a plain file and whose it is; Unreadable for everything else, FileNotFoundError for nothing."""
        fd = self.open(name, owners=owners)
        try:
            about = os.fstat(fd)
            if about.st_size > most:
                raise Unreadable(f"is larger than {most} bytes")
            data = b""
            while len(data) <= most and (piece := os.read(fd, most + 1 - len(data))):
                data += piece
            if len(data) > most or os.fstat(fd).st_size != len(data):
                raise Unreadable(f"grows while it is read, or is larger than {most} bytes")
            return data, about.st_uid
        finally:
            os.close(fd)

    def open(self, name: str, *, owners: Collection[int] = ()) -> int:
        """A descriptor of a plain file with one name. Looked at before it is opened, and again after."""
        try:
            _check(os.stat(name, dir_fd=self.fd, follow_symlinks=False), owners)
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unreadable(f"cannot be opened: {error.strerror or error}") from None
        try:
            _check(os.fstat(fd), owners)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def put(self, name: str, data: bytes, *, reader: int | None = None, half: str = "") -> None:
        """Writes a message whole or not at all, in the place of whatever has its name. `reader` is whose it becomes,
        `half` the point of a test at which it is not yet in its place."""
        temporary = f"{self._half}{secrets.token_hex(8)}"
        fd = os.open(
            temporary, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=self.fd
        )
        try:
            try:
                _give(fd, reader)
                with os.fdopen(fd, "wb", closefd=False) as file:
                    file.write(data)
                os.fsync(fd)
            finally:
                os.close(fd)
            reached(half)
            self._rename(temporary, name)
        except BaseException:
            self.remove(temporary)
            raise
        os.fsync(self.fd)

    def _rename(self, temporary: str, name: str) -> None:
        try:
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:  # a folder stands in its place: out of the way with it
            os.rename(name, f".odd-{secrets.token_hex(8)}", src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def create(self, name: str, *, reader: int | None = None) -> int:
        """A new empty file to append to, in the place of whatever has its name; ours whoever renames it later."""
        self.remove(name)
        flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        _give(fd, reader)
        return fd

    def mark(self, name: str) -> bool:
        """An empty file of that name; False when there is one already."""
        try:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=self.fd))
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> bool:
        """Takes a name away, an empty folder too; False when it was gone already or cannot be: of two who try, one
        does it."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except (IsADirectoryError, PermissionError):
            with suppress(OSError):
                os.rmdir(name, dir_fd=self.fd)
                return True
            return False
        except OSError:
            return False
        return True

    def sweep(self) -> None:
        """Removes what a writer of our side that was killed has left half written; of others what is old."""
        for name in self.names():
            if name.startswith(self._half) or (name.startswith(".") and self.age(name) > OLD_SECONDS):
                self.remove(name)

    def age(self, name: str) -> float:
        """The seconds since it was last written; none for what is not there."""
        try:
            return time.time() - os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mtime
        except OSError:
            return 0.0


def _give(fd: int, reader: int | None) -> None:
    """Lets the other side read it: by making it theirs where we can, else by letting everybody in the folder."""
    if reader is not None and reader != os.geteuid():
        if os.geteuid() == 0:
            os.fchown(fd, reader, -1)
        else:
            os.fchmod(fd, 0o644)


def _check(about: os.stat_result, owners: Collection[int]) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise Unreadable("is not a plain file")
    if about.st_nlink != 1:
        raise Unreadable("has another name elsewhere (a hard link)")
    if owners and about.st_uid not in owners:
        raise Unreadable("belongs to somebody else than the folder")
