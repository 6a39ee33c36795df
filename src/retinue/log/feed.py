"""The live end of a log. A watcher is a cursor: nothing is queued for it and nobody waits for it.

Written events come in through `publish`; the feed of their tree keeps the newest, older ones are read from the log. So
a slow watcher costs nothing and misses nothing, and a tree that nobody watches needs no feed. Deltas go to a bounded
queue per watcher that asked for them; those that do not fit are counted, and the watcher is told. Knows no file and no
writer.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Iterator

from retinue.core.events import Delta, Event
from retinue.log.tree_index import TreeRow

KEEP = 2048
DELTAS_KEPT = 4096


class Watcher:
    """A cursor: the number of the event it has reached, and the deltas it has not yet taken, each with the number of
    the event before it."""

    __slots__ = ("deltas", "dropped", "seq", "wake")

    def __init__(self, seq: int, *, deltas: bool) -> None:
        self.seq = seq
        self.deltas: deque[tuple[int, Delta]] | None = deque() if deltas else None
        self.dropped = 0
        self.wake: asyncio.Event = asyncio.Event()

    def take_deltas(self, before: float = math.inf) -> Iterator[Delta]:
        """Take the deltas that came before an event, and before the first of them one that counts the dropped ones."""
        while self.deltas and self.deltas[0][0] < before:
            _, delta = self.deltas.popleft()
            if self.dropped:
                dropped, self.dropped = self.dropped, 0
                yield Delta(delta.tree, delta.run, delta.path, delta.agent, "", "dropped", dropped)
            yield delta


class Feed:
    """The newest events of a tree that is watched, newest last; the oldest of them has number `first`. `row` is how
    the tree stands: before them when the feed is made, with them later."""

    __slots__ = ("events", "first", "row", "watchers")

    def __init__(self, row: TreeRow) -> None:
        self.row, self.first = row, row.last_seq + 1
        self.events: list[Event] = []
        self.watchers: tuple[Watcher, ...] = ()

    def publish(self, event: Event) -> None:
        """Take an event that is written, and wake the watchers."""
        self.events.append(event)
        if len(self.events) > 2 * KEEP:
            dropped = len(self.events) - KEEP
            del self.events[:dropped]
            self.first += dropped
        self.row.apply(event)
        for watcher in self.watchers:
            watcher.wake.set()

    def show(self, delta: Delta) -> None:
        """Queue a delta for the watchers that asked for them."""
        place = self.first + len(self.events) - 1
        for watcher in self.watchers:
            if watcher.deltas is not None:
                watcher.deltas.append((place, delta))
                if len(watcher.deltas) > DELTAS_KEPT:
                    watcher.deltas.popleft()
                    watcher.dropped += 1
                watcher.wake.set()


class WatchableLog(ABC):
    """The part of a log that its watchers see. `_feeds` are those of the trees that are watched."""

    _feeds: dict[str, Feed]

    def show(self, delta: Delta) -> None:
        feed = self._feeds.get(delta.tree)
        if feed is not None:
            feed.show(delta)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        feed = self._feeds.get(tree)
        if feed is None:
            feed = self._feeds[tree] = self._make_feed(tree)
        watcher = Watcher(max(after, 0), deltas=deltas)
        feed.watchers += (watcher,)
        try:
            while True:
                watcher.wake.clear()
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
            if not feed.watchers and self._feeds.get(tree) is feed:  # the next watcher reads all of it from the log
                del self._feeds[tree]

    @abstractmethod
    def _make_feed(self, tree: str) -> Feed:
        """Make the feed of a tree that nobody watches yet: all of it is read from the log."""

    @abstractmethod
    async def _read_older(self, tree: str, after: int) -> list[Event]:
        """Read events of a tree that its feed no longer keeps."""
