"""A workspace that is a copy of a folder, and its records, each a small file in the run's folder.

`workspace.json` is written when the workspace was created, `changes.json` when the run has ended, `applied.json` when
the changes were applied. The records are not events, because an apply follows the end of the run, and an ended run
gets no more events.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from retinue.core.errors import RetinueError
from retinue.core.profiles import WorkspaceName
from retinue.core.results import ChangedFile
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.files.private import make_private_folder

WORKSPACE_FILE, CHANGES_FILE, APPLIED_FILE = "workspace.json", "changes.json", "applied.json"
MAX_RECORD_BYTES = 256 * 1024 * 1024
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Workspace:
    """A workspace that is a copy.

    `own` is the run's folder, `source` the copied folder. `source_workspace` describes the source if it is a copied
    workspace too. `continued` is the workspace of the run that this run continues: this workspace starts with its
    files, and its unapplied changes count as changes here. `starts` is the number of runs continued in this way; the
    state that each of them left is stored too."""

    kind: str
    tree: str
    run: int
    own: str
    path: str
    source: str
    project: str
    source_workspace: Workspace | None = None
    continued: Workspace | None = None
    starts: int = 0

    @property
    def base(self) -> str:
        return f"refs/runs/{self.run}/base"

    def start(self, index: int) -> str:
        return f"refs/runs/{self.run}/start-{index}"

    @property
    def last_apply(self) -> str:
        """Return the ref of the state that was last applied before the run ended."""
        return f"refs/runs/{self.run}/applied"

    @property
    def now(self) -> str:
        """Return the ref of the state that was last recorded before the run ended."""
        return f"refs/runs/{self.run}/now"

    @property
    def end(self) -> str:
        return f"refs/runs/{self.run}/end"


class WorkspaceRecord(msgspec.Struct, frozen=True):
    """The record of how a workspace was created.

    `objects` lists folders that the workspace's git reads and a sandbox has to mount. Of these, `foreign_objects` may
    belong to another repository."""

    kind: str
    path: str
    source: str
    project: str
    objects: tuple[str, ...] = ()
    foreign_objects: tuple[str, ...] = ()
    starts: int = 0


def find_workspace(own: str, tree: str, run: int) -> Workspace | None:
    """Return the copied workspace of a run, or None if the run had none."""
    made = read_record(own, WORKSPACE_FILE, WorkspaceRecord)
    if made is None:
        return None
    return Workspace(
        kind=made.kind,
        tree=tree,
        run=run,
        own=own,
        path=made.path,
        source=made.source,
        project=made.project,
        starts=made.starts,
    )


def find_workspace_kind(own: str) -> WorkspaceName | None:
    """Return the kind of the workspace in a run's folder, or None if the workspace has no files."""
    made = read_record(own, WORKSPACE_FILE, WorkspaceRecord)
    if made is not None:
        return "worktree" if made.kind == "worktree" else "copy"
    return None if is_empty_folder(f"{own}/workspace") else "scratch"


def is_empty_folder(folder: str) -> bool:
    """Return True if a folder is empty or does not exist."""
    try:
        return not any(Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return True


class ChangesRecord(msgspec.Struct, frozen=True):
    """The changes of a run in its workspace. `skipped` lists the entries that were not compared."""

    files: tuple[ChangedFile, ...]
    count: int
    skipped: str = ""


class ApplyRecord(msgspec.Struct, frozen=True):
    """The folder to which the changes were applied, and the time."""

    into: str
    at: float
    count: int


def write_record(own: str, name: str, record: msgspec.Struct) -> None:
    """Write a record into the run's folder, replacing an older record."""
    replace_file(make_private_folder(own) / name, msgspec.json.encode(record))


def read_record(own: str, name: str, kind: type[S]) -> S | None:
    """Return a record of a run, or None if there is none."""
    try:
        return msgspec.json.decode(read_small_file(f"{own}/{name}", MAX_RECORD_BYTES), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RetinueError(f"cannot read {own}/{name}: {error}") from None
