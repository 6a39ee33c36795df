"""The object folders of a repository: one cloned with `--shared` or `--reference` also reads those of another, which
may do the same.

A sandboxed run is shown these folders, so only a folder that looks like one of objects is accepted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

DEEPEST = 5  # as git goes itself
LARGEST = 1024 * 1024
_NAME = re.compile(r"[0-9a-f]{2}|info|pack|tmp[_-].*|incoming-.*|[a-z-]+\.lock")
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


def find_object_folders(objects: str) -> list[str]:
    """Return the folder and all it leads to, each once, with no link in their paths."""
    found = {os.path.realpath(objects): None}
    layer = list(found)
    for depth in range(DEEPEST):
        layer = [path for folder in layer for path in _read_alternates(folder, relative=not depth) if path not in found]
        found |= dict.fromkeys(layer)
    return list(found)


def format_alternates(paths: Sequence[str]) -> bytes:
    """Return an alternates file that names the folders; a path that git could misread is quoted."""
    return b"".join(_quote_path(os.fsencode(path)) + b"\n" for path in paths)


def _read_alternates(objects: str, *, relative: bool) -> Iterator[str]:
    try:
        with Path(objects, "info", "alternates").open("rb") as file:
            named = file.read(LARGEST).split(b"\n")
    except OSError:
        return
    for line in named:
        if not line or line.startswith(b"#") or b"\0" in _unquote_path(line):
            continue
        path = os.fsdecode(_unquote_path(line))
        if (path.startswith("/") or relative) and _is_objects(real := os.path.realpath(os.path.join(objects, path))):  # noqa: PTH118
            yield real


def _is_objects(folder: str) -> bool:
    try:
        names = [path.name for path in Path(folder).iterdir()]
    except OSError:
        return False
    return "pack" in names and all(map(_NAME.fullmatch, names))


def _quote_path(path: bytes) -> bytes:
    if not path.startswith((b"#", b'"')) and b"\n" not in path:
        return path
    return b'"' + path.replace(b"\\", b"\\\\").replace(b'"', b'\\"').replace(b"\n", b"\\n") + b'"'


def _unquote_path(line: bytes) -> bytes:
    if not (line.startswith(b'"') and line.endswith(b'"') and len(line) > 1):
        return line
    return _ESCAPE.sub(_unescape, line[1:-1])


def _unescape(found: re.Match[bytes]) -> bytes:
    letter = found[1]
    return bytes([int(letter, 8) & 0xFF]) if letter.isdigit() and len(letter) == 3 else _LETTERS.get(letter, letter)
