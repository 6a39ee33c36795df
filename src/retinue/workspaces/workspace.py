"""A workspace that is a copy of a folder, and its records, each a small file in the run's folder.

`workspace.json` is written when the workspace was created, `changes.json` when the run has ended, `applied.json` when
the changes were applied. The records are not events, because an apply follows the end of the run, and an ended run
gets no more events.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from retinue.core.errors import RetinueError
from retinue.core.profiles import WorkspaceName
from retinue.core.results import ChangedFile
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.files.private import make_private_folder

MAX_RECORD_BYTES = 256 * 1024 * 1024


class Workspace(msgspec.Struct, frozen=True):
    """A workspace that is a copy, planned or created.

    `own` is the run's folder, `source` the copied folder. `source_workspace` describes the source if it is a copied
    workspace too. `continued` is the workspace of the run that this run continues: this workspace starts with its
    files, and its unapplied changes count as changes here.

    The rest is known once the workspace was created. `starts` is the number of runs continued in this way; the state
    that each of them left is stored too. `objects` lists folders that the workspace's git reads and a sandbox has to
    mount. Of these, `foreign_objects` may belong to another repository."""

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
    objects: tuple[str, ...] = ()
    foreign_objects: tuple[str, ...] = ()

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


def find_workspace(own: str, tree: str, run: int) -> Workspace | None:
    """Return the copied workspace of a run, or None if the run had none. The project, and `own` with it, may have been
    moved since the workspace was created."""
    made = read_record(own, Workspace)
    return None if made is None else msgspec.structs.replace(made, tree=tree, run=run, own=own)


def find_workspace_kind(own: str) -> WorkspaceName | None:
    """Return the kind of the workspace in a run's folder, or None if the workspace has no files."""
    made = read_record(own, Workspace)
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


Record = TypeVar("Record", Workspace, ChangesRecord, ApplyRecord)
_FILES = {Workspace: "workspace.json", ChangesRecord: "changes.json", ApplyRecord: "applied.json"}


def write_record(own: str, record: Record) -> None:
    """Write a record into the run's folder, replacing an older record."""
    replace_file(make_private_folder(own) / _FILES[type(record)], msgspec.json.encode(record))


def read_record(own: str, kind: type[Record]) -> Record | None:
    """Return a record of a run, or None if there is none."""
    file = f"{own}/{_FILES[kind]}"
    try:
        return msgspec.json.decode(read_small_file(file, MAX_RECORD_BYTES), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RetinueError(f"cannot read {file}: {error}") from None


def remove_record(own: str, kind: type[Record]) -> None:
    """Remove a record of a run, if there is one."""
    Path(own, _FILES[kind]).unlink(missing_ok=True)
