"""The files of a folder as they are now, by name, mode and content, and how they differ from what they were.

The folder belongs to a run: it is walked as a foreign one, and what cannot be looked at counts as unchanged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from retinue.core.limits import MIB, WORKSPACE_MIB
from retinue.core.results import ChangedFile
from retinue.files.opening import open_parent, open_regular_file
from retinue.files.reserved import list_all_prefixes
from retinue.workspaces.store import Contents, Files, StoredFile, add_file
from retinue.workspaces.walk import HARD_LINKED, LINK_MODE, FolderEntry, Walker, display_path, open_entry

MAX_CHANGED_BYTES = WORKSPACE_MIB * MIB


@dataclass
class Captured:
    """The files and folders of a folder. An unreadable one has the files of before, and its folders are `unseen`."""

    files: Files = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    unseen: set[str] = field(default_factory=set)

    def is_unseen(self, path: str) -> bool:
        """Tell whether a path, or a folder above it, could not be looked at."""
        return bool(self.unseen) and not self.unseen.isdisjoint(list_all_prefixes([path]))


def capture_folder(walker: Walker, contents: Contents, before: Files) -> Captured:
    """Walk a folder and store the contents of its files. `before` are the files it had when its run began."""
    captured = Captured(unseen=walker.unseen)
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
    for path in walker.list_hard_linked():
        walker.skip(path, HARD_LINKED)
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
    """Store an open file and close it."""
    try:
        mode = "100755" if os.fstat(fd).st_mode & 0o100 else "100644"
        return StoredFile(mode, add_file(contents, fd))
    finally:
        os.close(fd)


def read_current(root: str | int, path: str, contents: Contents) -> StoredFile | None:
    """Store one file or link of a folder as it is now; None if there is none.

    Raises OSError for anything else of that name, or if a link or a file stands where a folder should be."""
    try:
        with open_parent(root, path) as (folder, name):
            return read_current_at(folder, name, contents)
    except FileNotFoundError:
        return None


def read_current_at(folder: int, name: str, contents: Contents) -> StoredFile:
    """Store one file or link of an open folder as it is now."""
    try:
        target = os.readlink(name, dir_fd=folder)
    except OSError:  # no link: a file, or nothing
        return _store_file(open_regular_file(name, dir_fd=folder), contents)
    return StoredFile(LINK_MODE, contents.add_bytes(os.fsencode(target)))


def list_changed_paths(base: Files, end: Files) -> list[str]:
    """Return the paths of the files that differ, by name."""
    return [path for path in sorted(base.keys() | end.keys()) if base.get(path) != end.get(path)]


def describe_change(path: str, base: Files, end: Files) -> ChangedFile:
    """Return a changed file as results list it."""
    status = "added" if path not in base else "deleted" if path not in end else "modified"
    return ChangedFile(status, display_path(path))
