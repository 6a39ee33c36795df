"""`doors/PID.json`: how one process tells the others of the same user where its door is.

The file is locked for as long as the door is open, so one that can be locked was left by a process that died: nothing
has to be guessed from process numbers, which are used again. Files that are not ours are not read.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

import msgspec

from retinue.core.errors import RetinueError
from retinue.protocol.control import VERSION, Address

LARGEST = 4096


class DoorFile:
    """The file of our own door; made when the door is open, gone when it closes."""

    def __init__(self, folder: Path, address: Address) -> None:
        self.path = folder / f"{address.pid}.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            new = folder / f".{address.pid}.new"
            new.unlink(missing_ok=True)
            self._fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(self._fd, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._fd, msgspec.json.encode(address))
            new.replace(self.path)
        except OSError as error:
            raise RetinueError(f"cannot write {self.path}: {error.strerror or error}") from None

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        os.close(self._fd)


def find(folder: Path, pid: int) -> Address | None:
    """The door of that process, if it has one open."""
    return _read(folder / f"{pid}.json")


def find_all(folder: Path) -> list[Address]:
    """Every open door; files that dead processes left are removed."""
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.suffix == ".json")
    except OSError:
        return []
    return [address for address in map(_read, files) if address is not None]


def survey(folder: Path) -> tuple[list[int], list[Path]]:
    """The processes with an open door, and the files that dead ones left. Removes nothing."""
    live, stale = [], []
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.suffix == ".json")
    except OSError:
        return [], []
    for path in files:
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if _is_stale(fd):
                    stale.append(path)
                elif path.stem.isdigit():
                    live.append(int(path.stem))
            finally:
                os.close(fd)
    return live, stale


def _read(path: Path) -> Address | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            return None
        if _is_stale(fd):
            with suppress(OSError):
                if path.stat().st_ino == about.st_ino:  # not the file of a new process with the same number
                    path.unlink()
            return None
        address = msgspec.json.decode(os.read(fd, LARGEST), type=Address)
    except (OSError, msgspec.MsgspecError):
        return None
    finally:
        os.close(fd)
    return address if address.version == VERSION and f"{address.pid}.json" == path.name else None


def _is_stale(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
