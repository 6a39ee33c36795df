"""Locks of the kernel's on open files: they end with the descriptor, so also with the process that holds them."""

from __future__ import annotations

import fcntl


def take_file_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file until its descriptor is closed; return False if another process holds the lock."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
