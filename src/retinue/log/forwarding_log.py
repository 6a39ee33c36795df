"""A log around another log, for whoever wants to see what passes. It does nothing of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from retinue.core.events import Delta, Event
from retinue.core.ports import Log


class Wrapped:
    """Closing it closes the log inside."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.ahead = log.ahead

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        return self._log.append(event, wait)

    def appender(self, tree: str) -> Callable[[Event, bool], Awaitable[None] | None]:
        return self.append

    def show(self, delta: Delta) -> None:
        self._log.show(delta)

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        return self._log.watch(tree, after=after, deltas=deltas)

    def read(self, tree: str, *, after: int = 0) -> list[Event]:
        return self._log.read(tree, after=after)

    def trees(self) -> list[str]:
        return self._log.trees()

    async def close(self) -> None:
        await self._log.close()
