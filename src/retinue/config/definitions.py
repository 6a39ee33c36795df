"""Folders with a definition file in each subfolder: SUBAGENT.md of a profile, SKILL.md of a skill.

A project's definition replaces a built-in one of the same name, ignoring case.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from retinue.config.files import exists, list_subfolders, read_text
from retinue.config.located import Node
from retinue.config.ownership import check_owners_between

T = TypeVar("T")
Parse = Callable[[str, str, str], tuple[Node, T]]
BUILT_IN = "built in"


def find_definitions(built_in: Path, own: Path, name: str, *, project: Path | None, parse: Parse[T]) -> list[T]:
    """Return the definitions in the files `name` below the folder `built_in` and below the folder `own` of a project,
    sorted. `parse` returns the name and the definition in a text; it also gets the path of the file, and its source for
    people."""
    found = _read_folder(built_in, name, None, parse)
    if project is not None:
        found |= _read_folder(project / own, name, project, parse)
    return [found[key][1] for key in sorted(found)]


def _read_folder(folder: Path, name: str, project: Path | None, parse: Parse[T]) -> dict[str, tuple[Node, T]]:
    """Return the definitions of one folder. The files of a `project` must not belong to another user."""
    found: dict[str, tuple[Node, T]] = {}
    for path in (entry / name for entry in list_subfolders(folder)):
        if not exists(path):
            continue
        if project is not None:
            check_owners_between(project, path)
        source = BUILT_IN if project is None else path.relative_to(project).as_posix()
        parsed = parse(read_text(path, follow=False), str(path), source)
        node = parsed[0]
        other, _ = found.setdefault(node.text().casefold(), parsed)
        if other is not node:
            raise node.error(f"'{node.value}' is also the name in {other.place.file}")
    return found
