"""A log around another log. It forwards everything; subclasses override what they want to see or change."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from retinue.core.events import Event
from retinue.core.ports import Log


class ForwardingLog:
    """Closing it closes the log inside."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        return self._log.append(event, wait)

    async def close(self) -> None:
        await self._log.close()
