"""The live end of a log. A watcher is a cursor: it has no queue of events, and no writer ever waits for it.

`publish` takes written events. The feed of a tree keeps the newest events in memory; watchers read older ones from the
log. So a slow watcher costs nothing and misses nothing, and only watched trees have a feed. Deltas go into a bounded
queue per watcher that asked for them; deltas that do not fit are counted, and the watcher gets the count. This module
knows neither files nor writers.
"""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterator

from retinue.core.events import Delta, Event
from retinue.log.tree_index import TreeRow

KEEP = 2048
DELTAS_KEPT = 4096


class Watcher:
    """A cursor in a tree. `seq` is the number of the newest event it has reached. `deltas` are the deltas not yet
    taken, each with the number of the event before it."""

    __slots__ = ("deltas", "dropped", "seq", "wake")

    def __init__(self, seq: int, *, deltas: bool) -> None:
        self.seq = seq
        self.deltas: deque[tuple[int, Delta]] | None = deque() if deltas else None
        self.dropped = 0
        self.wake: asyncio.Event = asyncio.Event()

    def take_deltas(self, before: float = math.inf) -> Iterator[Delta]:
        """Take the deltas queued before event number `before`. If deltas were dropped, first yield a delta with their
        count."""
        while self.deltas and self.deltas[0][0] < before:
            _, delta = self.deltas.popleft()
            if self.dropped:
                dropped, self.dropped = self.dropped, 0
                yield Delta(delta.tree, delta.run, delta.path, delta.agent, text="", kind="dropped", dropped=dropped)
            yield delta


class Feed:
    """The newest events of a watched tree, newest last. `first` is the number of the oldest event kept. `row` is the
    state of the tree, updated with each published event."""

    __slots__ = ("events", "first", "row", "watchers")

    def __init__(self, row: TreeRow) -> None:
        self.row, self.first = row, row.last_seq + 1
        self.events: list[Event] = []
        self.watchers: tuple[Watcher, ...] = ()

    def publish(self, event: Event) -> None:
        """Add a written event and wake the watchers."""
        self.events.append(event)
        if len(self.events) > 2 * KEEP:
            dropped = len(self.events) - KEEP
            del self.events[:dropped]
            self.first += dropped
        self.row.apply(event)
        for watcher in self.watchers:
            watcher.wake.set()

    def show(self, delta: Delta) -> None:
        """Queue a delta for the watchers that asked for deltas."""
        place = self.first + len(self.events) - 1
        for watcher in self.watchers:
            if watcher.deltas is not None:
                watcher.deltas.append((place, delta))
                if len(watcher.deltas) > DELTAS_KEPT:
                    watcher.deltas.popleft()
                    watcher.dropped += 1
                watcher.wake.set()


class WatchableLog(ABC):
    """The part of a log that watchers use. `_feeds` maps each watched tree to its feed. `writer` is the id of this
    process in the log: random, because containers and machines that share a log have equal process ids."""

    def __init__(self) -> None:
        self._feeds: dict[str, Feed] = {}
        self.writer = os.urandom(8).hex()

    def show(self, delta: Delta) -> None:
        feed = self._feeds.get(delta.tree)
        if feed is not None:
            feed.show(delta)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        feed = self._feeds.get(tree)
        if feed is None:
            made = await self._make_feed(tree)
            feed = self._feeds.setdefault(tree, made)  # another watcher may have come first
        watcher = Watcher(max(after, 0), deltas=deltas)
        feed.watchers += (watcher,)
        try:
            while True:
                watcher.wake.clear()  # before reading, so that an event published meanwhile wakes us again
                if watcher.seq + 1 < feed.first:
                    batch = await self._read_older(tree, watcher.seq)
                else:
                    batch = feed.events[watcher.seq + 1 - feed.first :]
                for event in batch:
                    for delta in watcher.take_deltas(event.seq) if watcher.deltas else ():
                        yield delta
                    watcher.seq = event.seq
                    yield event
                if batch:
                    continue
                for delta in watcher.take_deltas():
                    yield delta
                if not watcher.wake.is_set():
                    if feed.row.ended:
                        return
                    await watcher.wake.wait()
        finally:
            feed.watchers = tuple(other for other in feed.watchers if other is not watcher)
            if not feed.watchers and self._feeds.get(tree) is feed:  # a later watcher reads from the log again
                del self._feeds[tree]

    @abstractmethod
    async def _make_feed(self, tree: str) -> Feed:
        """Make a feed for a tree that has no watcher yet. The watcher reads earlier events from the log.

        Events are published to the feed only after the return. So the feed must know all events published by then: a
        log that waits for its lookup repeats the lookup, or publishes to the feed the events that came meanwhile."""

    @abstractmethod
    async def _read_older(self, tree: str, after: int) -> list[Event]:
        """Read events of a tree that its feed no longer keeps."""
