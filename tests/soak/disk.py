"""A disk that fails on a test's order: a VFS of SQLite over the real one, and the real file system behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import apsw

_REAL = apsw.vfs_names()[0]
Fault = Literal["full", "write", "sync"]


class Disk(apsw.VFS):
    """Counts writes and syncs of databases, and from number `at` on fails `times` of them."""

    def __init__(self) -> None:
        super().__init__("faulty", _REAL, makedefault=True)
        self.count = 0
        self.at: int | None = None
        self.times = 1
        self.fault: Fault = "full"
        self.failed = 0

    def arm(self, fault: Fault, at: int, times: int = 1) -> None:
        self.count, self.failed, self.fault, self.at, self.times = 0, 0, fault, at, times

    def heal(self) -> None:
        self.at = None

    def step(self, what: str) -> None:
        """One write or sync; raises when it is its turn to fail."""
        if (what == "sync") != (self.fault == "sync"):
            return
        self.count += 1
        if self.at is None or not self.at <= self.count < self.at + self.times:
            return
        self.failed += 1
        if self.fault == "full":
            raise apsw.FullError("no space")
        error = apsw.IOError("the disk broke")
        error.extendedresult = apsw.SQLITE_IOERR_FSYNC if what == "sync" else apsw.SQLITE_IOERR_WRITE
        raise error

    def xOpen(self, name: Any, flags: Any) -> apsw.VFSFile:
        return _File(self, name, flags)


class _File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: Any) -> None:
        self._disk = disk
        super().__init__(_REAL, name, flags)

    def xWrite(self, data: Any, offset: int) -> None:
        self._disk.step("write")
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._disk.step("sync")
        super().xSync(flags)

    def excepthook(self, *_: object) -> None:
        """Print nothing: failures here are intended, and SQLite gets its code."""


@contextmanager
def faulty_disk() -> Iterator[Disk]:
    disk = Disk()
    try:
        yield disk
    finally:
        disk.unregister()
