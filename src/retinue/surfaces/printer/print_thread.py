"""A thread that prints, for a stream that may block: in order, and at most a few pieces behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

AHEAD = 64


class PrintThread:
    """Does work in order, in one thread of its own."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._last: Future[Any] | None = None
        self._enqueued = 0
        self._closed = False

    def submit(self, work: Callable[..., object], *args: object) -> None:
        """Hand work over without waiting. Does nothing once the thread is closed."""
        if not self._closed:
            self._last = self._thread.submit(work, *args)

    async def enqueue(self, work: Callable[..., object], *args: object) -> None:
        """Hand work over, and now and then wait until all is done, so that the thread is never far behind."""
        self.submit(work, *args)
        self._enqueued += 1
        if self._enqueued % AHEAD == 0:
            await self.drain()

    async def drain(self) -> None:
        """Wait until all work that was handed over is done."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))

    def close(self) -> None:
        """Take no more work. Does not wait: a write that still blocks ends with the process."""
        self._closed = True
        self._thread.shutdown(wait=False)
