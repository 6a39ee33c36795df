"""The durable log: one SQLite file, one writing process, one writer thread that commits in batches.

Written means committed. An event that nobody waits for is written with the next one that somebody does, or
after LINGER seconds, whichever is first; watchers see events only when they are written. What cannot be written
stays in order in memory and is tried again with the next batch; those who wait are told at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path

import apsw

from retinue.core.errors import LogError
from retinue.core.events import Delta, Event, RunEnded, decode, encode_kept
from retinue.log import schema
from retinue.log.feed import Feed, root_of
from retinue.log.locks import sign, take, take_held
from retinue.log.schema import make_folder, open_reader, open_writer, trouble

LINGER = 0.004
RETRY_SECONDS = 1.0
KEEP = 2048
READ_CHUNK = 1000


def claim(folder: Path) -> tuple[Path, int]:
    """The first log file in the folder that no process is writing, and the lock that makes it ours."""
    make_folder(folder)
    number = 1
    while True:
        path = folder / f"{number:04d}.db"
        lock = take(path)
        if lock is not None:
            return path, lock
        number += 1


class SqliteLog:
    """Made in the event loop whose tasks append to it; `close` writes what is left and lets the file go."""

    durable = True
    ahead = True

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        """Without a file the first that is free; with one, that one or none: HeldElsewhere."""
        self.path, self._lock = claim(folder) if file is None else (file, take_held(file))
        try:
            self._db = open_writer(self.path)
            self._reader = open_reader(self.path)
        except BaseException:
            os.close(self._lock)
            raise
        self._loop = asyncio.get_running_loop()
        self._feeds: dict[str, Feed] = {}
        self._own_row = schema.next_row(self._db)
        sign(self._lock, self._own_row)
        self._pending: list[Event] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._linger: asyncio.TimerHandle | None = None
        self._hurries = False
        self._kicked = threading.Event()
        self._closing = False
        self._trouble: LogError | None = None
        self._closed = asyncio.Event()
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
        if not self._hurries:  # when the loop has done what it is at: whoever else waits by then is in the same batch
            self._hurries = True
            self._loop.call_soon(self._kick)
        return waiter

    def appender(self, tree: str) -> Callable[[Event, bool], Awaitable[None] | None]:
        return self.append

    def show(self, delta: Delta) -> None:
        feed = self._feeds.get(delta.tree)
        if feed is not None:
            feed.show(delta)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        feed = self._feeds.get(tree)
        if feed is None:
            feed = self._feeds[tree] = self._feed_of_old_tree(tree)
        try:
            async with aclosing(feed.watch(after=after, deltas=deltas, older=self._older(tree))) as items:
                async for item in items:
                    yield item
        finally:
            if not (feed.events or feed.watchers):  # it never began
                self._feeds.pop(tree, None)
            self._forget(tree, feed)

    def read(self, tree: str, *, after: int = 0) -> list[Event]:
        return [event for _, event in self._read_on(tree, after, self._first_row(tree))]

    def trees(self) -> list[str]:
        return [name for name, _ in schema.trees(self._reader)]

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._kick()
        await self._closed.wait()
        self._thread.join()
        try:
            if self._pending:
                raise LogError(f"{self._trouble}; {len(self._pending)} events are lost")
        finally:
            os.close(self._lock)

    def _first_row(self, tree: str) -> int:
        if self._closing:
            raise LogError("the log is closed")
        return schema.first_row(self._reader, tree) or 0

    def _read_on(self, tree: str, after: int, row: int) -> Iterator[tuple[int, Event]]:
        for at, seq, line in schema.tree_lines(self._reader, tree, row=row):
            if seq > after:
                yield at, decode(line)

    def _older(self, tree: str) -> Callable[[int], list[Event]]:
        """Reads on by whole rows, so that none is taken apart twice."""
        row = self._first_row(tree)

        def read(after: int) -> list[Event]:
            nonlocal row
            found: list[Event] = []
            for at, event in self._read_on(tree, after, row):
                if at != row and len(found) >= READ_CHUNK:
                    row = at
                    break
                row = at
                found.append(event)
            return found

        return read

    def _feed_of_old_tree(self, tree: str) -> Feed:
        """A feed for a tree that is not being written: all of it is read from the file. One that a process now gone
        left without an ending gets none any more."""
        last = schema.last_line(self._reader, tree, row=self._first_row(tree))
        if last is None:
            return Feed(keep=KEEP)
        event = decode(last[1])
        feed = Feed(keep=KEEP, first=event.seq + 1)
        feed.ended = event.run == 0 and type(event.body) is RunEnded
        if event.run != 0:
            feed.root, feed.ended = root_of(line for _, _, line in self._lines(tree))
        if feed.ended:
            for coming in list(self._pending):  # a run that goes on in a finished tree, and is not yet on disk
                if coming.tree == tree:
                    feed.announce(coming)
        else:
            feed.ended = last[0] < self._own_row and self._is_left(tree)
        return feed

    def _is_left(self, tree: str) -> bool:
        """Whether this process has written nothing of the tree. What no longer waits to be written is in the file."""
        if any(event.tree == tree for event in self._pending):
            return False
        last = schema.last_line(self._reader, tree, row=self._first_row(tree))
        return last is None or last[0] < self._own_row

    def _lines(self, tree: str) -> Iterator[tuple[int, int, bytes]]:
        return schema.tree_lines(self._reader, tree, row=self._first_row(tree))

    def _publish(self, event: Event) -> None:
        feed = self._feeds.get(event.tree)
        if feed is None:
            return  # nobody watches; whoever comes reads it from the file
        if event.seq >= feed.first + len(feed.events):  # a feed made since the commit has it from the file
            feed.publish(event)
        self._forget(event.tree, feed)

    def _forget(self, tree: str, feed: Feed) -> None:
        if feed.ended and not feed.watchers:
            self._feeds.pop(tree, None)

    def _kick(self) -> None:
        self._hurries = False
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
            self._trouble = error
            if error is None:
                del self._pending[: len(batch)]
            with suppress(RuntimeError):  # the loop is gone; what is written is written
                self._loop.call_soon_threadsafe(self._written, batch if error is None else [], waiters, error)
            if closing or self._loop.is_closed():
                break
        for db in (self._reader, self._db):
            with suppress(apsw.Error):  # what is acknowledged is in the file; tidying it up is for the next writer
                db.close()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closed.set)

    def _write(self, batch: list[Event]) -> LogError | None:
        begun = [event.tree for event in batch if event.seq == 1]
        try:
            schema.insert(self._db, begun=begun, lines=encode_kept(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the one who writes
            return LogError(trouble(f"cannot write the log {self.path}", error, self._db))
        self.commits += 1
        return None

    def _written(self, batch: list[Event], waiters: list[asyncio.Future[None]], error: LogError | None) -> None:
        """In the event loop: shows what is written and wakes those who wait for it."""
        if self._feeds:
            for event in batch:
                self._publish(event)
        if error is not None and not self._closing:
            self._linger = self._linger or self._loop.call_later(RETRY_SECONDS, self._kick)
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
