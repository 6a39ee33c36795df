"""Temporary folders of this process. If the process is killed, the next process removes its folders.

Each folder stays locked while its process lives. Its name is that of a temporary file, so it never becomes part of a
workspace, even if TMPDIR is inside the project.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from retinue.files.atomic import TEMPORARY_PREFIX, is_temporary_name
from retinue.files.locks import open_own_file, take_file_lock
from retinue.files.private import make_private_folder
from retinue.files.trees import remove_tree

LOCK, FILES = "lock", "files"
NEW_SECONDS = 60.0


@contextmanager
def make_scratch_folder() -> Iterator[Path]:
    """Create a private folder below TMPDIR and remove it after the block."""
    parent = Path(tempfile.gettempdir())
    _sweep_once(str(parent))
    folder = make_private_folder(parent / make_scratch_name())
    lock = open_own_file(folder / LOCK)
    try:
        take_file_lock(lock)
        yield make_private_folder(folder / FILES)
    finally:
        _remove_folder(folder)
        os.close(lock)


def _remove_folder(folder: Path) -> None:
    """Remove the files of a scratch folder first and its lock last.

    The sweep ignores a non-empty folder without a lock, so this order lets it finish a removal that was interrupted."""
    remove_tree(folder / FILES)
    remove_tree(folder)


def make_scratch_name() -> str:
    """Return a new name that `is_temporary_name` recognises."""
    return f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"


@cache
def _sweep_once(parent: str) -> None:
    sweep_scratch_folders(Path(parent))


def sweep_scratch_folders(parent: Path) -> None:
    """Remove the scratch folders of killed processes. Keeps new folders, which may not have their lock yet."""
    with suppress(OSError):
        for name in filter(is_temporary_name, os.listdir(parent)):  # noqa: PTH208
            with suppress(OSError):
                _sweep_folder(parent / name)


def _sweep_folder(folder: Path) -> None:
    status = folder.lstat()
    is_new = time.time() - status.st_mtime < NEW_SECONDS
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return
    if not (folder / LOCK).is_file():
        if not is_new:
            folder.rmdir()  # works only on an empty folder, left by a process killed after it removed the lock
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not is_new and take_file_lock(lock):
            _remove_folder(folder)
    finally:
        os.close(lock)
