"""Paths of this machine that walled runs are to see beside their folders."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from retinue.core.errors import ConfigError

PATH_PATTERN = r"^(?:~|/[^/\0])[^\0]*$"
MISSING = "expose_paths: {path} does not exist here, so no run will see it"


def shown_path(path: str) -> str:
    """The path in full; a ConfigError says what is wrong with it."""
    if path == "/":
        raise ConfigError("/ cannot be shown behind a wall: it has everything in it")
    if not re.fullmatch(PATH_PATTERN, path):
        raise ConfigError(f"must be an absolute path, got {path!r}")
    try:
        return str(Path(path).expanduser())
    except RuntimeError:  # somebody's home, whoever that is
        return path


def missing(paths: Sequence[str]) -> Iterator[str]:
    """What a person should know: a file may name what only other machines have."""
    yield from (MISSING.format(path=path) for path in paths if not Path(path).exists())
