"""The live end of one tree's events. A watcher is a cursor: nothing is queued for it and nobody waits for it.

Written events come in through `publish`; the feed keeps the newest, older ones are read from the log. So a slow watcher
costs nothing and misses nothing, and a tree that nobody watches needs no feed. Deltas go to a bounded queue per watcher
that asked for them; those that do not fit are counted, and the watcher is told. A feed knows no file and no writer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from retinue.core.events import Delta, Event, RunEnded, RunSpawned

KEEP = 2048
DELTAS_KEPT = 4096
ReadOlder = Callable[[int], Awaitable[list[Event]]]


def find_root(events: Iterable[Event]) -> tuple[int, bool]:
    """Return the run with whose ending a tree ends, and whether it has: the primary, or a run that continues a
    finished tree."""
    root, ended = 0, False
    for event in events:
        if event.run == root and type(event.body) is RunEnded:
            ended = True
        elif ended and type(event.body) is RunSpawned:
            root, ended = event.run, False
    return root, ended


class Watcher:
    """A cursor: the number of the event it has reached, and the deltas it has not yet taken, each with the number of
    the event before it."""

    __slots__ = ("deltas", "dropped", "seq", "wake")

    def __init__(self, seq: int, *, deltas: bool) -> None:
        self.seq = seq
        self.deltas: deque[tuple[int, Delta]] | None = deque() if deltas else None
        self.dropped = 0
        self.wake: asyncio.Event = asyncio.Event()


class Feed:
    """The newest events of a tree that is watched, newest last; the oldest of them has number `first`."""

    __slots__ = ("ended", "events", "first", "root", "watchers")

    def __init__(self, *, first: int = 1) -> None:
        self.first = first
        self.events: list[Event] = []
        self.watchers: tuple[Watcher, ...] = ()
        self.ended = False
        self.root = 0  # the run with whose ending the tree ends

    def publish(self, event: Event) -> None:
        """Take an event that is written, and wake the watchers."""
        self.events.append(event)
        if len(self.events) > 2 * KEEP:
            dropped = len(self.events) - KEEP
            del self.events[:dropped]
            self.first += dropped
        self.follow_root(event)
        for watcher in self.watchers:
            watcher.wake.set()

    def follow_root(self, event: Event) -> None:
        """Note whether the tree has ended with this event, or goes on with it."""
        if event.run == self.root and type(event.body) is RunEnded:
            self.ended = True
        elif self.ended and type(event.body) is RunSpawned:
            self.root, self.ended = event.run, False

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

    async def watch(self, *, after: int, deltas: bool, read_older: ReadOlder) -> AsyncGenerator[Event | Delta]:
        """Yield the events after that number and then live ones, until the tree has ended. `read_older` reads events
        that are no longer kept here."""
        watcher = Watcher(max(after, 0), deltas=deltas)
        self.watchers += (watcher,)
        try:
            while True:
                watcher.wake.clear()
                while batch := await self._next(watcher.seq, read_older):
                    for event in batch:
                        while watcher.deltas and watcher.deltas[0][0] < event.seq:
                            for delta in _take_delta(watcher, watcher.deltas):
                                yield delta
                        watcher.seq = event.seq
                        yield event
                while watcher.deltas:
                    for delta in _take_delta(watcher, watcher.deltas):
                        yield delta
                if not watcher.wake.is_set():
                    if self.ended:
                        return
                    await watcher.wake.wait()
        finally:
            self.watchers = tuple(other for other in self.watchers if other is not watcher)

    async def _next(self, seq: int, read_older: ReadOlder) -> list[Event]:
        if seq + 1 < self.first:
            return await read_older(seq)
        return self.events[seq + 1 - self.first :]


def _take_delta(watcher: Watcher, deltas: deque[tuple[int, Delta]]) -> list[Delta]:
    """Take the next delta, and before it one that counts the dropped ones, if there are any."""
    _, delta = deltas.popleft()
    if not watcher.dropped:
        return [delta]
    dropped, watcher.dropped = watcher.dropped, 0
    return [Delta(delta.tree, delta.run, delta.path, delta.agent, "", "dropped", dropped), delta]
