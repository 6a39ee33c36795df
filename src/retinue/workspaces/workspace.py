"""One workspace that is a copy of a folder, and the facts about it, each a small file in its run's folder.

`space.json` is written when it was made, `changes.json` when its run had ended, `applied.json` when its changes were
taken over. They are no events: the last of them comes after the run's ending, after which nothing is written of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from retinue.core.errors import RetinueError
from retinue.core.results import ChangedFile
from retinue.workspaces.run_folders import private_folder

SPACE, CHANGES, APPLIED = "space.json", "changes.json", "applied.json"
S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class Space:
    """A workspace that is a copy. `own` is its run's folder, `source` the folder it starts from; `begun` is the space
    that the source is itself, if it is one."""

    kind: str
    tree: str
    run: int
    own: str
    path: str
    source: str
    project: str
    begun: Space | None = None

    @property
    def base(self) -> str:
        return f"refs/runs/{self.run}/base"

    @property
    def end(self) -> str:
        return f"refs/runs/{self.run}/end"


class SpaceFact(msgspec.Struct, frozen=True):
    """How a workspace was made. `objects` are folders that its git reads, and that a wall has to show it."""

    kind: str
    path: str
    source: str
    project: str
    objects: tuple[str, ...] = ()


class ChangesFact(msgspec.Struct, frozen=True):
    """What its run changed in it; `skipped` was left out of that."""

    files: tuple[ChangedFile, ...]
    count: int
    skipped: str = ""


class AppliedFact(msgspec.Struct, frozen=True):
    """Where and when the changes were taken over."""

    into: str
    at: float
    count: int


def write_fact(own: str, name: str, fact: msgspec.Struct) -> None:
    path = private_folder(own) / name
    temporary = path.with_name(f".{name}.new")
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
        file.write(msgspec.json.encode(fact))
    temporary.replace(path)


def read_fact(own: str, name: str, kind: type[S]) -> S | None:
    try:
        return msgspec.json.decode(Path(own, name).read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RetinueError(f"cannot read {own}/{name}: {error}") from None
