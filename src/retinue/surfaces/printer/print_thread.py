"""Printing in a thread of its own, for a stream that may block: in order, a little behind, and never far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

AHEAD = 64


class Behind:
    """Work is handed over without waiting for it; only one who is far ahead waits, or one who asks for all of it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._last: Future[Any] | None = None
        self._given = 0
        self._closed = False

    def submit(self, work: Callable[..., object], *args: object) -> None:
        """Nothing is taken any more once it is closed: the screen has had its last words."""
        if not self._closed:
            self._last = self._thread.submit(work, *args)

    async def do(self, work: Callable[..., object], *args: object) -> None:
        self.submit(work, *args)
        self._given += 1
        if self._given % AHEAD == 0:
            await self.done()

    async def done(self) -> None:
        """Until all that was handed over is done."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))

    def close(self) -> None:
        """Waits for nobody: what still blocks ends with the process."""
        self._closed = True
        self._thread.shutdown(wait=False)
