"""Kernel locks on open files. A lock ends with its descriptor, and so also with the process that holds it."""

from __future__ import annotations

import fcntl
import os

from retinue.files.opening import AnyPath
from retinue.files.private import FILE_MODE


def take_file_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file until its descriptor is closed; return False if another process holds the lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_own_file(path: AnyPath) -> int:
    """Open a private file for reading and writing. The caller closes the descriptor.

    Creates the file if it is missing and does not truncate it otherwise. Does not follow a symlink."""
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
