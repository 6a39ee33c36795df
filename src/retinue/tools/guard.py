"""What stands between a model's words and this machine: arguments, path rules, and opening files under those rules.

A path is checked once, on its resolved form, and then opened folder by folder below the root that allowed it, never
following a symlink. So a path that was swapped after the check leads nowhere, with or without /proc to ask.
Knows nothing of what tools do with the files, and keeps nothing: each call stands alone.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final, TypeVar, cast

from retinue.core.errors import ToolError
from retinue.core.messages import Call
from retinue.core.ports import Folders

T = TypeVar("T")

STATE = ".retinue"
NAME_BYTES = 255
PATH_BYTES = 4095
_REQUIRED: Final = object()
_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_HIDING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
# O_PATH asks for no read permission on the folders passed through; elsewhere reading them has to do.
_STEP = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


def take(call: Call, name: str, kind: type[T], default: T | object = _REQUIRED, *, alias: str = "") -> T:
    """One argument of a call, of this type; null counts as absent."""
    value = call.args.get(name)
    if value is None and alias:
        value = call.args.get(alias)
    if value is None:
        if default is _REQUIRED:
            raise ToolError(f"{call.name}: missing '{name}'")
        return cast("T", default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return cast("T", value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ToolError(f"{call.name}: '{name}' must be {_KINDS[kind]}, got {type(value).__name__}")
    return value


def quoted(raw: object) -> str:
    """A path for a message: on one line, of bounded length."""
    text = str(raw)
    return repr(text if len(text) <= 200 else f"{text[:150]}...{text[-40:]}")


def visible(text: str) -> str:
    """Text for a person who has to judge it: what would move a cursor or hide is spelled out."""
    return _HIDING.sub(lambda found: ascii(found[0])[1:-1], text)


def failure(tool: str, path: object, error: OSError) -> ToolError:
    return ToolError(f"{tool}: {quoted(path)}: {error.strerror or error}")


def readable(folders: Folders, raw: str, *, tool: str = "read") -> Path:
    """The resolved path, which is inside one of the run's roots. A relative path is the first root's that has it."""
    path = _resolve(folders.workspace, raw, tool)
    if not path.exists() and not Path(raw).is_absolute():
        others = (_resolve(root, raw, tool) for root in folders.searched)
        path = next((other for other in others if other.exists() and _root_of(other, folders.roots)), path)
    if _root_of(path, folders.roots) is None:
        raise ToolError(f"{tool}: {quoted(raw)} is outside this run's folders")
    return path


def writable(folders: Folders, raw: str, *, tool: str = "write") -> Path:
    """The resolved path, which is inside the run's workspace."""
    path = _resolve(folders.workspace, raw, tool)
    if _root_of(path, [folders.workspace]) is None:
        why = "" if _root_of(path, folders.roots) is None else "; it may be read, not written"
        raise ToolError(f"{tool}: {quoted(raw)} is outside this run's workspace{why}")
    return path


def open_file(path: Path, roots: Sequence[Path], *, tool: str) -> BinaryIO:
    """A regular file for reading; anything else is refused, and nothing blocks."""
    fd = _open(path, roots, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, tool)
    try:
        _must_be_file(os.fstat(fd).st_mode, path, tool)
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def open_folder(path: Path, roots: Sequence[Path], *, tool: str) -> int:
    """A descriptor of a folder, to list it by; the caller closes it."""
    return _open(path, roots, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK, tool)


def replace_file(path: Path, data: bytes, folders: Folders, *, tool: str) -> None:
    """Puts a whole file in place at once, with the mode of the one it replaces; makes the folders it needs.

    What else shares that file (a hard link) keeps the old content."""
    with _parent(path, [folders.workspace], tool, make=True) as (folder, name):
        temporary = f".{secrets.token_hex(8)}.tmp"
        try:
            mode = _old_mode(name, folder, path, tool)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    if mode is not None:
                        os.fchmod(fd, mode)
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        except OSError as error:
            raise failure(tool, path, error) from error


def _resolve(base: Path, raw: str, tool: str) -> Path:
    if not raw.strip():
        raise ToolError(f"{tool}: the path is empty")
    try:
        encoded = os.fsencode(raw)
    except UnicodeEncodeError:
        raise ToolError(f"{tool}: {quoted(raw)} is not a valid path") from None
    if b"\0" in encoded:
        raise ToolError(f"{tool}: {quoted(raw)} has a NUL byte in it")
    if len(encoded) > PATH_BYTES or any(len(part) > NAME_BYTES for part in encoded.split(b"/")):
        raise ToolError(f"{tool}: {quoted(raw)} is too long for a path")
    return Path(os.path.realpath(base / raw))


def _root_of(path: Path, roots: Sequence[Path]) -> Path | None:
    """The root a path is in. Our own state inside a project (tokens, logs, other runs) is in none."""
    resolved = (Path(os.path.realpath(root)) for root in roots)
    return next(
        (root for root in resolved if path.is_relative_to(root) and STATE not in path.relative_to(root).parts), None
    )


def _open(path: Path, roots: Sequence[Path], flags: int, tool: str) -> int:
    with _parent(path, roots, tool) as (folder, name):
        try:
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except OSError as error:
            raise failure(tool, path, error) from error


@contextmanager
def _parent(path: Path, roots: Sequence[Path], tool: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """The open folder that holds a resolved path, and the path's name in it."""
    root = _root_of(path, roots)
    if root is None:
        raise ToolError(f"{tool}: {quoted(path)} is outside this run's folders")
    base = root.parent if path == root else root
    *steps, name = path.relative_to(base).parts or (".",)
    try:
        fd = os.open(base, _STEP)
        try:
            for step in steps:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(step, dir_fd=fd)
                inner = os.open(step, _STEP | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = inner
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise failure(tool, path, error) from error
    try:
        yield fd, name
    finally:
        os.close(fd)


def _old_mode(name: str, folder: int, path: Path, tool: str) -> int | None:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    _must_be_file(mode, path, tool)
    return stat.S_IMODE(mode) & 0o777


def _must_be_file(mode: int, path: Path, tool: str) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a symlink"}
    raise ToolError(f"{tool}: {quoted(path)} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file")
