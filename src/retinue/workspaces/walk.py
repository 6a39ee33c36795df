"""Walking a folder that others may be changing: every step by descriptor, without following links or blocking.

Paths are relative to the folder. They are strings in which undecodable bytes survive (`os.fsencode`).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from retinue.core.errors import RetinueError
from retinue.files.atomic import is_temporary_name
from retinue.files.opening import FileId, open_folder, open_regular_file
from retinue.files.reserved import is_reserved_name
from retinue.files.state_owner import is_state_listing

DEEPEST = 256
MOST = 1_000_000
LISTED = 20
# How git writes modes.
LINK_MODE, EXECUTABLE_MODE, PLAIN_MODE = "120000", "100755", "100644"
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class FolderEntry(NamedTuple):
    """A file, folder or link. `folder` and `name` serve to open the entry, until the walk yields the next entry."""

    path: str
    status: os.stat_result
    folder: int
    name: str
    ignored: bool

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.status.st_mode)

    @property
    def mode(self) -> str:
        """Return the mode as git writes it."""
        return LINK_MODE if self.is_link else find_file_mode(self.status)


def find_file_mode(status: os.stat_result) -> str:
    """Return the mode of a regular file as git writes it."""
    return EXECUTABLE_MODE if status.st_mode & 0o100 else PLAIN_MODE


@dataclass
class Skipped:
    """The entries that a walk skipped, with reasons. All are counted; only the first are listed."""

    count: int = 0
    listed: list[str] = field(default_factory=list)

    def add(self, path: str, why: str) -> None:
        self.count += 1
        if len(self.listed) < LISTED:
            self.listed.append(f"{display_path(path)} ({why})")

    def __str__(self) -> str:
        more = f" and {self.count - len(self.listed)} more" if self.count > len(self.listed) else ""
        return ", ".join(self.listed) + more


def display_path(path: str) -> str:
    """Return a path for people and for JSON, with undecodable bytes escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


class Walker:
    """One walk through a folder, given as a path or a descriptor.

    `foreign` means that a run could write there: hard-linked files and entries on another file system are skipped. If
    it is False, our own state folders are skipped under any name. Symlinks are skipped unless `links` is set. Folders
    in `never` are always skipped. `skipped` collects skipped entries with reasons. `unseen` holds paths below which
    nothing is known."""

    def __init__(
        self,
        root: str | int,
        *,
        ignored: Callable[[FolderEntry], bool] = lambda _: False,
        inside_ignored: bool = False,
        foreign: bool = False,
        links: bool = True,
        never: Collection[FileId] = (),
        stop: threading.Event | None = None,
    ) -> None:
        self.skipped = Skipped()
        self.unseen: set[str] = set()
        self._root = root
        self._ignored = ignored
        self._inside_ignored = inside_ignored
        self._foreign = foreign
        self._with_links = links
        self._never = never
        self._stop = stop
        self._links: dict[tuple[int, int], tuple[int, list[str]]] = {}
        self._device = self._seen = 0

    def walk_entries(self) -> Iterator[FolderEntry]:
        """Yield the entries, each folder before its content, sorted by name but with `.gitignore` first."""
        try:
            top = os.dup(self._root) if isinstance(self._root, int) else open_folder(self._root)
        except OSError as error:
            raise RetinueError(f"cannot look into {self._name}: {error.strerror or error}") from None
        try:
            self._device = os.fstat(top).st_dev
            yield from self._walk_folder(top, "", 0, False)
        finally:
            os.close(top)

    @property
    def _name(self) -> str:
        return "the folder" if isinstance(self._root, int) else display_path(self._root)

    def skip(self, path: str, why: str) -> None:
        """Skip an entry and everything below it."""
        self.skipped.add(path, why)
        self.unseen.add(path)

    def skip_hard_linked(self) -> list[str]:
        """Skip the files with another hard link outside the folder, and return them. Complete only after the walk."""
        found = [path for links, paths in self._links.values() if links > len(paths) for path in paths]
        for path in found:
            self.skip(path, "also a file elsewhere, by a hard link")
        return found

    def _walk_folder(self, folder: int, above: str, depth: int, ignored: bool) -> Iterator[FolderEntry]:
        names = sorted(os.listdir(folder), key=lambda name: (name != ".gitignore", name))
        if not self._foreign and is_state_listing(names):
            self.unseen.add(above.rstrip("/"))
            return
        for name in names:
            if self._stop is not None and self._stop.is_set():
                raise RetinueError("stopped")
            path = f"{above}{name}"
            if is_reserved_name(name) or is_temporary_name(name):
                continue
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            self._seen += 1
            if self._seen > MOST:
                raise RetinueError(f"{self._name} holds more than {MOST:,} files and folders")
            entry = FolderEntry(path=path, status=status, folder=folder, name=name, ignored=ignored)
            if not self._is_wanted(entry):
                continue
            if not ignored and self._ignored(entry):
                entry = entry._replace(ignored=True)
            if entry.ignored and not self._inside_ignored:
                continue
            yield entry
            if entry.is_folder:
                yield from self._walk_subfolder(entry, depth)

    def _is_wanted(self, entry: FolderEntry) -> bool:
        kind = stat.S_IFMT(entry.status.st_mode)
        if kind in _KINDS:
            self.skip(entry.path, _KINDS[kind])
            return False
        if entry.is_link and not self._with_links:
            self.skip(entry.path, "a link")
            return False
        if entry.is_folder and (entry.status.st_dev, entry.status.st_ino) in self._never:
            self.unseen.add(entry.path)
            return False
        if self._foreign and entry.status.st_dev != self._device:
            self.skip(entry.path, "on another file system")
            return False
        if self._foreign and kind == stat.S_IFREG and entry.status.st_nlink > 1:
            key = (entry.status.st_dev, entry.status.st_ino)
            self._links.setdefault(key, (entry.status.st_nlink, []))[1].append(entry.path)
        return True

    def _walk_subfolder(self, entry: FolderEntry, depth: int) -> Iterator[FolderEntry]:
        if depth >= DEEPEST:
            self.skip(entry.path, "nested too deeply")
            return
        try:
            inner = open_folder(entry.name, dir_fd=entry.folder)
        except OSError as error:  # swapped, gone, or without read permission
            self.skip(entry.path, error.strerror or str(error))
            return
        try:
            if not os.path.samestat(os.fstat(inner), entry.status):
                self.skip(entry.path, "changed while it was looked at")
                return
            yield from self._walk_folder(inner, f"{entry.path}/", depth + 1, entry.ignored)
        finally:
            os.close(inner)


def open_entry(entry: FolderEntry) -> int:
    """Open the listed file. Raises OSError if another file has its name by now."""
    fd = open_regular_file(entry.name, dir_fd=entry.folder)
    if not os.path.samestat(os.fstat(fd), entry.status):
        os.close(fd)
        raise OSError(None, "changed while it was looked at")
    return fd
