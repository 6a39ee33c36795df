"""The live end of one tree's events. A watcher is a cursor: nothing is queued for it and nobody waits for it.

Written events come in through `publish`; the newest are kept here, older ones are read from where the log keeps
them. So a slow watcher costs nothing and misses nothing. Deltas go to a bounded queue per watcher that asked; what does
not fit is counted, and the watcher is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from retinue.core.events import Delta, Event, RunEnded, RunSpawned, decode

DELTAS_KEPT = 4096
_ENDED, _SPAWNED = b'"kind":"run.ended"', b'"kind":"run.spawned"'


def last_root(events: Iterable[Event]) -> tuple[int, bool]:
    """The run with whose ending a tree ends, and whether it has: the primary, or one that goes on after that."""
    root, ended = 0, False
    for event in events:
        if event.run == root and type(event.body) is RunEnded:
            ended = True
        elif ended and type(event.body) is RunSpawned:
            root, ended = event.run, False
    return root, ended


def root_of(lines: Iterable[bytes]) -> tuple[int, bool]:
    """The same from stored lines."""
    return last_root(decode(line) for line in lines if _ENDED in line or _SPAWNED in line)


class Watcher:
    """One cursor: the place it has reached, and the deltas it has not yet taken, each with the place it came after."""

    __slots__ = ("deltas", "dropped", "seq", "wake")

    def __init__(self, seq: int, *, deltas: bool) -> None:
        self.seq = seq
        self.deltas: deque[tuple[int, Delta]] | None = deque() if deltas else None
        self.dropped = 0
        self.wake: asyncio.Event = asyncio.Event()


class Feed:
    """Written events of one tree, newest last, the oldest kept being number `first`."""

    __slots__ = ("ended", "events", "first", "keep", "root", "watchers")

    def __init__(self, *, keep: int | None, first: int = 1) -> None:
        self.keep = keep
        self.first = first
        self.events: list[Event] = []
        self.watchers: tuple[Watcher, ...] = ()
        self.ended = False
        self.root = 0  # the run with whose ending nothing more comes

    def append(self, event: Event, _: bool = False, /) -> Awaitable[None] | None:
        """Of a log in memory, where what comes is written, and all of it is kept."""
        self.events.append(event)
        if self.watchers:
            self.announce(event)
        return None

    def publish(self, event: Event) -> None:
        self.events.append(event)
        if self.keep is not None and len(self.events) > 2 * self.keep:
            dropped = len(self.events) - self.keep
            del self.events[:dropped]
            self.first += dropped
        self.announce(event)

    def announce(self, event: Event) -> None:
        """Wakes whoever watches."""
        if event.run == self.root and type(event.body) is RunEnded:
            self.ended = True
        elif self.ended and type(event.body) is RunSpawned:  # it continues a run of a finished tree
            self.root, self.ended = event.run, False
        for watcher in self.watchers:
            watcher.wake.set()

    def show(self, delta: Delta) -> None:
        place = self.first + len(self.events) - 1
        for watcher in self.watchers:
            if watcher.deltas is not None:
                watcher.deltas.append((place, delta))
                if len(watcher.deltas) > DELTAS_KEPT:
                    watcher.deltas.popleft()
                    watcher.dropped += 1
                watcher.wake.set()

    async def watch(
        self, *, after: int, deltas: bool, older: Callable[[int], list[Event]]
    ) -> AsyncGenerator[Event | Delta]:
        """Events after that place and then live ones, until the tree has ended. `older` reads what is not kept here."""
        watcher = Watcher(after, deltas=deltas)
        self.watchers += (watcher,)
        if self.keep is None:  # all events are here, and none was announced while nobody watched
            self.root, self.ended = last_root(self.events)
        try:
            while True:
                watcher.wake.clear()
                while batch := self._next(watcher.seq, older):
                    for event in batch:
                        while watcher.deltas and watcher.deltas[0][0] < event.seq:
                            for delta in _taken(watcher, watcher.deltas):
                                yield delta
                        watcher.seq = event.seq
                        yield event
                while watcher.deltas:
                    for delta in _taken(watcher, watcher.deltas):
                        yield delta
                if self.ended and not self._next(watcher.seq, older):
                    return
                if not watcher.wake.is_set():
                    await watcher.wake.wait()
        finally:
            self.watchers = tuple(other for other in self.watchers if other is not watcher)

    def _next(self, seq: int, older: Callable[[int], list[Event]]) -> list[Event]:
        if seq + 1 < self.first:
            return older(seq)
        return self.events[seq + 1 - self.first :]


def _taken(watcher: Watcher, deltas: deque[tuple[int, Delta]]) -> list[Delta]:
    """The next delta, and before it how many there is no trace of."""
    _, delta = deltas.popleft()
    if not watcher.dropped:
        return [delta]
    dropped, watcher.dropped = watcher.dropped, 0
    return [Delta(delta.tree, delta.run, delta.path, delta.agent, "", "dropped", dropped), delta]
