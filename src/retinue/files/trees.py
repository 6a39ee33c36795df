"""Folder trees as a whole: removing, measuring and giving them away while others may change them."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from retinue.files.opening import AnyPath, stat_entry

BLOCK_BYTES = 512


def remove_tree(folder: AnyPath) -> bool:
    """Remove a folder and all below it as far as possible; return whether it is gone. Links are not followed."""
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def measure_folder(folder: AnyPath) -> int:
    """Return the bytes that the regular files below a folder take on disk; links are not followed."""
    total = 0
    with suppress(OSError):
        for _, _, names, at in os.fwalk(folder):
            for name in names:
                status = stat_entry(name, at)
                if status is not None and stat.S_ISREG(status.st_mode):
                    total += status.st_blocks * BLOCK_BYTES
    return total


def give_folder(folder: str, uid: int, gid: int) -> None:
    """Give a folder with all it holds to a user (-1: leave the owner) and to a group, for reading. The folder itself
    comes last: its group says that all is done."""
    for _, _, files, at in os.fwalk(folder, topdown=False):
        os.fchown(at, uid, gid)
        os.fchmod(at, stat.S_IMODE(os.fstat(at).st_mode) | 0o050)
        for name in files:
            _give_file(name, at, uid, gid)


def _give_file(name: str, folder: int, uid: int, gid: int) -> None:
    """Give a file away. Only a plain file has content that its group may then read."""
    os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISREG(mode):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IMODE(mode) | 0o040 | (mode & 0o100) >> 3)
        finally:
            os.close(fd)
