"""Planning how to apply the changes of runs to the current state of a folder: a three-way merge that writes no files.

The folder is read by descriptor, without following links. A file that both sides changed is merged by lines. A file
that cannot be merged is a conflict with a reason, and a plan with a conflict is not carried out.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from retinue.core.errors import RetinueError
from retinue.files.opening import RefusedFile
from retinue.files.reserved import find_git_folder, is_reserved_name, list_all_prefixes
from retinue.files.scratch import make_scratch_folder
from retinue.files.trees import walk_tree
from retinue.workspaces import git
from retinue.workspaces.capture import list_changed_paths, read_current
from retinue.workspaces.store import Files, Import, Store, StoredFile
from retinue.workspaces.walk import EXECUTABLE_MODE, LINK_MODE, PLAIN_MODE, display_path

MERGE_BYTES = 16 * 1024 * 1024
SNIFF_BYTES = 8000


class Change(NamedTuple):
    """One file of the folder: its content before (`old`) and after (`new`) the apply. None means no file."""

    path: str
    old: StoredFile | None
    new: StoredFile | None


class Conflict(NamedTuple):
    """A file that cannot be changed, and the reason."""

    path: str
    why: str


@dataclass
class MergePlan:
    """The planned changes to a folder. `diff` is for the person who approves them, `digest` identifies them."""

    target: str
    changes: list[Change] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    diff: bytes = b""
    digest: str = ""

    def describe_conflicts(self) -> list[str]:
        """Return the conflicts as text, a line for each."""
        return [f"{display_path(conflict.path)}: {conflict.why}" for conflict in self.conflicts]


def plan_changes(target: str, steps: Sequence[tuple[Files, Files]], store: Store) -> MergePlan:
    """Plan the changes of several runs, one after another, to a folder.

    A step is the first and the last state of a workspace."""
    made = MergePlan(target)
    touched = sorted({path for base, end in steps for path in list_changed_paths(base, end)})
    removed = {path for path in touched if all(path not in end for _, end in steps)}
    with Import(store) as into:
        before = {path: _read_file(path, into, made, removed) for path in touched}
    result, lost = dict(before), {conflict.path for conflict in made.conflicts}
    with Import(store) as into:
        merger = _Merger(store, into)
        for base, end in steps:
            for path in list_changed_paths(base, end):
                if path in lost:
                    continue
                merged = merger.merge(base.get(path), result[path], end.get(path))
                if isinstance(merged, str):
                    made.conflicts.append(Conflict(path, merged))
                else:
                    result[path] = merged
        made.changes = [Change(path, before[path], result[path]) for path in touched if before[path] != result[path]]
        ref = f"refs/plans/{secrets.token_hex(8)}"
        for name, files in (("before", before), ("after", result)):
            into.add_tree(f"{ref}/{name}", {path: held for path, held in files.items() if held is not None})
    planned = list_all_prefixes(change.path for change in made.changes if change.new is not None)
    for change in made.changes:
        if why := _explain_refusal(change, target, store, planned):
            made.conflicts.append(Conflict(change.path, why))
    try:
        made.diff = store.diff(f"{ref}/before", f"{ref}/after", "-M")
    finally:
        store.drop_ref(f"{ref}/before")
        store.drop_ref(f"{ref}/after")
    made.digest = hashlib.sha256(repr(made.changes).encode("utf-8", "surrogateescape")).hexdigest()
    return made


def _read_file(path: str, into: Import, made: MergePlan, removed: set[str]) -> StoredFile | None:
    """Store the current content of a file of the target. Returns None if there is no file.

    Adds a conflict if another type of entry is in its place. `removed` are the files that the plan removes."""
    try:
        return read_current(made.target, path, into)
    except RefusedFile as error:
        if error.reason != "folder":
            made.conflicts.append(Conflict(path, "is neither a file nor a folder here"))
        elif not _is_emptied(Path(made.target, path), path, removed):
            made.conflicts.append(Conflict(path, "is a folder here"))
    except OSError as error:
        above = [path[:at] for at, char in enumerate(path) if char == "/"]
        if removed.isdisjoint(above):
            made.conflicts.append(Conflict(path, f"cannot be reached: {error.strerror or error}"))
    return None


def _is_emptied(folder: Path, path: str, removed: set[str]) -> bool:
    """Return True if the plan removes all files below a folder of the target."""
    return all("/".join([path, *visit.steps, name]) in removed for visit in walk_tree(folder) for name in visit.others)


class _Merger:
    """Merges single files. Reads contents from the store and adds merged contents to it."""

    def __init__(self, store: Store, into: Import) -> None:
        self._store = store
        self._into = into
        self._fresh: dict[str, bytes] = {}  # merged contents that are not yet in the store

    def merge(
        self, base: StoredFile | None, here: StoredFile | None, end: StoredFile | None
    ) -> StoredFile | str | None:
        """Return the merged file, or the reason of a conflict as a string."""
        if here in (base, end):
            return end
        if here is None:
            return "was deleted here and changed by the run"
        if end is None:
            return "was changed here and deleted by the run"
        if base is None:
            return "was added here and by the run, with different content"
        if LINK_MODE in (base.mode, here.mode, end.mode):
            return "is a link, and both changed it"
        oid = self._merge_content(base.oid, here.oid, end.oid)
        if oid is None:
            return "was changed here and by the run, in the same lines"
        if not oid:
            return "was changed here and by the run, and is binary or too large to merge"
        return StoredFile(end.mode if end.mode != base.mode else here.mode, oid)

    def _merge_content(self, base: str, here: str, end: str) -> str | None:
        """Return the oid of the merged content, None for a conflict, or "" for binary or too large content."""
        if end in (base, here):
            return here
        if here == base:
            return end
        contents = [self._fresh.get(oid) or self._store.read_content(oid) for oid in (here, base, end)]
        if any(len(content) > MERGE_BYTES or b"\0" in content[:SNIFF_BYTES] for content in contents):
            return ""
        with make_scratch_folder() as folder:
            for name, content in zip(("here", "base", "end"), contents, strict=True):
                Path(folder, name).write_bytes(content)
            words = ("merge-file", "-p", "-q", "here", "base", "end")
            try:
                merged = git.run_in_store(*words, git_dir=self._store.folder, cwd=str(folder))
            except RetinueError:  # the exit code is the number of conflicts
                return None
        oid = self._into.add_bytes(merged)
        self._fresh[oid] = merged
        return oid


def _explain_refusal(change: Change, target: str, store: Store, planned: set[str]) -> str:
    """Return why a change is refused even with approval, or "" if it is allowed.

    Refused are reserved names, files inside a git folder, and links that lead out of the project. `planned` are the
    paths that the plan writes."""
    if not is_allowed_path(change.path):
        return "is a name that no run may write"
    if change.new is None:
        return ""
    if find_git_folder(target, change.path, planned) is not None:
        return "is inside a git folder, which no run may write"
    if change.new.mode == LINK_MODE:
        leads_to = os.fsdecode(store.read_content(change.new.oid))
        inside = os.path.normpath("/".join([*change.path.split("/")[:-1], leads_to])).split("/")
        is_inside = not leads_to.startswith("/") and inside[0] != ".." and not any(map(is_reserved_name, inside))
        return "" if is_inside else f"is a link that leads out of the project, to {display_path(leads_to)}"
    return "" if change.new.mode in (PLAIN_MODE, EXECUTABLE_MODE) else "is neither a file nor a link"


def is_allowed_path(path: str) -> bool:
    """Return True if an apply may write the path: it stays below the folder and has no reserved name."""
    return not any(part in ("", ".", "..") or "\0" in part or is_reserved_name(part) for part in path.split("/"))
