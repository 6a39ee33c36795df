"""Logs that wrap another log. `ForwardingLog` forwards everything; subclasses override the methods they observe or
change.

`FailingLog` is for crash tests: at a failpoint (RETINUE_FAILPOINT=POINT[:N], the N-th time) the process kills itself.
Every important step writes to the log, so the log is the place for failpoints. POINT is an event kind (right after
such an event is on disk, before anybody hears of it), `before-KIND` (right before such an event is written), or
`cleanup` (before the log is closed).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from retinue.concurrency import call_when_done
from retinue.core.errors import ConfigError
from retinue.core.events import KINDS, Event
from retinue.core.ports import Log
from retinue.files.failpoints import kill_own_process

BEFORE = "before-"
CLEANUP = "cleanup"


class ForwardingLog:
    """A log that forwards everything to the wrapped log. Closing it closes the wrapped log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        return self._log.append(event, wait)

    async def close(self) -> None:
        await self._log.close()


class FailingLog(ForwardingLog):
    """A log that forwards everything until the failpoint is reached, then kills the process."""

    def __init__(self, log: Log, point: str) -> None:
        super().__init__(log)
        self._point, _, times = point.partition(":")
        self._left = int(times or 1)
        if self._point != CLEANUP and self._point.removeprefix(BEFORE) not in KINDS:
            kinds = ", ".join(KINDS)
            raise ConfigError(
                f"RETINUE_FAILPOINT: there is no point '{self._point}'; available: {CLEANUP}, {BEFORE}KIND, {kinds}"
            )

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        if self._point not in (event.kind, BEFORE + event.kind):
            return self._log.append(event, wait)
        self._left -= 1
        if self._left:
            return self._log.append(event, wait)
        written = self._log.append(event, True) if self._point == event.kind else None
        if written is None:
            kill_own_process()
        call_when_done(written, lambda _: kill_own_process())
        return asyncio.get_running_loop().create_future() if wait else None  # never done: the process dies first

    async def close(self) -> None:
        if self._point == CLEANUP:
            kill_own_process()
        await self._log.close()
