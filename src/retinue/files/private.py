"""Files and folders that only their owner can read, regardless of the umask."""

from __future__ import annotations

import os
from pathlib import Path

from retinue.core.errors import RetinueError
from retinue.files.content import write_all
from retinue.files.opening import AnyPath

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


def make_private_folder(path: AnyPath) -> Path:
    """Create a folder and its missing parents, and return its path. Leaves an existing folder unchanged.

    Raises RetinueError if the folder cannot be created or `path` is not a folder."""
    try:
        _make_folders(os.fspath(path))
    except OSError as error:
        raise RetinueError(f"cannot make {path}: {error.strerror or error}") from None
    return Path(path)


def _make_folders(folder: str, *, is_again: bool = False) -> None:
    try:
        os.mkdir(folder, FOLDER_MODE)  # noqa: PTH102
    except FileNotFoundError:
        above = os.path.dirname(folder)  # noqa: PTH120
        if is_again or above in ("", folder):  # in /proc no folder can be created at all
            raise
        _make_folders(above)
        _make_folders(folder, is_again=True)
    except FileExistsError:
        if not Path(folder).is_dir():
            raise
    else:
        os.chmod(folder, FOLDER_MODE)  # noqa: PTH101 - the umask may have taken bits away


def open_private_file(path: AnyPath, *, append: bool = False, exclusive: bool = False) -> int:
    """Open a file for writing and create it if it is missing. The caller closes the descriptor. Follows no link.

    An existing file is truncated, or extended with `append`, or refused with `exclusive`."""
    how = (os.O_APPEND if append else os.O_TRUNC) | (os.O_EXCL if exclusive else 0)
    fd = os.open(path, _FLAGS | how, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)
    except PermissionError:  # another user's file that we may write
        if exclusive:
            os.close(fd)
            raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_private_file(path: AnyPath, data: bytes, *, append: bool = False, exclusive: bool = False) -> None:
    """Write a private file; see `open_private_file`. Not atomic: use `replace_file` if readers must not see partial
    data."""
    fd = open_private_file(path, append=append, exclusive=exclusive)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)
