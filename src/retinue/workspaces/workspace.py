"""A workspace that is a copy of a folder, and the records about it, each a small file in its run's folder.

`workspace.json` is written when the workspace was made, `changes.json` when its run had ended, `applied.json` when its
changes were applied. They are not events: the last one follows the run's ending, after which no event of it is written.
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
    """A workspace that is a copy. `own` is its run's folder, `source` the folder it is a copy of; `source_workspace`
    describes the source if that is such a workspace itself. `continued` is the workspace of the run that its run
    continues: it starts with the files of that one, and its changes include those that were not applied yet. `starts`
    counts the runs that it continues in this way; the state that each of them left is stored with its own."""

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
        """The state up to which the changes of a run that goes on were applied."""
        return f"refs/runs/{self.run}/applied"

    @property
    def now(self) -> str:
        """The state of a run that goes on, when it was last looked at."""
        return f"refs/runs/{self.run}/now"

    @property
    def end(self) -> str:
        return f"refs/runs/{self.run}/end"


class WorkspaceRecord(msgspec.Struct, frozen=True):
    """The way a workspace was made. `objects` are folders that its git reads and a sandbox has to show. Those of
    `foreign_objects` may belong to another repository."""

    kind: str
    path: str
    source: str
    project: str
    objects: tuple[str, ...] = ()
    foreign_objects: tuple[str, ...] = ()
    starts: int = 0


def find_workspace(own: str, tree: str, run: int) -> Workspace | None:
    """Return the workspace that was made for a run; None if it had no copy."""
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
    """Return the kind of the workspace in a run's folder; None if there are no files of it."""
    made = read_record(own, WORKSPACE_FILE, WorkspaceRecord)
    if made is not None:
        return "worktree" if made.kind == "worktree" else "copy"
    return None if is_empty_folder(f"{own}/workspace") else "scratch"


def is_empty_folder(folder: str) -> bool:
    """Tell whether there is nothing in a folder, or no such folder."""
    try:
        return not any(Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return True


class ChangesRecord(msgspec.Struct, frozen=True):
    """The changes of a run in its workspace; `skipped` names what was left out."""

    files: tuple[ChangedFile, ...]
    count: int
    skipped: str = ""


class ApplyRecord(msgspec.Struct, frozen=True):
    """The folder that the changes were applied to, and when."""

    into: str
    at: float
    count: int


def write_record(own: str, name: str, record: msgspec.Struct) -> None:
    """Write a record into the run's folder, in the place of an older one."""
    replace_file(make_private_folder(own) / name, msgspec.json.encode(record))


def read_record(own: str, name: str, kind: type[S]) -> S | None:
    """Read a record of a run; None if there is none."""
    try:
        return msgspec.json.decode(read_small_file(f"{own}/{name}", MAX_RECORD_BYTES), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RetinueError(f"cannot read {own}/{name}: {error}") from None
