"""The durable log: one SQLite file, one writing process, one writer thread that commits in batches.

Written means committed. An event that nobody waits for is written with the next one that somebody does, or
after LINGER seconds, whichever is first; watchers see events only when they are written. What cannot be written
stays in order in memory and is tried again with the next batch; those who wait are told at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import apsw

from retinue.core.errors import LogError
from retinue.core.events import Delta, Event, RunEnded, decode, encode
from retinue.log.feed import Feed
from retinue.log.schema import make_folder, one_line, open_reader, open_writer

LINGER = 0.004
KEEP = 2048
READ_CHUNK = 1000
_ROWS = (512, 64, 8, 1)
_INSERT = {n: "INSERT INTO events VALUES " + ",".join(["(?,?,?,?)"] * n) for n in _ROWS}


def claim(folder: Path) -> tuple[Path, int]:
    """The first log file in the folder that no process is writing, and the lock that makes it ours."""
    make_folder(folder)
    number = 1
    while True:
        path = folder / f"{number:04d}.db"
        try:
            lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LogError(f"cannot write the log {path}: {error.strerror or error}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            number += 1
        else:
            return path, lock


def sign(lock: int, first_row: int) -> None:
    """Says in the lock who holds it and from which row on it writes: rows before that are of processes now gone."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d %d\n" % (os.getpid(), first_row), 0)


class SqliteLog:
    """Made in the event loop whose tasks append to it; `close` writes what is left and lets the file go."""

    durable = True

    def __init__(self, folder: Path) -> None:
        self.path, self._lock = claim(folder)
        try:
            self._db = open_writer(self.path)
            self._reader = open_reader(self.path)
        except BaseException:
            os.close(self._lock)
            raise
        self._loop = asyncio.get_running_loop()
        self._feeds: dict[str, Feed] = {}
        self._tree_ids: dict[str, int] = {}
        self._next_row = 1 + (self._db.execute("SELECT max(id) FROM events").get or 0)
        self._next_tree = 1 + (self._db.execute("SELECT max(id) FROM trees").get or 0)
        sign(self._lock, self._next_row)
        self._pending: list[Event] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._linger: asyncio.TimerHandle | None = None
        self._kicked = threading.Event()
        self._closing = False
        self.commits = 0
        self._thread = threading.Thread(target=self._write_batches, name="retinue-log", daemon=True)
        self._thread.start()

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        if self._closing:
            raise LogError("the log is closed")
        self._pending.append(event)
        if not wait:
            if self._linger is None:
                self._linger = self._loop.call_later(LINGER, self._kick)
            return None
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._kick()
        return waiter

    def show(self, delta: Delta) -> None:
        feed = self._feeds.get(delta.tree)
        if feed is not None:
            feed.show(delta)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncIterator[Event | Delta]:
        feed = self._feeds.get(tree)
        if feed is None:
            feed = self._feeds[tree] = self._feed_of_old_tree(tree)

        def older(seq: int) -> list[Event]:
            return self.read(tree, after=seq, limit=READ_CHUNK)

        try:
            async for item in feed.watch(after=after, deltas=deltas, older=older):
                yield item
        finally:
            self._forget(tree, feed)

    def read(self, tree: str, *, after: int = 0, limit: int = -1) -> list[Event]:
        found = self._reader.execute("SELECT id, first FROM trees WHERE name = ?", (tree,)).get
        if found is None:
            return []
        rows = self._reader.execute(
            "SELECT line FROM events WHERE id >= ? AND tree = ? AND seq > ? ORDER BY id LIMIT ?",
            (found[1], found[0], after, limit),
        )
        return [decode(line) for (line,) in rows]

    def trees(self) -> list[str]:
        return [name for (name,) in self._reader.execute("SELECT name FROM trees ORDER BY id")]

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._kick()
        await asyncio.to_thread(self._thread.join)
        try:
            if self._pending:
                raise LogError(f"{len(self._pending)} events could not be written to {self.path}")
        finally:
            self._reader.close()
            self._db.close()
            os.close(self._lock)

    def _feed_of_old_tree(self, tree: str) -> Feed:
        """A feed for a tree that is not being written: all of it is read from the file."""
        last = self._reader.execute(
            "SELECT seq, line FROM events WHERE tree = (SELECT id FROM trees WHERE name = ?) ORDER BY id DESC LIMIT 1",
            (tree,),
        ).get
        feed = Feed(keep=KEEP, first=1 if last is None else last[0] + 1)
        feed.ended = last is not None and type(decode(last[1]).body) is RunEnded
        return feed

    def _forget(self, tree: str, feed: Feed) -> None:
        if feed.ended and not feed.watchers:
            self._feeds.pop(tree, None)

    def _kick(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._kicked.set()

    # What follows runs in the writer thread, up to `_written`.

    def _write_batches(self) -> None:
        while True:
            self._kicked.wait()
            self._kicked.clear()
            closing = self._closing
            waiters, self._waiters = self._waiters, []
            batch = self._pending[:]
            error = self._write(batch) if batch else None
            if error is None:
                del self._pending[: len(batch)]
            try:
                self._loop.call_soon_threadsafe(self._written, batch if error is None else [], waiters, error)
            except RuntimeError:  # the loop is gone; what is written is written
                return
            if closing:
                return

    def _write(self, batch: list[Event]) -> LogError | None:
        first_row, first_tree = self._next_row, self._next_tree
        new: list[str] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._insert(self._rows(batch, new))
            self._db.execute("COMMIT")
        except apsw.Error as error:
            if not self._db.get_autocommit():
                self._db.execute("ROLLBACK")
            self._next_row, self._next_tree = first_row, first_tree
            for name in new:
                del self._tree_ids[name]
            return LogError(f"cannot write the log {self.path}: {one_line(error)}")
        self.commits += 1
        return None

    def _rows(self, batch: list[Event], new: list[str]) -> list[object]:
        """The values of all rows in one flat list, noting trees that are new on the way."""
        values: list[object] = []
        for row, event in enumerate(batch, self._next_row):
            tree = self._tree_ids.get(event.tree)
            if tree is None:
                tree = self._tree_ids[event.tree] = self._next_tree
                new.append(event.tree)
                self._next_tree += 1
                self._db.execute("INSERT INTO trees VALUES (?,?,?)", (tree, event.tree, row))
            values += (row, tree, event.seq, encode(event))
        self._next_row += len(batch)
        return values

    def _insert(self, values: list[object]) -> None:
        """Many rows a statement: each statement gives the interpreter lock away, and under load it is slow to return."""
        start = 0
        for rows in _ROWS:
            while len(values) - start >= 4 * rows:
                self._db.execute(_INSERT[rows], values[start : start + 4 * rows])
                start += 4 * rows

    def _written(self, batch: list[Event], waiters: list[asyncio.Future[None]], error: LogError | None) -> None:
        """In the event loop: shows what is written and wakes those who wait for it."""
        for event in batch:
            feed = self._feeds.get(event.tree)
            if feed is None:
                feed = self._feeds[event.tree] = Feed(keep=KEEP, first=event.seq)
            if event.seq >= feed.first + len(feed.events):  # a feed made since the commit has read it from the file
                feed.publish(event)
            self._forget(event.tree, feed)
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
