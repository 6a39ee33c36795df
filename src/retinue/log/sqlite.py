"""The durable log: SQLite files in one folder, each with one writing process.

New trees go into the first file without a writer; to continue a stored tree, the log claims its file. `batches` takes
the events, and `schema` writes them. The index is written after INDEX_LINGER seconds without events, at the latest
after INDEX_SECONDS or INDEX_BYTES. Readers fold the batches that are not indexed yet (see `schema`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from contextlib import ExitStack, suppress
from pathlib import Path

import apsw
from msgspec import structs

from retinue.core.errors import LogError, LogLost, NotFound, RetinueError
from retinue.core.events import Event, encode_stored_events
from retinue.files.private import make_private_folder
from retinue.log import locks, schema
from retinue.log.batches import RETRY_SECONDS, BatchWriter
from retinue.log.feed import Feed, WatchableLog
from retinue.log.sqlite_reader import SqliteReader, read_events
from retinue.log.tree_index import TreeRow

INDEX_LINGER = 0.1
INDEX_SECONDS = 1.0
INDEX_BYTES = 16 * 2**20
JOURNAL_PAGES = 1000  # from this size on, the journal is checkpointed after each write of the index
VANISHED = "the log {path} was deleted or replaced while this process was writing it: what it held of this run is lost"
TAKEN = "this process may no longer write the log {path}: another one has taken it"
READ_CHUNK = 1000
_LOG = logging.getLogger(__name__)


def lock_free_file(folder: Path) -> tuple[Path, int]:
    """Return the first log file in the folder that no process is writing, and its lock, which we now hold."""
    try:
        make_private_folder(folder)
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


class FileWriter(BatchWriter):
    """The only writer of a log file."""

    def __init__(self, path: Path, lock: int, writer: str, feeds: dict[str, Feed]) -> None:
        super().__init__(feeds)
        self.path, self._lock = path, lock
        with ExitStack() as undo:
            undo.callback(os.close, lock)
            self._db = schema.open_writer(path)
            undo.callback(schema.close_quietly, self._db)  # before the lock is released: closing may still write
            with schema.translate_errors(f"cannot open the log {path}", self._db):
                self._epoch = schema.begin_epoch(self._db)
                schema.index_tail(self._db)  # again: a writer that lost the lock may have written before our epoch
                self._first_batch = self._next_batch = schema.next_batch(self._db)
                self._files = schema.identify_files(path)
                self._journal_pages = 0
                # Replaces SQLite's own hook, which checkpoints before a commit returns.
                self._db.set_wal_hook(self._note_journal)
            undo.pop_all()
        locks.sign_lock(lock, writer, self._first_batch)
        self._reader: apsw.Connection | None = None  # of the event loop; `_db` is the thread's
        self._index = schema.continue_index(self._db)
        self._unindexed: list[tuple[int, list[Event]]] = []  # batches that are not indexed yet
        self._unindexed_bytes = 0
        self._index_due = 0.0
        self._index_failed = False
        self.commits = 0
        self.start()

    def make_feed(self, tree: str) -> Feed:
        """Make the feed of a tree without watchers. If a dead process left the tree without an ending, the tree counts
        as ended, unless this process continues it.

        Blocks for one short lookup in the file, so that no event is published between reading and watching. A tree that
        has just begun is not looked up.
        """
        if self.is_closing:
            raise LogError("the log is closed")
        # Events move from pending to unindexed to the index. Reading in that order misses none.
        pending = [coming for coming in list(self.pending) if coming.tree == tree]
        unindexed = [event for _, batch in list(self._unindexed) for event in batch if event.tree == tree]
        is_new = any(event.seq == 1 for event in (*unindexed[:1], *pending[:1]))
        row = (None if is_new else self._load_tree(tree)) or (TreeRow.begin(unindexed[0]) if unindexed else None)
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

    def _load_tree(self, tree: str) -> TreeRow | None:
        if self._reader is None:
            self._reader = schema.open_reader(self.path)
        return schema.load_tree(self._reader, tree)

    def write_batch(self, batch: list[Event]) -> LogError | None:
        lines = encode_stored_events(batch)
        try:
            is_ours = schema.append_batch(self._db, epoch=self._epoch, batch=self._next_batch, lines=lines)
        except Exception as error:  # noqa: BLE001 - no error may end the writer thread
            return LogError(schema.describe_error(f"cannot write the log {self.path}", error, self._db))
        lost = self._find_loss() if is_ours else LogLost(TAKEN.format(path=self.path))
        if lost is not None:
            return lost
        self.commits += 1
        if not self._unindexed:
            self._index_due = time.monotonic() + INDEX_SECONDS
        self._unindexed.append((self._next_batch, batch))
        self._unindexed_bytes += len(lines)
        self._next_batch += 1
        return None

    def catch_up(self, *, idle: bool) -> float | None:
        """Write the index if it is time for that. Return the idle seconds after which to write it."""
        is_much = self._unindexed_bytes >= INDEX_BYTES and not self._index_failed
        if idle or is_much or time.monotonic() >= self._index_due:
            self._write_index()
        if not self._unindexed or isinstance(self.error, LogLost):
            return None
        return RETRY_SECONDS if self._index_failed else INDEX_LINGER

    def release(self) -> LogError | None:
        self._write_index()
        lost = self._find_loss() if self.commits and self.error is None else None
        for db in (self._reader, self._db):
            if db is not None:
                schema.close_quietly(db)
        os.close(self._lock)
        return lost

    def _write_index(self) -> None:
        """Write the index of the committed batches, and checkpoint a long journal. A failure is retried later: it
        loses no event."""
        if not self._unindexed or isinstance(self.error, LogLost):
            return
        try:
            for batch, events in self._unindexed:  # the index skips those of an attempt that failed
                self._index.apply(events, batch)
            schema.index_batches(self._db, epoch=self._epoch, batch=self._next_batch - 1, index=self._index)
        except Exception as error:  # noqa: BLE001 - as above
            self._index_due = time.monotonic() + RETRY_SECONDS
            if not self._index_failed:  # warn once, not at every retry
                self._index_failed = True
                failed = f"cannot write the index of the log {self.path}"
                _LOG.warning("%s", schema.describe_error(failed, error, self._db))
            return
        self._unindexed, self._unindexed_bytes = [], 0
        self._index_failed = False
        if self._journal_pages >= JOURNAL_PAGES:
            with suppress(apsw.Error):  # retried after the next write of the index
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _note_journal(self, db: apsw.Connection, name: str, pages: int) -> int:
        self._journal_pages = pages
        return apsw.SQLITE_OK

    def _find_loss(self) -> LogLost | None:
        """Return an error if the log was deleted or replaced. SQLite would keep writing to the unlinked files."""
        return None if schema.identify_files(self.path) == self._files else LogLost(VANISHED.format(path=self.path))
