"""The folders of runs below the state folder: made when first used, private to the user, removed with a log in memory.

Paths are kept as text until something touches them: most runs never do, and a thousand runs should not pay for it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from retinue.core.errors import ConfigError, RetinueError
from retinue.core.limits import EVENT_BYTES
from retinue.core.secrets import clean_text
from retinue.files.private import make_private_folder, open_private_file, write_private_file
from retinue.files.scratch import make_scratch_name
from retinue.files.trees import remove_tree
from retinue.workspaces.workspace import ChangesRecord, Workspace

HOST_OUTPUTS = "host_outputs"


class StateFolder:
    """The `.retinue` folder of a project, or a temporary one for a log in memory."""

    def __init__(self, folder: Path | None, *, project: Path) -> None:
        self.temporary = folder is None
        self.folder = folder or Path(tempfile.gettempdir()) / make_scratch_name()
        self.project = str(project)
        self._runs = str(self.folder / "runs")

    @cached_property
    def in_repository(self) -> bool:
        """Tell whether the project seems to be in a git repository: whether a folder above it has a `.git`."""
        return any(os.path.lexists(folder / ".git") for folder in (Path(self.project), *Path(self.project).parents))

    def tree_folder(self, tree: str) -> str:
        return f"{self._runs}/{tree}"

    def run_folder(self, tree: str, run: int) -> str:
        return f"{self._runs}/{tree}/{run}"

    def snapshots(self, tree: str) -> str:
        """Return the shared folder of a tree in which runs read what their siblings left."""
        return f"{self._runs}/{tree}/snapshots"

    def remove_temporary(self) -> None:
        if self.temporary:
            remove_tree(self.folder)


class RunFolders(msgspec.Struct, eq=False, gc=False):
    """The folders of one run: it writes `workspace`, reads that and the other `roots`, and nothing else.

    `workspace_copy` describes a workspace that is a copy, and `is_made` says that it has been made; `snapshots` is
    where the run's files go for its siblings. `parent` are the folders of the run above. `hidden_paths` are patterns of
    paths that searches leave out. `starts_from` is the scratch folder whose files a scratch folder starts with."""

    own: str
    path: str
    readable: Sequence[str]
    workspace_copy: Workspace | None = None
    snapshots: str = ""
    changes: ChangesRecord | None = None
    parent: RunFolders | None = None
    hidden_paths: Sequence[str] = ()
    starts_from: str = ""
    is_made: bool = False
    _made: Path | None = None
    _is_sandboxed: bool = False
    _outputs_user: tuple[int, int] | None = None
    _spilled: int | None = 0  # None where files of an earlier process may be

    @property
    def is_shared(self) -> bool:
        """True if the run works in a folder that is not its own: the project, or the workspace of its parent."""
        return self.path != f"{self.own}/workspace"

    @property
    def used(self) -> bool:
        """True once anything of the run has asked for its workspace."""
        return self._made is not None

    @property
    def workspace(self) -> Path:
        if self._made is None:
            self._made = make_private_folder(self.path)
        return self._made

    @property
    def search_roots(self) -> Sequence[Path]:
        # The files of a copy's source are in the workspace already.
        source = None if self.workspace_copy is None else self.workspace_copy.source
        return (self.workspace, *(Path(path) for path in self.readable if path != source))

    @property
    def roots(self) -> Sequence[Path]:
        return (self.workspace, *map(Path, self.readable), self._outputs_folder)

    @property
    def _outputs_folder(self) -> Path:
        if self._is_sandboxed:
            return Path(os.path.realpath(self.own), HOST_OUTPUTS)
        return Path(self.own, "full_logs")

    def spill(self, name: str) -> Path:
        folder = make_private_folder(self._outputs_folder)
        self._spilled = 1 + (len(list(folder.iterdir())) if self._spilled is None else self._spilled)
        path = folder / f"{self._spilled:03d}-{name}"
        if self._outputs_user is not None:
            fd = open_private_file(path, exclusive=True)
            try:
                os.fchown(fd, *self._outputs_user)
            finally:
                os.close(fd)
        return path

    def resume_spilling(self) -> None:
        """Continue the numbering of spilled files, so that those of an earlier process keep their names."""
        self._spilled = None

    def spill_for_sandbox(self) -> None:
        """Spill into a folder that the run's sandbox shows under its real path, from now on."""
        self._is_sandboxed, self._spilled = True, None

    def give_outputs(self, user: tuple[int, int]) -> None:
        """Let the user of the sandbox read what was and will be spilled."""
        if user != self._outputs_user:
            for path in self._outputs_folder.iterdir():
                os.chown(path, *user, follow_symlinks=False)
        self._outputs_user = user

    def fit_event_text(self, text: str) -> tuple[str, str]:
        """Return text that fits an event, and the file (named by its hash) with all of it if it had to be cut."""
        if len(text) * 4 <= EVENT_BYTES or len(data := clean_text(text).encode("utf-8", "replace")) <= EVENT_BYTES:
            return text, ""
        head = data[: EVENT_BYTES - 1024].decode("utf-8", "ignore")
        path = Path(self.own, "full_logs", f"{hashlib.sha256(data).hexdigest()}.txt")
        try:
            make_private_folder(path.parent)
            write_private_file(path, data)
        except (OSError, RetinueError) as error:  # a full disk costs the rest of the text, not the run
            why = getattr(error, "strerror", None) or str(error)
            return f"{head}\n[... {len(data)} bytes in all; the rest is not kept: {why} ...]", ""
        return f"{head}\n[... {len(data)} bytes in all; whole text in {path} ...]", str(path)


def resolve_context_paths(paths: Sequence[str], *, base: str) -> list[str]:
    """Return absolute, existing paths; the error names the index and the path."""
    if not paths:
        return []
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise ConfigError(f"context_paths must be a list, got {type(paths).__name__}")
    found = []
    for index, path in enumerate(paths):
        absolute = Path(base) / path
        if not absolute.exists():
            raise ConfigError(f"context_paths[{index}] does not exist: '{path}'")
        resolved = str(absolute.resolve())
        if resolved == "/":
            raise ConfigError(f"context_paths[{index}] is '{path}', which has everything in it: name a folder")
        found.append(resolved)
    return found
