"""Where runs keep their files: made when first used, private to the user, and gone with a log that is in memory.

Paths are kept as text until something touches them: most runs never do, and a thousand runs should not pay for it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from retinue.core.errors import ConfigError, RetinueError
from retinue.core.limits import EVENT_BYTES
from retinue.core.secrets import clean

if TYPE_CHECKING:
    from retinue.workspaces.workspace import ChangesFact, Space


class StateFolder:
    """The `.retinue` folder of a project, or a temporary one for a log in memory."""

    def __init__(self, folder: Path | None, *, project: Path) -> None:
        self.temporary = folder is None
        self.folder = folder or Path(tempfile.gettempdir()) / f"retinue-{secrets.token_hex(8)}"
        self.project = str(project)
        self._runs = str(self.folder / "runs")

    @cached_property
    def in_repository(self) -> bool:
        """Whether the project is in a git repository, as far as a look at the folders tells."""
        return any(os.path.lexists(folder / ".git") for folder in (Path(self.project), *Path(self.project).parents))

    def tree_folder(self, tree: str) -> str:
        return f"{self._runs}/{tree}"

    def run_folder(self, tree: str, run: int) -> str:
        return f"{self._runs}/{tree}/{run}"

    def snapshots(self, tree: str) -> str:
        """The shared reference folder of a tree, where runs read what their siblings have left."""
        return f"{self._runs}/{tree}/snapshots"

    def remove_temporary(self) -> None:
        if self.temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


def private_folder(folder: str | Path) -> Path:
    """The folder, made with those above it for nobody but us."""
    path = Path(folder)
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        for parent in reversed(missing):
            parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RetinueError(f"cannot make {path}: {error.strerror or error}") from None
    return path


class RunFolders(msgspec.Struct, eq=False):
    """What one run may touch: it writes `workspace`, reads that and the others among `roots`, nothing else. `space` is
    what the workspace is a copy of, if it is one; `snapshots` is where what the run leaves is put for its siblings."""

    own: str
    path: str
    readable: Sequence[str]
    space: Space | None = None
    snapshots: str = ""
    changes: ChangesFact | None = None
    _made: Path | None = None
    _spilled: int = 0

    @property
    def used(self) -> bool:
        """Whether anything of the run has asked for its workspace."""
        return self._made is not None

    @property
    def workspace(self) -> Path:
        if self._made is None:
            self._made = private_folder(self.path)
        return self._made

    @property
    def searched(self) -> Sequence[Path]:
        copied = None if self.space is None else self.space.source  # its files are in the workspace already
        return (self.workspace, *(Path(path) for path in self.readable if path != copied))

    @property
    def roots(self) -> Sequence[Path]:
        return (self.workspace, *map(Path, self.readable), Path(self.own, "full_logs"))

    def spill(self, name: str) -> Path:
        self._spilled += 1
        return private_folder(f"{self.own}/full_logs") / f"{self._spilled:03d}-{name}"

    def go_on(self) -> None:
        """Files that an earlier process spilled keep their names."""
        folder = Path(self.own, "full_logs")
        self._spilled = len(list(folder.iterdir())) if folder.exists() else 0

    def fitting(self, text: str) -> tuple[str, str]:
        """Text for an event, and the file (named by its hash) that has the whole of it where it had to be cut."""
        if len(text) * 4 <= EVENT_BYTES or len(data := clean(text).encode("utf-8", "replace")) <= EVENT_BYTES:
            return text, ""
        path = private_folder(f"{self.own}/full_logs") / f"{hashlib.sha256(data).hexdigest()}.txt"
        with os.fdopen(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)
        head = data[: EVENT_BYTES - 1024].decode("utf-8", "ignore")
        return f"{head}\n[... {len(data)} bytes in all; whole text in {path} ...]", str(path)


def context_paths(paths: Sequence[str], *, base: str) -> list[str]:
    """Absolute, existing paths; the error names the index and the path."""
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise ConfigError(f"context_paths must be a list, got {type(paths).__name__}")
    found = []
    for index, path in enumerate(paths):
        absolute = Path(base) / path
        if not absolute.exists():
            raise ConfigError(f"context_paths[{index}] does not exist: '{path}'")
        found.append(str(absolute.resolve()))
    return found
