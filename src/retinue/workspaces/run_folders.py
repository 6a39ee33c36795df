"""The folders of runs below the state folder: created on first use, private to the user, removed with a log in memory.

Paths stay strings until something uses them, because most runs never do and a thousand runs should not pay for it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec

from retinue.core.errors import ConfigError, RetinueError
from retinue.core.limits import EVENT_BYTES
from retinue.core.profiles import WorkspaceName
from retinue.core.secrets import clean_text
from retinue.files.opening import RefusedFile, stat_real
from retinue.files.private import make_private_folder, open_private_file, write_private_file
from retinue.files.reserved import find_git_root
from retinue.files.scratch import make_scratch_name
from retinue.files.state_folder import RUNS_FOLDER, find_tree_folder, name_run_folder
from retinue.files.trees import find_last_change, measure_folder, remove_tree, remove_whole_tree
from retinue.workspaces.workspace import ChangesRecord, Workspace

HOST_OUTPUTS = "host_outputs"
NOT_A_REPOSITORY = "workspace 'worktree' needs a git repository, and {project} is in none: use copy"


class StateFolder:
    """The `.retinue` folder of a project, or a temporary folder for a log in memory."""

    def __init__(self, folder: Path | None, *, project: Path) -> None:
        self.temporary = folder is None
        self.folder = folder or Path(tempfile.gettempdir()) / make_scratch_name()
        self.project = str(project)
        self._name = str(self.folder)  # a Path makes its text by a call in Python, each time

    @cached_property
    def in_repository(self) -> bool:
        """Return True if the project seemed to be in a git repository when it was first looked at."""
        return find_git_root(Path(self.project)) is not None

    def require_repository(self) -> None:
        """Raise ConfigError if the project is in no git repository, so that no worktree of it can be made. Looks again
        each time, because a run can make the repository."""
        if find_git_root(Path(self.project)) is None:
            raise ConfigError(NOT_A_REPOSITORY.format(project=self.project))

    def tree_folder(self, tree: str) -> str:
        return f"{self._name}/{RUNS_FOLDER}/{tree}"

    def run_folder(self, tree: str, run: int) -> str:
        return name_run_folder(self._name, tree, run)

    def snapshots(self, tree: str) -> str:
        """Return the shared folder of a tree from which runs read the files of their siblings."""
        return f"{self.tree_folder(tree)}/snapshots"

    def remove_temporary(self) -> None:
        if self.temporary:
            remove_tree(self.folder)


class RunFolders(msgspec.Struct, eq=False, gc=False):
    """The folders of one run. The run writes `workspace`, which is of this `kind`, and reads only `workspace` and the
    other `roots`.

    `granted_paths` are the paths among `readable` that the task names. They were resolved when the task was checked,
    and are never resolved again: another run may have put a link there meanwhile.
    `workspace_copy` describes a copied workspace, and `is_made` is True once the workspace was created. `snapshots`
    holds the run's files for its siblings. `parent` is the RunFolders of the parent run. `hidden_paths` are path
    patterns that searches skip. `starts_from` is the folder whose files a new scratch folder starts with;
    with `moves_start` it becomes the scratch folder."""

    own: str
    path: str
    readable: Sequence[str]
    kind: WorkspaceName = "shared"
    granted_paths: Sequence[str] = ()
    workspace_copy: Workspace | None = None
    snapshots: str = ""
    changes: ChangesRecord | None = None
    parent: RunFolders | None = None
    hidden_paths: Sequence[str] = ()
    starts_from: str = ""
    moves_start: bool = False
    is_made: bool = False
    _made: Path | None = None
    _is_sandboxed: bool = False
    _outputs_user: tuple[int, int] | None = None
    _spilled: int | None = 0  # None if there may be files of an earlier process

    @property
    def is_shared(self) -> bool:
        """Return True if the run works in a folder that is not its own: the project, or the workspace of its parent."""
        return self.kind == "shared"

    @property
    def used(self) -> bool:
        """Return True once the run's workspace was requested."""
        return self._made is not None

    @property
    def workspace(self) -> Path:
        if self._made is None:
            self._made = make_private_folder(self.path)
        return self._made

    def make_named_folder(self) -> None:
        """Create the folder of the workspace, because others are told its path. Does not count as a use of the
        workspace."""
        make_private_folder(self.path)

    def resolve_for_peer(self) -> tuple[str, list[str]]:
        """Return the real paths of the workspace and of the existing folders that the run may read."""
        return os.path.realpath(self.path), self.find_readable_paths()

    def find_readable_paths(self) -> list[str]:
        """Return the real paths of the existing files and folders that the run may read. A granted path that leads over
        a link now is left out."""
        found = []
        for path in self.readable:
            if path in self.granted_paths:
                with suppress(OSError):
                    stat_real(path)
                    found.append(path)
            elif Path(path).exists():
                found.append(os.path.realpath(path))
        return found

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

    def mark_made(self) -> None:
        """Note that the workspace was created."""
        self.is_made = True

    def set_changes(self, changes: ChangesRecord) -> None:
        """Set the record of the run's changes, for its result."""
        self.changes = changes

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
        """Continue the numbering of spilled files, so that the files of an earlier process keep their names."""
        self._spilled = None

    def spill_for_sandbox(self) -> None:
        """Spill future files into a folder that the run's sandbox shows under its real path."""
        self._is_sandboxed, self._spilled = True, None

    def give_outputs(self, user: tuple[int, int]) -> None:
        """Make the sandbox's user the owner of all existing and future spilled files."""
        if user != self._outputs_user:
            for path in self._outputs_folder.iterdir():
                os.chown(path, *user, follow_symlinks=False)
        self._outputs_user = user

    def fit_event_text(self, text: str) -> tuple[str, str]:
        """Return text that fits into an event, and the path of a file with the full text if the text was cut.

        The file is named by the hash of its content."""
        if len(text) * 4 <= EVENT_BYTES or len(data := clean_text(text).encode("utf-8", "replace")) <= EVENT_BYTES:
            return text, ""
        head = data[: EVENT_BYTES - 1024].decode("utf-8", "ignore")
        path = Path(self.own, "full_logs", f"{hashlib.sha256(data).hexdigest()}.txt")
        try:
            make_private_folder(path.parent)
            write_private_file(path, data)
        except (OSError, RetinueError) as error:  # a full disk loses the rest of the text, not the run
            why = getattr(error, "strerror", None) or str(error)
            return f"{head}\n[... {len(data)} bytes in all; the rest is not kept: {why} ...]", ""
        return f"{head}\n[... {len(data)} bytes in all; whole text in {path} ...]", str(path)


def list_tree_folders(state: Path) -> list[str]:
    """Return the ids of the trees that have a folder, whether or not a log has their events."""
    try:
        entries = sorted(Path(state, RUNS_FOLDER).iterdir())
    except OSError:
        return []
    names = [entry.name for entry in entries if entry.is_dir() and not entry.is_symlink()]
    return [name for name in names if find_tree_folder(state, name) is not None]


def is_unchanged_since(state: Path, tree: str, before: float) -> bool:
    """Return True if nothing in the folder of a tree was changed at the time `before` or later. Raises RetinueError if
    a part of the folder cannot be read."""
    folder = find_tree_folder(state, tree)
    try:
        return folder is not None and find_last_change(folder) < before
    except FileNotFoundError:  # another process has just removed it
        return False
    except OSError as error:
        raise RetinueError(f"cannot read {folder}: {error.strerror or error}") from None


def remove_tree_folder(state: Path, tree: str, *, dry_run: bool = False) -> int:
    """Remove the folder of a tree, with the workspaces of its runs. Return the number of bytes that are free again, or
    would be with `dry_run`. Raises RetinueError if a part of the folder remains."""
    folder = find_tree_folder(state, tree)
    if folder is None:
        return 0
    size = measure_folder(folder)
    try:
        if not dry_run:
            remove_whole_tree(folder)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise RetinueError(f"cannot remove {folder}: {error.strerror or error}") from None
    return size


def resolve_context_paths(paths: Sequence[str], *, base: str, follow: bool = True) -> list[str]:
    """Return the paths as absolute, existing paths without links. Raises ConfigError with the index and path of an
    invalid entry. Without `follow`, a path that leads over a link is invalid: a model may have put the link there."""
    if not paths:
        return []
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise ConfigError(f"context_paths must be a list, got {type(paths).__name__}")
    found = []
    for index, path in enumerate(paths):
        absolute = Path(base) / path
        resolved = os.path.realpath(absolute) if follow else os.path.abspath(absolute)  # noqa: PTH100 - keeps links
        try:
            stat_real(resolved)
        except RefusedFile:
            raise ConfigError(f"context_paths[{index}] leads over a symlink: '{path}'") from None
        except OSError:
            raise ConfigError(f"context_paths[{index}] does not exist: '{path}'") from None
        if resolved == "/":
            raise ConfigError(f"context_paths[{index}] is '{path}', which has everything in it: name a folder")
        found.append(resolved)
    return list(dict.fromkeys(found))


def resolve_remaining_paths(paths: Sequence[str], *, base: str) -> list[str]:
    """Return the context paths of an earlier process that still exist and lead over no link."""
    found: list[str] = []
    for path in paths:
        with suppress(ConfigError):
            found += resolve_context_paths([path], base=base, follow=False)
    return found


def is_other_folder(folders: RunFolders, workspace: str) -> bool:
    """Return True if `workspace`, where the log says that the run worked, is an existing folder and not the one of
    `folders`."""
    return workspace != folders.path and Path(workspace).is_dir()
