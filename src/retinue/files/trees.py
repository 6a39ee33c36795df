"""Operations on whole folder trees that others may change meanwhile: walk, remove, measure, change the owner.

The depth of a tree is not under our control, so nothing here recurses, builds a whole path or keeps more than two
folders open.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from retinue.files.opening import AnyPath, FileId, file_id, open_folder, stat_entry

BLOCK_BYTES = 512


@dataclass
class Visit:
    """One stop of a walk at the folder `fd`, which is open until the walk continues. `steps` is its path from the top.

    The walk stops at a folder first of all (`folders` and `others` list its entries), again after each subfolder
    (`finished` is the name of that subfolder), and when it leaves the folder (`leaving`). Remove a name from `folders`
    at the first stop to skip that subfolder."""

    fd: int
    steps: list[str]
    folders: list[str]
    others: list[str]
    leaving: bool = False
    finished: str = ""


@dataclass
class _Level:
    name: str
    id: FileId
    waiting: list[str] = field(default_factory=list)


def walk_tree(top: AnyPath | int, *, errors: list[OSError] | None = None) -> Iterator[Visit]:
    """Walk through a folder and everything below it, without following links. `errors` collects failed opens.

    The walk goes up through `..` and checks that it reaches the folder it came from. If a folder was moved away
    meanwhile, raises OSError."""
    errors = [] if errors is None else errors
    fd = os.dup(top) if isinstance(top, int) else open_folder(top)
    levels = [_Level("", file_id(fd))]
    steps: list[str] = []
    is_new = True
    try:
        while levels:
            level = levels[-1]
            if is_new:
                folders, others = _list_entries(fd, errors)
                yield Visit(fd, steps, folders, others)
                level.waiting = folders[::-1]
            is_new = False
            if level.waiting:
                name = level.waiting.pop()
                try:
                    inner = open_folder(name, dir_fd=fd)
                except OSError as error:
                    errors.append(error)
                    continue
                os.close(fd)
                fd, is_new = inner, True
                levels.append(_Level(name, file_id(fd)))
                steps.append(name)
                continue
            yield Visit(fd, steps, [], [], leaving=True)
            name = levels.pop().name
            if levels:
                steps.pop()
                above = open_folder("..", dir_fd=fd)
                os.close(fd)
                fd = above
                if file_id(fd) != levels[-1].id:
                    raise OSError(errno.ESTALE, "a folder was moved while it was looked at")
                yield Visit(fd, steps, [], [], finished=name)
    finally:
        os.close(fd)


def _list_entries(fd: int, errors: list[OSError]) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
    except OSError as error:
        errors.append(error)
    return folders, others


def remove_tree(folder: AnyPath) -> bool:
    """Remove a folder and everything below it, as far as possible. Returns True if it is gone. Follows no links."""
    with suppress(OSError):
        remove_whole_tree(folder)
    return not os.path.lexists(folder)


def remove_whole_tree(folder: AnyPath) -> None:
    """Remove a folder and everything below it. If something cannot be removed, removes the rest and raises OSError."""
    errors: list[OSError] = []
    for visit in walk_tree(folder, errors=errors):
        for name in visit.others:
            _remove_entry(name, visit.fd, errors)
        if visit.finished:
            _remove_entry(visit.finished, visit.fd, errors, folder=True)
    try:
        Path(folder).rmdir()
    except OSError as error:
        raise (errors[0] if errors else error) from None


def _remove_entry(name: str, fd: int, errors: list[OSError], *, folder: bool = False) -> None:
    try:
        if folder:
            os.rmdir(name, dir_fd=fd)
        else:
            os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        pass
    except OSError as error:
        errors.append(error)


def measure_folder(folder: AnyPath) -> int:
    """Return the disk usage in bytes of the regular files below a folder. Follows no links."""
    total = 0
    with suppress(OSError):
        for visit in walk_tree(folder):
            for name in visit.others:
                status = stat_entry(name, visit.fd)
                if status is not None and stat.S_ISREG(status.st_mode):
                    total += status.st_blocks * BLOCK_BYTES
    return total


def find_last_change(folder: AnyPath) -> float:
    """Return the time of the newest change of a folder or of anything below it. Follows no links. Raises OSError if a
    part cannot be read."""
    newest, errors = 0.0, list[OSError]()
    for visit in walk_tree(folder, errors=errors):
        found = [stat_entry(name, visit.fd) for name in visit.others]
        newest = max(newest, os.fstat(visit.fd).st_mtime, *(status.st_mtime for status in found if status is not None))
    if errors:
        raise errors[0]
    return newest


def is_public(path: AnyPath) -> bool:
    """Return True if every user may read the file, or read and enter the folder."""
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False
    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & needed == needed


def is_public_tree(folder: AnyPath) -> bool:
    """Return True if every user may read a folder and everything below it. Others may add and remove files
    meanwhile."""
    visits = os.walk(folder)
    return all(is_public(path) and all(is_public(f"{path}/{name}") for name in names) for path, _, names in visits)


def give_folder(folder: AnyPath | int, uid: int, gid: int) -> None:
    """Change owner and group of a folder and all its content, and let the group read it. The folder is a path, or open.
    A `uid` of -1 keeps the owner.

    The folder itself comes last, so its group shows that the change is complete."""
    for visit in walk_tree(folder):
        for name in visit.others:
            _give_file(name, visit.fd, uid, gid)
        if visit.leaving:
            os.fchown(visit.fd, uid, gid)
            os.fchmod(visit.fd, stat.S_IMODE(os.fstat(visit.fd).st_mode) | 0o050)


def _give_file(name: str, folder: int, uid: int, gid: int) -> None:
    """Change the owner and group of a file. Only a regular file becomes readable for the group."""
    os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISREG(mode):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IMODE(mode) | 0o040 | (mode & 0o100) >> 3)
        finally:
            os.close(fd)
