"""Logs around another log. `ForwardingLog` forwards everything; subclasses override what they want to see or change.

`FailingLog` is for tests of crashes, since everything that matters passes through the log: at a failpoint
(RETINUE_FAILPOINT=POINT[:N], the N-th time) this process kills itself. A point is an event kind, right after such an
event is on disk (nobody has been told yet); `before-KIND`, right before one is written; or `cleanup`, before the log is
closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from typing import Any, NoReturn

from retinue.concurrency import call_when_done
from retinue.core.errors import ConfigError
from retinue.core.events import KINDS, Event
from retinue.core.ports import Log

BEFORE = "before-"
CLEANUP = "cleanup"


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


class FailingLog(ForwardingLog):
    """Another log, until the point is reached."""

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
            _die()
        call_when_done(written, lambda _: _die())
        return asyncio.get_running_loop().create_future() if wait else None

    async def close(self) -> None:
        if self._point == CLEANUP:
            _die()
        await self._log.close()


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit  # never: no process outlives that signal
