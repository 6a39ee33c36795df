"""Copying the entries of a walk into a new folder, within a budget, and hashing the content of each file.

Used for the workspaces of runs and for the folders of a delegated run. Knows nothing of either.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from retinue.core.errors import RetinueError
from retinue.files.content import read_chunks, write_all
from retinue.files.opening import open_folder, open_parent
from retinue.workspaces.store import Contents, Files, StoredFile, add_file
from retinue.workspaces.walk import FolderEntry, Walker, open_entry

PRIVATE_MODES = (0o700, 0o600)
PUBLIC_MODES = (0o755, 0o644)


class BudgetExceeded(RetinueError):
    """A copy that would be too large. `path` is the entry that did not fit into the budget."""

    def __init__(self, reason: Literal["bytes", "files"], path: str) -> None:
        super().__init__(f"more {reason} than may be copied, at {path}")
        self.reason, self.path = reason, path


class CopyBudget:
    """The bytes and entries that one copy, or several together, may use."""

    def __init__(self, max_bytes: int, max_files: int | None = None) -> None:
        self._bytes, self._files = max_bytes, max_files

    def check_bytes(self, size: int, path: str) -> None:
        """Raise BudgetExceeded unless a file of this size fits. Refuses a huge sparse file before reading it."""
        if size > self._bytes:
            raise BudgetExceeded("bytes", path)

    def spend_bytes(self, size: int, path: str) -> None:
        """Count bytes that are about to be written."""
        self.check_bytes(size, path)
        self._bytes -= size

    def spend_entry(self, path: str) -> None:
        """Count a file or folder."""
        if self._files is not None:
            self._files -= 1
            if self._files < 0:
                raise BudgetExceeded("files", path)


class FolderCopier:
    """Copies entries into `target`, a folder that only we use so far, and adds file contents to `contents`.

    `modes` holds the mode of folders and executable files, then the mode of other files."""

    def __init__(
        self, target: str, contents: Contents, budget: CopyBudget, *, modes: tuple[int, int] = PRIVATE_MODES
    ) -> None:
        self._target = target
        self._contents = contents
        self._budget = budget
        self._modes = modes
        self.folders: set[str] = set()

    def copy(self, walker: Walker) -> Files:
        """Copy the entries of the walk. Returns the files that are not ignored. Adds new folders to `folders`."""
        files: Files = {}
        top = open_folder(self._target)
        try:
            for entry in walker.walk_entries():
                self._budget.spend_entry(entry.path)
                stored = self._copy_entry(entry, top, walker)
                if stored is not None and not entry.ignored:
                    files[entry.path] = stored
        finally:
            os.close(top)
        for path in walker.skip_hard_linked():
            files.pop(path, None)
            Path(self._target, path).unlink(missing_ok=True)
        return files

    def copy_file(self, source: int, name: str) -> None:
        """Copy one open file into the target, as `name`."""
        folder = open_folder(self._target)
        try:
            self._budget.spend_entry(name)
            os.close(self._copy_content(source, folder, name, name))
        finally:
            os.close(folder)

    def _copy_entry(self, entry: FolderEntry, top: int, walker: Walker) -> StoredFile | None:
        with open_parent(top, entry.path) as (folder, name):
            if entry.is_folder:
                os.mkdir(name, self._modes[0], dir_fd=folder)
                os.chmod(name, self._modes[0], dir_fd=folder)  # the umask may have taken bits away
                self.folders.add(entry.path)
                return None
            try:
                source = -1 if entry.is_link else open_entry(entry)
                target = os.readlink(entry.name, dir_fd=entry.folder) if entry.is_link else ""
            except OSError as error:  # swapped, gone, or without read permission
                walker.skip(entry.path, error.strerror or str(error))
                return None
            if entry.is_link:
                os.symlink(target, name, dir_fd=folder)
                return StoredFile(entry.mode, self._contents.add_bytes(os.fsencode(target)))
            try:
                return StoredFile(entry.mode, self._store_copy(entry, source, folder, name))
            finally:
                os.close(source)

    def _store_copy(self, entry: FolderEntry, source: int, folder: int, name: str) -> str:
        """Copy a file and store the content of the copy. Returns the content's oid, or "" for an ignored file."""
        copy = self._copy_content(source, folder, name, entry.path)
        try:
            os.utime(copy, ns=(entry.status.st_atime_ns, entry.status.st_mtime_ns))
            return "" if entry.ignored else add_file(self._contents, copy)
        finally:
            os.close(copy)

    def _copy_content(self, source: int, folder: int, name: str, path: str) -> int:
        """Copy an open file and return a descriptor of the copy."""
        status = os.fstat(source)
        self._budget.check_bytes(status.st_size, path)
        mode = self._modes[0] if status.st_mode & 0o100 else self._modes[1]
        copy = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder)
        try:
            os.fchmod(copy, mode)
            for chunk in read_chunks(source):
                self._budget.spend_bytes(len(chunk), path)
                write_all(copy, chunk)
        except BaseException:
            os.close(copy)
            raise
        return copy
