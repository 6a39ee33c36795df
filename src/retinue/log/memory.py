"""The log in memory: what is appended is written. Gone with the process, and says nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

from retinue.core.events import Delta, Event
from retinue.log.feed import Feed


class MemoryLog:
    """Events by tree. `watch` and `read` of an unknown tree see it as empty."""

    durable = False
    ahead = True

    def __init__(self) -> None:
        self._feeds: defaultdict[str, Feed] = defaultdict(partial(Feed, keep=None))

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        return self._feeds[event.tree].append(event, wait)

    def appender(self, tree: str) -> Callable[[Event, bool], Awaitable[None] | None]:
        return self._feeds[tree].append

    def show(self, delta: Delta) -> None:
        feed = self._feeds.get(delta.tree)
        if feed is not None:
            feed.show(delta)

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        feed = self._feeds.get(tree)
        if feed is None:
            return self._watch_unknown(tree, after, deltas=deltas)
        return feed.watch(after=after, deltas=deltas, older=lambda seq: self.read(tree, after=seq))

    async def _watch_unknown(self, tree: str, after: int, *, deltas: bool) -> AsyncGenerator[Event | Delta]:
        """Waits for a tree to begin; when none has, nothing of the waiting is kept."""
        feed = self._feeds[tree]
        watching = feed.watch(after=after, deltas=deltas, older=lambda seq: self.read(tree, after=seq))
        try:
            async with aclosing(watching):
                async for event in watching:
                    yield event
        finally:
            if not feed.events and not feed.watchers:
                self._feeds.pop(tree, None)

    def read(self, tree: str, *, after: int = 0) -> list[Event]:
        feed = self._feeds.get(tree)
        return [] if feed is None else feed.events[max(after, 0) :]

    def trees(self) -> list[str]:
        return [tree for tree, feed in self._feeds.items() if feed.events]

    async def close(self) -> None:
        """Nothing is held."""
