"""The live end of one tree's events. A watcher is a cursor: nothing is queued for it and nobody waits for it.

Written events come in through `publish`; the newest are kept here, older ones are read from where the log keeps
them. So a slow watcher costs nothing and misses nothing. Deltas go to a bounded queue per watcher that asked; what does
not fit is counted, and the watcher is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable

from retinue.core.events import Delta, Event, RunEnded

DELTAS_KEPT = 4096


def ends(event: Event) -> bool:
    """Whether it is the last one of its tree."""
    return event.run == 0 and type(event.body) is RunEnded


class Watcher:
    """One cursor: the place it has reached, and the deltas it has not yet taken."""

    __slots__ = ("deltas", "dropped", "seq", "wake")

    def __init__(self, seq: int, *, deltas: bool) -> None:
        self.seq = seq
        self.deltas: deque[Delta] | None = deque() if deltas else None
        self.dropped = 0
        self.wake: asyncio.Event = asyncio.Event()


class Feed:
    """Written events of one tree, newest last, the oldest kept being number `first`."""

    __slots__ = ("ended", "events", "first", "keep", "watchers")

    def __init__(self, *, keep: int | None, first: int = 1) -> None:
        self.keep = keep
        self.first = first
        self.events: list[Event] = []
        self.watchers: tuple[Watcher, ...] = ()
        self.ended = False

    def publish(self, event: Event) -> None:
        self.events.append(event)
        if self.keep is not None and len(self.events) > 2 * self.keep:
            dropped = len(self.events) - self.keep
            del self.events[:dropped]
            self.first += dropped
        self.announce(event)

    def announce(self, event: Event) -> None:
        """Wakes whoever watches."""
        if ends(event):
            self.ended = True
        for watcher in self.watchers:
            watcher.wake.set()

    def show(self, delta: Delta) -> None:
        for watcher in self.watchers:
            if watcher.deltas is not None:
                watcher.deltas.append(delta)
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
        if self.events and ends(self.events[-1]):
            self.ended = True
        try:
            while True:
                watcher.wake.clear()
                while batch := self._next(watcher.seq, older):
                    for event in batch:
                        watcher.seq = event.seq
                        yield event
                while watcher.deltas:
                    delta = watcher.deltas.popleft()
                    if watcher.dropped:
                        dropped, watcher.dropped = watcher.dropped, 0
                        yield Delta(delta.tree, delta.run, delta.path, delta.agent, "", "dropped", dropped)
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
