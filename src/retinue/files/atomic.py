"""Replacing a file or filling a folder in one step: readers see all of the new content or none.

The new content is written next to the file and renamed over it. With `sync`, content and name are on disk before the
function returns, so a crash of the machine leaves one of the two contents. A process killed in between leaves a file
recognised by `is_temporary_name`, or a folder removed by the next `create_folder` of the same name.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retinue.files.content import write_all
from retinue.files.opening import AnyPath, check_regular
from retinue.files.private import FOLDER_MODE, make_private_folder
from retinue.files.trees import remove_tree

TEMPORARY_PREFIX = ".retinue-"
NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
PRIVATE_MODE = 0o600
_TEMPORARY = re.compile(r"\.retinue-[0-9a-f]{16}")


def is_temporary_name(name: str) -> bool:
    """Return True if `name` is that of a replacement file, which a killed process may never have renamed."""
    return _TEMPORARY.fullmatch(name) is not None


@contextmanager
def open_replacement(
    path: AnyPath,
    *,
    dir_fd: int | None = None,
    mode: int | None = PRIVATE_MODE,
    sync: bool = False,
    prefix: str = TEMPORARY_PREFIX,
    before_rename: Callable[[], None] | None = None,
) -> Iterator[int]:
    """Yield a descriptor for the new content. The new file replaces `path` when the block ends without an error.

    `mode` is set regardless of the umask. If it is None, the new file keeps the mode of the existing file, which must
    be regular; a file that did not exist gets the umask's default."""
    folder = os.path.dirname(path)  # noqa: PTH120 - may hold foreign bytes
    temporary = os.path.join(folder, f"{prefix}{secrets.token_hex(8)}")  # noqa: PTH118 - may hold foreign bytes
    exact = mode if mode is not None else _mode_of(path, dir_fd)
    fd = os.open(temporary, NEW_FLAGS, 0o666 if exact is None else exact & PRIVATE_MODE, dir_fd=dir_fd)
    try:
        try:
            yield fd
            if exact is not None:
                os.fchmod(fd, exact)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        if before_rename is not None:
            before_rename()
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=dir_fd)
        raise
    if sync:
        sync_folder(folder, dir_fd=dir_fd)


def replace_file(
    path: AnyPath,
    data: bytes,
    *,
    dir_fd: int | None = None,
    mode: int | None = PRIVATE_MODE,
    sync: bool = False,
) -> None:
    """Replace the content of a file, or create the file. See `open_replacement` for the parameters."""
    with open_replacement(path, dir_fd=dir_fd, mode=mode, sync=sync) as fd:
        write_all(fd, data)


def create_folder(path: AnyPath, fill: Callable[[Path], bool]) -> None:
    """Create a private folder with its content. An empty folder at `path` is replaced.

    `fill` writes the content into a folder next to `path`, which is then renamed. If `fill` raises an error or returns
    False, nothing changes."""
    partial = Path(path).with_name(f".{Path(path).name}.new")
    remove_tree(partial)  # left by a process that was killed here
    make_private_folder(partial.parent)
    partial.mkdir(FOLDER_MODE)  # raises FileExistsError for a link that somebody planted
    try:
        partial.chmod(FOLDER_MODE)
        if fill(partial):
            partial.rename(path)
    finally:
        remove_tree(partial)


def move_folder(start: Path, target: Path) -> None:
    """Rename a folder, unless an interrupted call has done so. Replaces an empty folder at `target`, and no other."""
    if start.is_dir() or not target.is_dir():
        make_private_folder(target.parent)
        start.rename(target)


def sync_folder(path: AnyPath = "", *, dir_fd: int | None = None) -> None:
    """Wait until the names in a folder are on disk."""
    fd = os.open(Path(path) if path else ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mode_of(path: AnyPath, dir_fd: int | None) -> int | None:
    try:
        mode = os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    check_regular(mode, path)
    return stat.S_IMODE(mode) & 0o777
