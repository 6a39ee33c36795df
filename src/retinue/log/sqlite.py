"""The durable log: SQLite files in one folder, each with one writing process.

New trees go into the first file without a writer; to continue a stored tree, the log claims its file. An event counts
as written when it is committed, and watchers see only written events. An event without a waiter is committed with the
next event that has one, or after LINGER seconds. Under load, the first PIECE events are written while the event loop
appends more.

Events of one tree, appended in a row without a return to the event loop, are in the same batch: a crash keeps all or
none of them. If a commit fails, its events stay in memory, in order, for the next batch; their waiters get the error
at once. A writer replaced by another process is lost: it never retries, and takes no more events.

The index is written after INDEX_LINGER seconds without events, at the latest after INDEX_SECONDS or INDEX_BYTES.
Readers fold the batches that are not indexed yet (see `schema`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import apsw
from msgspec import structs

from retinue.core.errors import LogError, LogLost, NotFound, RetinueError
from retinue.core.events import Event, encode_stored_events
from retinue.files.private import ensure_private_folder
from retinue.log import locks, schema
from retinue.log.feed import Feed, WatchableLog
from retinue.log.sqlite_reader import SqliteReader, read_events
from retinue.log.tree_index import TreeRow

LINGER = 0.004
PIECE = 500
INDEX_LINGER = 0.1
INDEX_SECONDS = 1.0
INDEX_BYTES = 16 * 2**20
JOURNAL_PAGES = 1000  # from this size on, the journal is checkpointed after each write of the index
RETRY_SECONDS = 1.0
VANISHED = "the log {path} was deleted or replaced while this process was writing it: what it held of this run is lost"
READ_CHUNK = 1000
_LOG = logging.getLogger(__name__)


def lock_free_file(folder: Path) -> tuple[Path, int]:
    """Return the first log file in the folder that no process is writing, and its lock, which we now hold."""
    try:
        ensure_private_folder(folder)
    except RetinueError as error:
        raise LogError(str(error)) from None
    number = 1
    while True:
        path = folder / f"{number:04d}.db"
        lock = locks.try_lock(path)
        if lock is not None:
            return path, lock
        number += 1


class SqliteLog(SqliteReader, WatchableLog):
    """The log in a folder of SQLite files. Create it in the event loop whose tasks append to it. `close` writes all
    pending events and releases the files."""

    ahead = True

    def __init__(self, folder: Path) -> None:
        SqliteReader.__init__(self, folder)
        WatchableLog.__init__(self)
        self._own = FileWriter(*lock_free_file(folder), self.writer, self._feeds)
        self._claimed: dict[str, FileWriter] = {}  # trees in other files than the one for new trees
        self._claiming = asyncio.Lock()

    @property
    def path(self) -> Path:
        """The file for new trees."""
        return self._own.path

    @property
    def commits(self) -> int:
        return sum(writer.commits for writer in self._writers())

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        return self._claimed.get(event.tree, self._own).append(event, wait)

    async def claim(self, tree: str) -> None:
        file = await asyncio.to_thread(self.find_file, tree)
        if file is None:
            raise NotFound(f"there is no tree '{tree}' in {self.location}")
        async with self._claiming:
            writer = next((writer for writer in self._writers() if writer.path == file), None)
            if writer is None:
                writer = FileWriter(file, await locks.wait_for_lock(file), self.writer, self._feeds)
            if writer is not self._own and tree not in self._claimed:
                self._claimed[tree] = writer
                self._feeds.pop(tree, None)  # a watcher may have made it for the wrong file, where the tree is not

    async def flush(self) -> None:
        for writer in self._writers():
            await writer.flush()

    async def close(self) -> None:
        failed = [error for writer in self._writers() if (error := await writer.close()) is not None]
        if failed:
            raise failed[0]

    async def _make_feed(self, tree: str) -> Feed:
        return self._claimed.get(tree, self._own).make_feed(tree)

    async def _read_older(self, tree: str, after: int) -> list[Event]:
        file = self._claimed.get(tree, self._own).path
        return await asyncio.to_thread(read_events, file, tree, after=after, limit=READ_CHUNK)

    def _writers(self) -> list[FileWriter]:
        return list(dict.fromkeys((self._own, *self._claimed.values())))


# A request to the writer thread: write the events up to this total number appended, wake the waiters, and maybe stop.
_Kick = tuple[int, list[asyncio.Future[None]], bool]


class FileWriter:
    """The only writer of a log file. It takes events in the event loop, commits them in a thread, and then publishes
    them to the `feeds` of watched trees."""

    def __init__(self, path: Path, lock: int, writer: str, feeds: dict[str, Feed]) -> None:
        self.path, self._lock, self._feeds = path, lock, feeds
        with ExitStack() as undo:
            undo.callback(os.close, lock)
            self._db = schema.open_writer(path)
            undo.callback(schema.close_quietly, self._db)  # before the lock is released: closing may still write
            try:
                self._epoch = schema.begin_epoch(self._db)
                schema.index_tail(self._db)  # again: a writer that lost the lock may have written before our epoch
                self._first_batch = self._next_batch = schema.next_batch(self._db)
                self._files = schema.identify_files(path)
                self._reader = schema.open_reader(path)
                self._journal_pages = 0
                # Replaces SQLite's own hook, which checkpoints before a commit returns.
                self._db.set_wal_hook(self._note_journal)
            except apsw.Error as error:
                raise LogError(schema.describe_error(f"cannot open the log {path}", error, self._db)) from None
            undo.pop_all()
        locks.sign_lock(lock, writer, self._first_batch)
        self._loop = asyncio.get_running_loop()
        self._pending: list[Event] = []
        self._appended = self._kicked_for = self._written = 0  # counts of events since this writer was made
        self._index = schema.continue_index(self._db)
        self._unindexed: list[tuple[int, list[Event]]] = []  # batches that are not indexed yet
        self._unindexed_bytes = self._folded = 0  # their size; how many are folded into `_index`, not yet written
        self._index_due = 0.0
        self._index_failed = False
        self._waiters: list[asyncio.Future[None]] = []
        self._linger: asyncio.TimerHandle | None = None
        self._hurries = False
        self._kicks: SimpleQueue[_Kick] = SimpleQueue()
        self._closing = False
        self._error: LogError | None = None
        self._refusal: LogError | None = None  # raised by `append` once the writer is closed or lost
        self._closed = asyncio.Event()
        self.commits = 0
        self._thread = threading.Thread(target=self._write_batches, name="retinue-log", daemon=True)
        self._thread.start()

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        """Add an event; see `Log.append`."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # else each use would add to the traceback of the last one
        is_free = self._written == self._kicked_for
        if is_free and self._appended - self._written >= PIECE and self._pending[-1].tree != event.tree:
            self._kick()
        self._pending.append(event)
        self._appended += 1
        if not wait:
            if self._linger is None:
                self._linger = self._loop.call_later(LINGER, self._kick)
            return None
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        if not self._hurries:  # kick at the end of this loop iteration, so that all its waiters share one batch
            self._hurries = True
            self._loop.call_soon(self._kick)
        return waiter

    async def flush(self) -> None:
        """Wait until all events appended so far are written, without forcing an earlier commit; see `Log.flush`."""
        if self._pending:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            if self._linger is None:  # even while a batch is being written: its kick does not include this waiter
                self._linger = self._loop.call_later(LINGER, self._kick)
            await waiter

    async def close(self) -> LogError | None:
        """Write all pending events and release the file. Return the error if events are lost."""
        if self._closing:
            return None
        self._closing = True
        self._refusal = LogError("the log is closed")
        self._kick()
        await self._closed.wait()
        self._thread.join()
        os.close(self._lock)
        if not self._pending:
            return self._error if isinstance(self._error, LogLost) else None
        lost = LogLost if isinstance(self._error, LogLost) else LogError
        count = len(self._pending)
        return lost(f"{self._error}; {count} event{' is' if count == 1 else 's are'} lost")

    def make_feed(self, tree: str) -> Feed:
        """Make the feed of a tree without watchers. If a dead process left the tree without an ending, the tree counts
        as ended, unless this process continues it.

        Blocks for one short lookup in the file, so that no event is published between reading and watching.
        """
        if self._closing:
            raise LogError("the log is closed")
        # Events move from pending to unindexed to the index. Reading in that order misses none.
        pending = [coming for coming in list(self._pending) if coming.tree == tree]
        unindexed = [event for _, batch in list(self._unindexed) for event in batch if event.tree == tree]
        row = schema.load_tree(self._reader, tree) or (TreeRow.begin(unindexed[0]) if unindexed else None)
        if row is None:
            return Feed(TreeRow(tree, 0.0))
        if not (pending or unindexed or row.last_batch >= self._first_batch):
            row = structs.replace(row, ended=True)
        feed = Feed(row)
        for event in unindexed:
            if event.seq > row.last_seq:
                feed.publish(event)
        for coming in pending if row.ended else ():  # a run, not yet on disk, that continues a finished tree
            row.apply(coming)
        return feed

    def _kick(self) -> None:
        """Make the writer thread commit all events appended so far and then notify the waiters."""
        self._hurries = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        waiters, self._waiters = self._waiters, []
        self._kicked_for = self._appended
        self._kicks.put((self._appended, waiters, self._closing))

    # The methods from here to `_settle` run in the writer thread.

    def _write_batches(self) -> None:
        while True:
            kicks = self._take_kicks()
            if not kicks:
                self._write_index()
                continue
            appended, _, is_last = kicks[-1]
            waiters = [waiter for _, waiting, _ in kicks for waiter in waiting]
            batch = self._pending[: appended - self._written]
            if batch and not isinstance(self._error, LogLost):
                self._error = self._write(batch)
            error = self._error if batch else None
            if error is None:
                del self._pending[: len(batch)]
                self._written += len(batch)
            with suppress(RuntimeError):  # the loop is closed, but the events are written
                self._loop.call_soon_threadsafe(self._settle, batch if error is None else [], waiters, error)
            if is_last or self._loop.is_closed():
                break
            is_much = self._unindexed_bytes >= INDEX_BYTES and not self._index_failed
            if is_much or (self._unindexed and time.monotonic() >= self._index_due):
                self._write_index()
        self._write_index()
        if self.commits and self._error is None:
            try:
                self._check_files()
            except LogLost as error:
                self._error = error
        for db in (self._reader, self._db):
            schema.close_quietly(db)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closed.set)

    def _take_kicks(self) -> list[_Kick]:
        """Wait for kicks and return all that have arrived; return none if it is time to write the index."""
        try:
            kicks = [self._kicks.get(timeout=self._seconds_to_index())]
        except Empty:
            return []
        while not self._kicks.empty():
            kicks.append(self._kicks.get())
        return kicks

    def _write(self, batch: list[Event]) -> LogError | None:
        lines = encode_stored_events(batch)
        try:
            schema.append_batch(self._db, epoch=self._epoch, batch=self._next_batch, lines=lines)
            self._check_files()
        except LogLost as error:
            return error
        except Exception as error:  # noqa: BLE001 - no error may end the writer thread
            return self._describe_failure("cannot write the log", error)
        self.commits += 1
        if not self._unindexed:
            self._index_due = time.monotonic() + INDEX_SECONDS
        self._unindexed.append((self._next_batch, batch))
        self._unindexed_bytes += len(lines)
        self._next_batch += 1
        return None

    def _seconds_to_index(self) -> float | None:
        """Return the idle seconds after which the index is written, or None if there is nothing to index."""
        if not self._unindexed or isinstance(self._error, LogLost):
            return None
        return RETRY_SECONDS if self._index_failed else INDEX_LINGER

    def _write_index(self) -> None:
        """Write the index of the committed batches, and checkpoint a long journal. A failure is retried later: it
        loses no event."""
        if self._seconds_to_index() is None:
            return
        try:
            for batch, events in self._unindexed[self._folded :]:
                self._index.apply(events, batch)
                self._folded += 1
            schema.index_batches(self._db, epoch=self._epoch, batch=self._next_batch - 1, index=self._index)
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._describe_failure("cannot write the index of the log", error)
            if isinstance(failure, LogLost):  # the new writer indexes our batches, which are on disk
                self._unindexed = []
                return
            self._index_due = time.monotonic() + RETRY_SECONDS
            if not self._index_failed:  # warn once, not at every retry
                self._index_failed = True
                _LOG.warning("%s", failure)
            return
        self._unindexed = []
        self._unindexed_bytes = self._folded = 0
        self._index_failed = False
        if self._journal_pages >= JOURNAL_PAGES:
            with suppress(apsw.Error):  # retried after the next write of the index
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _describe_failure(self, what: str, error: Exception) -> LogError:
        if schema.is_lost_epoch(error):
            return LogLost(f"this process may no longer write the log {self.path}: another one has taken it")
        return LogError(schema.describe_error(f"{what} {self.path}", error, self._db))

    def _note_journal(self, db: apsw.Connection, name: str, pages: int) -> int:
        self._journal_pages = pages
        return apsw.SQLITE_OK

    def _check_files(self) -> None:
        """Raise LogLost if the log was deleted or replaced. SQLite would keep writing to the unlinked files."""
        if schema.identify_files(self.path) != self._files:
            raise LogLost(VANISHED.format(path=self.path))

    def _settle(self, batch: list[Event], waiters: list[asyncio.Future[None]], error: LogError | None) -> None:
        """In the event loop, publish the written events and wake their waiters."""
        for event in batch if self._feeds else ():
            feed = self._feeds.get(event.tree)
            if feed is not None and event.seq >= feed.first + len(feed.events):  # else `make_feed` already added it
                feed.publish(event)
        if isinstance(error, LogLost):
            self._refusal = error
        elif error is not None and not self._closing:
            self._linger = self._linger or self._loop.call_later(RETRY_SECONDS, self._kick)
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # mark as retrieved: a caller may ignore the waiter
