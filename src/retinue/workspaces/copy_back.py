"""Brings back into a folder of theirs what a run has changed in our copy of it: each file whole, and nothing else.

First it is found out what that is, then it is done: what is gone is removed, what is new or other is renamed into its
place. Others work in that folder too. What only they have changed stays as they left it; what both have changed is as
the run left it, and told; what they have changed and the run has removed is kept, and told.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from retinue.files.failpoints import reach_failpoint
from retinue.workspaces.copy_in import (
    DEEPEST,
    FILE,
    FOLDER,
    Copier,
    Outside,
    Taken,
    Was,
    about,
    is_one_of,
    listed,
    mark,
    opened,
)

WRITTEN = "what the run has written"
TRIES = 20
SHOWN = 10
BOTH = "changed by this run and by somebody else meanwhile, and now as this run left them: {files}"
KEPT = "removed by this run, but changed by somebody else meanwhile, and so kept: {files}"
BLOCKED = "not brought back, as something else stands there or it cannot be read or written: {files}"
SKIPPED = "{count} links or other things that are no plain files were not brought back"


class Return:
    """One workspace on its way back. `owner` is whose the files become."""

    def __init__(self, taken: Taken, *, copier: Copier, owner: tuple[int, int] | None) -> None:
        self._taken, self._copier, self._owner = taken, copier, owner
        self._gone = dict(taken)
        self._changed: list[str] = []
        self._folders: list[str] = []
        self._bytes = 0
        self._both: list[str] = []
        self._kept: list[str] = []
        self._blocked: list[str] = []
        self._skipped = 0

    def give(self, source: int, target: int) -> None:
        """Outside, before anything is done, when it is too much."""
        self._look(source, "")
        for path in sorted(self._gone, reverse=True):  # what is in a folder before the folder
            self._try(path, partial(self._remove, target, self._gone[path]))
        for path in self._folders:
            self._try(path, partial(self._make, target))
        for path in self._changed:
            self._try(path, partial(self._bring, source, target))

    def notes(self) -> list[str]:
        """What the one who asked should know of it."""
        told = [
            text.format(files=_named(paths))
            for text, paths in ((BOTH, self._both), (KEPT, self._kept), (BLOCKED, self._blocked))
            if paths
        ]
        return [*told, SKIPPED.format(count=self._skipped)] if self._skipped else told

    def _look(self, source: int, path: str) -> None:
        """Finds out what is new, other and gone."""
        if path.count("/") > DEEPEST:
            raise Outside(f"{WRITTEN} is nested deeper than {DEEPEST} folders")
        for name in listed(source):
            status, place = about(source, name), f"{path}{name}"
            if status is None:
                continue
            folder = stat.S_ISDIR(status.st_mode)
            was = self._taken.get(place)
            same = was is not None and (was.ours is None) is folder
            if same or not (folder or stat.S_ISREG(status.st_mode)):
                self._gone.pop(place, None)
            if folder:
                self._copier.count(WRITTEN)
                if not same:
                    self._folders.append(place)
                self._look_below(source, name, place)
            elif not stat.S_ISREG(status.st_mode):
                self._skipped += 1
            elif was is None or was.ours != mark(status):
                self._copier.count(WRITTEN)
                self._bytes += status.st_size
                self._copier.check_room(self._bytes, WRITTEN)
                self._changed.append(place)

    def _look_below(self, source: int, name: str, place: str) -> None:
        inner = opened(source, name, FOLDER)
        if inner is None:  # the run has shut it: nobody knows what is gone in there
            self._blocked.append(place)
            self._gone = {path: was for path, was in self._gone.items() if not path.startswith(f"{place}/")}
            return
        try:
            self._look(inner, f"{place}/")
        finally:
            os.close(inner)

    def _try(self, path: str, act: Callable[[list[str]], None]) -> None:
        """Again, when somebody has taken away meanwhile what we were working with; not without end."""
        for _ in range(TRIES):
            try:
                act(path.split("/"))
                return
            except FileNotFoundError:
                continue
            except (NotADirectoryError, IsADirectoryError, PermissionError):
                break
        self._blocked.append(path)

    def _reach(self, fd: int, parts: Sequence[str], *, make: bool = False) -> int:
        """A descriptor of a folder below another; no link is followed to it, and none that is never copied is used."""
        fd = os.dup(fd)
        for part in parts:
            try:
                made = make and _make(fd, part)
                inner = os.open(part, FOLDER, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
            if is_one_of(fd, self._copier.never):
                os.close(fd)
                raise PermissionError
            if made and self._owner is not None:
                os.fchown(fd, *self._owner)
        return fd

    def _remove(self, target: int, was: Was, parts: list[str]) -> None:
        try:
            parent = self._reach(target, parts[:-1])
        except (FileNotFoundError, NotADirectoryError):
            return  # gone already
        try:
            status = about(parent, parts[-1])
            if was.theirs is None:
                with suppress(OSError):  # not empty: others have put something there
                    os.rmdir(parts[-1], dir_fd=parent)
            elif status is not None and stat.S_ISREG(status.st_mode):
                if mark(status) == was.theirs:
                    os.unlink(parts[-1], dir_fd=parent)
                else:
                    self._kept.append("/".join(parts))
        finally:
            os.close(parent)

    def _make(self, target: int, parts: list[str]) -> None:
        os.close(self._reach(target, parts, make=True))

    def _bring(self, source: int, target: int, parts: list[str]) -> None:
        ours = self._reach(source, parts[:-1])
        try:
            file = os.open(parts[-1], FILE, dir_fd=ours)
        finally:
            os.close(ours)
        try:
            parent = self._reach(target, parts[:-1], make=True)
            try:
                self._put(file, parent, parts)
            finally:
                os.close(parent)
        finally:
            os.close(file)

    def _put(self, file: int, parent: int, parts: list[str]) -> None:
        name, path = parts[-1], "/".join(parts)
        temporary = f".retinue-{secrets.token_hex(8)}"
        try:
            self._copier.file(file, temporary, parent, WRITTEN, owner=self._owner)
            reach_failpoint("half_given")
            there = about(parent, name)
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise
        was = self._taken.get(path)
        if (None if there is None else mark(there)) != (None if was is None else was.theirs):
            self._both.append(path)


def _make(fd: int, name: str) -> bool:
    try:
        os.mkdir(name, 0o755, dir_fd=fd)
    except FileExistsError:
        return False
    return True


def _named(paths: list[str]) -> str:
    """The first of them, as text that can be written whatever bytes a name has."""
    shown = ", ".join(os.fsencode(path).decode("utf-8", "replace") for path in paths[:SHOWN])
    return shown if len(paths) <= SHOWN else f"{shown} and {len(paths) - SHOWN} more"
