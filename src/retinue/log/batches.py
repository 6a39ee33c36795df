"""Events on their way into a durable log: batches, which a thread writes while the event loop appends more.

An event counts as written when its batch is committed, and watchers see only written events. An event without a waiter
is committed with the next event that has one, or after LINGER seconds. Under load, the first PIECE events are written
while the event loop appends more.

Events of one tree, appended in a row without a return to the event loop, are in the same batch: a crash keeps all or
none of them. If a commit fails, its events stay in memory, in order, for the next batch; their waiters get the error
at once. A writer replaced by another process is lost: it never retries, and takes no more events.

This module knows neither files nor a database. `sqlite` says how a batch is committed.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from contextlib import suppress
from queue import Empty, SimpleQueue

from retinue.core.errors import LogError, LogLost
from retinue.core.events import Event
from retinue.log.feed import Feed

LINGER = 0.004
PIECE = 500
RETRY_SECONDS = 1.0

# A request to the writer thread: write the events up to this total number appended, wake the waiters, and maybe stop.
_Kick = tuple[int, list[asyncio.Future[None]], bool]


class BatchWriter(ABC):
    """Takes events in the event loop, commits them in a thread, and then publishes them to the `feeds` of watched
    trees. A subclass commits and calls `start` once it is ready. `pending` are the events that are not written yet;
    `error` is that of the newest batch."""

    def __init__(self, feeds: dict[str, Feed]) -> None:
        self._feeds = feeds
        self._loop = asyncio.get_running_loop()
        self.pending: list[Event] = []
        self._appended = self._kicked_for = self._written = 0  # counts of events since this writer was made
        self._waiters: list[asyncio.Future[None]] = []
        self._linger: asyncio.TimerHandle | None = None
        self._hurries = False
        self._kicks: SimpleQueue[_Kick] = SimpleQueue()
        self.is_closing = False
        self.error: LogError | None = None
        self._refusal: LogError | None = None  # raised by `append` once the writer is closed or lost
        self._closed = asyncio.Event()
        self._thread = threading.Thread(target=self._write_batches, name="retinue-log", daemon=True)

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        """Add an event; see `Log.append`."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)  # else each use would add to the traceback of the last one
        is_free = self._written == self._kicked_for
        if is_free and self._appended - self._written >= PIECE and self.pending[-1].tree != event.tree:
            self._kick()
        self.pending.append(event)
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
        if self.pending:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            if self._linger is None:  # even while a batch is being written: its kick does not include this waiter
                self._linger = self._loop.call_later(LINGER, self._kick)
            await waiter

    async def close(self) -> LogError | None:
        """Write all pending events and give up the right to write. Return the error if events are lost."""
        if self.is_closing:
            return None
        self.is_closing = True
        self._refusal = LogError("the log is closed")
        self._kick()
        await self._closed.wait()
        self._thread.join()
        if not self.pending:
            return self.error if isinstance(self.error, LogLost) else None
        lost = LogLost if isinstance(self.error, LogLost) else LogError
        count = len(self.pending)
        return lost(f"{self.error}; {count} event{' is' if count == 1 else 's are'} lost")

    # The thread calls these.

    @abstractmethod
    def write_batch(self, batch: list[Event]) -> LogError | None:
        """Commit a batch, or return the error that prevented it: LogLost if the right to write is gone."""

    def catch_up(self, *, idle: bool) -> float | None:
        """Do other work of the log: after a batch, or while there are no events (`idle`). Return the seconds without
        events after which there is more to do, or None."""
        return None

    @abstractmethod
    def release(self) -> LogError | None:
        """Give up the right to write, after the last batch. Return an error if written events are lost."""

    def _kick(self) -> None:
        """Make the writer thread commit all events appended so far and then notify the waiters."""
        self._hurries = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        waiters, self._waiters = self._waiters, []
        self._kicked_for = self._appended
        self._kicks.put((self._appended, waiters, self.is_closing))

    def _write_batches(self) -> None:
        """Write until the writer is closed, or its event loop is. Runs in the thread."""
        patience, is_last = None, False
        while not is_last and not self._loop.is_closed():
            kicks = self._take_kicks(patience)
            if kicks:
                appended, _, is_last = kicks[-1]
                self._write_up_to(appended, [waiter for _, waiting, _ in kicks for waiter in waiting])
            patience = self.catch_up(idle=not kicks)
        self.error = self.release() or self.error
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._closed.set)

    def _take_kicks(self, patience: float | None) -> list[_Kick]:
        """Wait for kicks and return all that have arrived, or none if there is none for so many seconds."""
        try:
            kicks = [self._kicks.get(timeout=patience)]
        except Empty:
            return []
        while not self._kicks.empty():
            kicks.append(self._kicks.get())
        return kicks

    def _write_up_to(self, appended: int, waiters: list[asyncio.Future[None]]) -> None:
        """Write the events up to this total number appended as one batch, and wake the waiters."""
        batch = self.pending[: appended - self._written]
        if batch and not isinstance(self.error, LogLost):
            self.error = self.write_batch(batch)
        error = self.error if batch else None
        if error is None:
            del self.pending[: len(batch)]
            self._written += len(batch)
        with suppress(RuntimeError):  # the loop is closed, but the events are written
            self._loop.call_soon_threadsafe(self._settle, batch if error is None else [], waiters, error)

    def _settle(self, batch: list[Event], waiters: list[asyncio.Future[None]], error: LogError | None) -> None:
        """In the event loop, publish the written events and wake their waiters."""
        for event in batch if self._feeds else ():
            feed = self._feeds.get(event.tree)
            if feed is not None and event.seq >= feed.first + len(feed.events):  # else the feed began with it
                feed.publish(event)
        if isinstance(error, LogLost):
            self._refusal = error
        elif error is not None and not self.is_closing:
            self._linger = self._linger or self._loop.call_later(RETRY_SECONDS, self._kick)
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
                waiter.exception()  # mark as retrieved: a caller may ignore the waiter
