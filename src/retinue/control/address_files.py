"""`doors/PID.json`: how one process tells the others of the same user where its door is.

The file is locked for as long as the door is open, so one that can be locked was left by a process that died: nothing
has to be guessed from process numbers, which are used again. Files that are not ours are not read.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from retinue.core.errors import RetinueError
from retinue.files.atomic import open_replacement
from retinue.files.content import read_up_to, write_all
from retinue.files.opening import open_regular_file
from retinue.files.private import make_private_folder
from retinue.protocol.control import VERSION, Address

LARGEST = 4096


class DoorFile:
    """The file of our own door; made when the door is open, gone when it closes."""

    def __init__(self, folder: Path, address: Address) -> None:
        self.path = folder / f"{address.pid}.json"
        try:
            make_private_folder(folder).chmod(0o700)
            with open_replacement(self.path) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_all(fd, msgspec.json.encode(address))
                self._fd = os.dup(fd)  # keeps the lock
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
            fd = open_regular_file(path)
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
        fd = open_regular_file(path, owners=(os.geteuid(),))
    except OSError:
        return None
    try:
        if _is_stale(fd):
            with suppress(OSError):
                if path.stat().st_ino == os.fstat(fd).st_ino:  # not the file of a new process with the same number
                    path.unlink()
            return None
        address = msgspec.json.decode(read_up_to(fd, LARGEST), type=Address)
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
