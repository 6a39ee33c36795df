"""Path rules for a run's tools, and functions to open files under these rules.

A path is resolved and checked once. Then it is opened folder by folder below the root that allows it, never following
a symbolic link, so a path swapped after the check leads nowhere. This module keeps no state, and does not know why a
tool needs the file.

File tools execute where the run does, so they may resolve any path. A host tool sees more than a sandboxed run. It uses
`find_visible_path`, which looks only below the run's roots.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from retinue.core.errors import ToolError
from retinue.core.ports import Folders
from retinue.files import atomic, opening
from retinue.files.content import write_all
from retinue.files.opening import RefusedFile
from retinue.files.reserved import find_git_folder, is_reserved_name, is_state_name
from retinue.tools.arguments import quote_text

NAME_BYTES = 255
PATH_BYTES = 4095


class OutsideRoots(ToolError):
    """A path outside the folders of a run."""


def make_file_error(tool: str, path: object, error: OSError) -> ToolError:
    """Return the ToolError that a model sees for a file that cannot be used."""
    if isinstance(error, RefusedFile):
        return ToolError(f"{tool}: {quote_text(path)} {error.text}")
    return ToolError(f"{tool}: {quote_text(path)}: {error.strerror or error}")


def resolve_readable(folders: Folders, raw: str, *, tool: str = "read") -> Path:
    """Resolve a path that must be inside one of the run's roots. Raises ToolError.

    A relative path that does not exist in the workspace is looked up in the search roots."""
    path = _resolve(folders.workspace, raw, tool)
    is_found = _find_root(path, folders.roots) is not None and os.path.lexists(path)
    if not is_found and not Path(raw).is_absolute():
        others = (_resolve(root, raw, tool) for root in folders.search_roots)
        path = next((other for other in others if _find_root(other, folders.roots) and os.path.lexists(other)), path)
    if _find_root(path, folders.roots) is None:
        raise OutsideRoots(f"{tool}: {quote_text(raw)} is outside this run's folders")
    return path


def find_visible_path(folders: Folders, raw: str, *, tool: str = "read") -> Path | None:
    """Return the absolute path of a file or folder in the run's roots, or None if it does not exist there. Raises
    OutsideRoots for a path outside, and ToolError for a path that cannot be used.

    The text of the path decides whether it is inside, and no link below a root is followed. So the answer says nothing
    about files that the run cannot see. A relative path is looked up in the workspace, then in the search roots."""
    _check_text(raw, tool)
    bases = (folders.workspace, *folders.search_roots)
    spelled = dict.fromkeys(Path(os.path.abspath(base / raw)) for base in bases)  # noqa: PTH100 - keeps links
    places = [place for path in spelled if (place := _find_place(path, folders)) is not None]
    if not places:
        raise OutsideRoots(f"{tool}: {quote_text(raw)} is outside this run's folders")
    for path in places:
        try:
            opening.stat_real(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except RefusedFile:
            raise ToolError(f"{tool}: {quote_text(raw)} leads over a symlink: name what it points to") from None
        except OSError as error:
            raise make_file_error(tool, raw, error) from error
        return path
    return None


def resolve_writable(folders: Folders, raw: str, *, tool: str = "write") -> Path:
    """Resolve a path that must be inside the run's workspace, but not inside a git folder. Raises ToolError.

    Git folders are closed because the user's next git command would run whatever their settings and hooks say."""
    path = _resolve(folders.workspace, raw, tool)
    root = _find_root(path, [folders.workspace])
    if root is None:
        why = "" if _find_root(path, folders.roots) is None else "; it may be read, not written"
        raise ToolError(f"{tool}: {quote_text(raw)} is outside this run's workspace{why}")
    inside = path.relative_to(root)
    if any(map(is_reserved_name, inside.parts)) or find_git_folder(root, str(inside)) is not None:
        raise ToolError(f"{tool}: {quote_text(raw)} is inside a git folder; no file tool writes there")
    return path


def open_allowed_file(path: Path, roots: Sequence[Path], *, tool: str) -> BinaryIO:
    """Open a regular file for reading. Any other kind of file is refused, and opening never blocks."""
    with _open_parent(path, roots, tool) as (folder, name):
        return os.fdopen(opening.open_regular_file(name, dir_fd=folder), "rb")


def open_allowed_folder(path: Path, roots: Sequence[Path], *, tool: str) -> int:
    """Open a folder for listing; the caller closes the descriptor."""
    with _open_parent(path, roots, tool) as (folder, name):
        return opening.open_folder(name, dir_fd=folder)


def replace_allowed_file(path: Path, data: bytes, folders: Folders, *, tool: str) -> None:
    """Replace a whole file at once, keeping its mode. Create the file and its folders if they do not exist.

    A hard link to the old file keeps the old content."""
    with (
        _open_parent(path, [folders.workspace], tool, create=True) as (folder, name),
        atomic.open_replacement(name, dir_fd=folder, mode=None) as fd,
    ):
        write_all(fd, data)


def _resolve(base: Path, raw: str, tool: str) -> Path:
    _check_text(raw, tool)
    return Path(os.path.realpath(base / raw))


def _check_text(raw: str, tool: str) -> None:
    """Raise ToolError for a text that is no path."""
    if not raw.strip():
        raise ToolError(f"{tool}: the path is empty")
    try:
        encoded = os.fsencode(raw)
    except UnicodeEncodeError:
        raise ToolError(f"{tool}: {quote_text(raw)} is not a valid path") from None
    if b"\0" in encoded:
        raise ToolError(f"{tool}: {quote_text(raw)} has a NUL byte in it")
    if len(encoded) > PATH_BYTES or any(len(part) > NAME_BYTES for part in encoded.split(b"/")):
        raise ToolError(f"{tool}: {quote_text(raw)} is too long for a path")


def _find_root(path: Path, roots: Sequence[Path]) -> Path | None:
    """Return the root that contains the resolved `path`, or None."""
    return next((root for root in map(_resolve_root, roots) if _is_inside(path, root)), None)


def _find_place(path: Path, folders: Folders) -> Path | None:
    """Return `path` below the real path of the root that contains it, or None. Decides by the text of `path`, which
    may begin like the root as it is given or as it is resolved."""
    for root in folders.roots:
        real = root if str(root) in folders.granted_paths else _resolve_root(root)
        for start in (real, root):
            if _is_inside(path, start):
                return real / path.relative_to(start)
    return None


def _resolve_root(root: Path) -> Path:
    return Path(os.path.realpath(root))


def _is_inside(path: Path, root: Path) -> bool:
    """Return True if `root` contains `path`. Our state in a project (tokens, logs, runs) is in no root."""
    return path.is_relative_to(root) and not any(map(is_state_name, path.relative_to(root).parts))


@contextmanager
def _open_parent(path: Path, roots: Sequence[Path], tool: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder of a resolved path; yield its descriptor and the file name. An OSError becomes a ToolError."""
    root = _find_root(path, roots)
    if root is None:
        raise ToolError(f"{tool}: {quote_text(path)} is outside this run's folders")
    base = root.parent if path == root else root
    try:
        with opening.open_parent(base, path.relative_to(base).parts or (".",), create=create) as found:
            yield found
    except OSError as error:
        raise make_file_error(tool, path, error) from error
