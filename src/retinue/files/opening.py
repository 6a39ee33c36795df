"""Opening files and folders below a folder without following symlinks.

Every step uses a descriptor, so a path component that is swapped for a link between two steps is not followed. Nothing
here blocks on a FIFO or opens a device for reading. Functions raise `OSError`. Its subclass `RefusedFile` gives the
reason why an existing entry is not an acceptable file.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# O_PATH needs no read permission on the folders on the way. Systems without O_PATH need that permission.
STEP_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Reason = Literal["folder", "link", "fifo", "socket", "device", "owner", "mode", "hard_link", "too_large"]
FileId = tuple[int, int]
AnyPath = str | Path

_TEXTS: dict[Reason, str] = {
    "folder": "is a folder, not a file",
    "link": "is a symlink, not a file",
    "fifo": "is a FIFO, not a file",
    "socket": "is a socket, not a file",
    "device": "is a device, not a file",
    "owner": "belongs to another user",
    "mode": "can be read or written by others",
    "hard_link": "has another name elsewhere (a hard link)",
    "too_large": "is too large",
}
_KINDS: dict[int, Reason] = {
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


class RefusedFile(OSError):
    """An entry that exists but is not an acceptable file. `reason` is the typed cause, `text` the message for a
    person."""

    def __init__(self, reason: Reason, path: object = None) -> None:
        self.reason, self.text = reason, _TEXTS[reason]
        super().__init__(errno.EINVAL, self.text, None if path is None else str(path))


def file_id(fd: int) -> FileId:
    """Return the device and inode of an open file or folder, which identify it on this machine."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def open_folder(path: AnyPath, *, dir_fd: int | None = None) -> int:
    """Open a folder for listing. Does not follow a link in the last component. The caller closes the descriptor."""
    return os.open(path, FOLDER_FLAGS, dir_fd=dir_fd)


def open_regular_file(
    path: AnyPath,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
    owners: Collection[int] = (),
    forbidden_mode: int = 0,
    one_name: bool = False,
) -> int:
    """Open a regular file for reading. The caller closes the descriptor.

    Raises `RefusedFile` for any other type of entry, for a link unless `follow` is set, for an owner not in `owners`
    (if given), for any permission bit in `forbidden_mode`, and for a file with hard links if `one_name` is set."""
    try:
        fd = os.open(path, FILE_FLAGS & ~(os.O_NOFOLLOW if follow else 0), dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise RefusedFile("link", path) from None
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, or a device without a driver
            check_regular(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow).st_mode, path)
        raise
    try:
        status = os.fstat(fd)
        check_regular(status.st_mode, path)
        if owners and status.st_uid not in owners:
            raise RefusedFile("owner", path)
        if status.st_mode & forbidden_mode:
            raise RefusedFile("mode", path)
        if one_name and status.st_nlink != 1:
            raise RefusedFile("hard_link", path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(mode: int, path: object = None) -> None:
    """Raise `RefusedFile` unless `mode` is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise RefusedFile(_KINDS.get(stat.S_IFMT(mode), "device"), path)


def stat_entry(name: str, dir_fd: int) -> os.stat_result | None:
    """Return the status of an entry of an open folder, without following a link. None if the status cannot be read."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return None


def _open_step(folder: int, name: str) -> int:
    return os.open(name, STEP_FLAGS, dir_fd=folder)


@contextmanager
def open_parent(
    root: AnyPath | int,
    path: str | Sequence[str],
    *,
    create: bool = False,
    inherit_owner: bool = False,
    never: Collection[FileId] = (),
    open_step: Callable[[int, str], int] = _open_step,
) -> Iterator[tuple[int, str]]:
    """Open the folder that holds `path`, relative to `root`. Yields its descriptor and the last component of `path`.

    The descriptor serves as `dir_fd`, not for listing. `root` is an open folder or a trusted path, which may be a
    link. `create` makes missing folders; with `inherit_owner`, root gives each of them the owner of its parent. A
    folder in `never` is refused with PermissionError. `open_step` opens one folder on the way, given the open folder
    above it and its name; it follows no link."""
    *steps, name = path.split("/") if isinstance(path, str) else path
    fd = os.dup(root) if isinstance(root, int) else os.open(root, STEP_FLAGS & ~os.O_NOFOLLOW)
    try:
        for step in steps:
            try:
                inner = open_step(fd, step)
            except FileNotFoundError:
                if not create:
                    raise
                make_folder(step, dir_fd=fd, inherit_owner=inherit_owner)
                inner = open_step(fd, step)
            os.close(fd)
            fd = inner
            if never and file_id(fd) in never:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), step)
        yield fd, name
    finally:
        os.close(fd)


def stat_real(path: AnyPath) -> os.stat_result:
    """Return the status of the entry at an absolute path. Raises `RefusedFile` if the entry, or any folder on the way
    from the root of the file system, is a link."""
    with open_parent("/", Path(path).parts[1:] or (".",), open_step=_open_real_step) as (folder, name):
        return _stat_unless_link(name, folder)


def open_real_folder(path: AnyPath) -> int:
    """Open the folder at an absolute path for listing. Raises OSError if it, or any folder on the way from the root of
    the file system, is a link. The caller closes the descriptor."""
    with open_parent("/", Path(path).parts[1:] or (".",)) as (folder, name):
        return open_folder(name, dir_fd=folder)


def _open_real_step(folder: int, name: str) -> int:
    _stat_unless_link(name, folder)
    return _open_step(folder, name)


def _stat_unless_link(name: str, folder: int) -> os.stat_result:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        raise RefusedFile("link", name)
    return status


def make_folder(name: str, *, dir_fd: int, mode: int = 0o777, inherit_owner: bool = False) -> bool:
    """Create a folder in an open folder. Returns False if the name is taken."""
    try:
        os.mkdir(name, mode, dir_fd=dir_fd)
    except FileExistsError:
        return False
    if inherit_owner and os.geteuid() == 0:
        above = os.fstat(dir_fd)
        os.chown(name, above.st_uid, above.st_gid, dir_fd=dir_fd, follow_symlinks=False)
    return True
