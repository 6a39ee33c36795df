"""The current files of a folder by name, mode and content, and their differences from an earlier state.

The folder belongs to a run, so it is walked as `foreign`. Entries that cannot be read count as unchanged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from retinue.core.limits import MIB, WORKSPACE_MIB
from retinue.core.results import ChangedFile
from retinue.files.opening import open_parent, open_regular_file
from retinue.files.reserved import list_all_prefixes
from retinue.workspaces.store import Contents, Files, StoredFile, add_file
from retinue.workspaces.walk import (
    LINK_MODE,
    FolderEntry,
    Walker,
    display_path,
    find_file_mode,
    open_entry,
)

MAX_CHANGED_BYTES = WORKSPACE_MIB * MIB


@dataclass
class FolderState:
    """The files and folders of a folder. Unreadable entries keep their earlier files; their paths are in `unseen`."""

    files: Files = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    unseen: set[str] = field(default_factory=set)

    def is_unseen(self, path: str) -> bool:
        """Return True if the path, or a folder above it, could not be read."""
        return bool(self.unseen) and not self.unseen.isdisjoint(list_all_prefixes([path]))


def capture_folder(walker: Walker, contents: Contents, before: Files) -> FolderState:
    """Walk a folder and store the contents of its files. `before` holds the files it had when the run began."""
    captured = FolderState(unseen=walker.unseen)
    left = MAX_CHANGED_BYTES
    for entry in walker.walk_entries():
        if entry.is_folder:
            captured.folders.add(entry.path)
            continue
        try:
            if entry.path not in before:
                left -= entry.status.st_size
            if left < 0 or entry.status.st_size > MAX_CHANGED_BYTES:
                raise OSError(None, "too large")
            captured.files[entry.path] = _store_entry(entry, contents)
        except OSError as error:
            walker.skip(entry.path, error.strerror or str(error))
    for path in walker.skip_hard_linked():
        captured.files.pop(path, None)
    for path in before.keys() - captured.files.keys():
        if captured.is_unseen(path):
            captured.files[path] = before[path]
    return captured


def _store_entry(entry: FolderEntry, contents: Contents) -> StoredFile:
    if entry.is_link:
        return StoredFile(entry.mode, contents.add_bytes(os.fsencode(os.readlink(entry.name, dir_fd=entry.folder))))
    return _store_file(open_entry(entry), contents)


def _store_file(fd: int, contents: Contents) -> StoredFile:
    """Store the content of an open file and close the descriptor."""
    try:
        return StoredFile(find_file_mode(os.fstat(fd)), add_file(contents, fd))
    finally:
        os.close(fd)


def read_current(root: str | int, path: str, contents: Contents) -> StoredFile | None:
    """Store the current content of a file or link. Returns None if there is no such entry.

    Raises OSError for any other type of entry, or if a component of the path is a link or a file."""
    try:
        with open_parent(root, path) as (folder, name):
            return read_current_at(folder, name, contents)
    except FileNotFoundError:
        return None


def read_current_at(folder: int, name: str, contents: Contents) -> StoredFile:
    """Store the current content of a file or link in an open folder."""
    try:
        target = os.readlink(name, dir_fd=folder)
    except OSError:  # not a link: a file, or no entry at all
        return _store_file(open_regular_file(name, dir_fd=folder), contents)
    return StoredFile(LINK_MODE, contents.add_bytes(os.fsencode(target)))


def list_changed_paths(base: Files, end: Files) -> list[str]:
    """Return the sorted paths of the files that differ."""
    return [path for path in sorted(base.keys() | end.keys()) if base.get(path) != end.get(path)]


def describe_change(path: str, base: Files, end: Files) -> ChangedFile:
    """Return the entry for a changed file in a run's result."""
    status = "added" if path not in base else "deleted" if path not in end else "modified"
    return ChangedFile(status, display_path(path))
