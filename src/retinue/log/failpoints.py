"""Points at which this process kills itself, for tests of crashes: RETINUE_FAILPOINT=NAME[:N], the N-th time.

Loaded only when that is set: a log around the log, since everything that matters passes through it. A point is right
after an event of that kind is on disk (nobody has been told yet), or right before one is written.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn

from retinue.core.errors import ConfigError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Message,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    UsageReported,
)
from retinue.core.ports import Log
from retinue.log.forwarding_log import ForwardingLog

AFTER: dict[str, type] = {
    "spawn_logged": RunSpawned,
    "run_started": RunStarted,
    "run_resumed": RunResumed,
    "turn_started": TurnStarted,
    "message_logged": Message,
    "reply_logged": UsageReported,
    "tool_call_logged": ToolCall,
    "tool_started": ToolStarted,
    "result_logged": ToolResult,
    "turn_ended": TurnEnded,
    "approval_asked": ApprovalAsked,
    "approval_answered": ApprovalDecided,
    "run_ended": RunEnded,
}
BEFORE: dict[str, Callable[[Event], bool]] = {
    "tool_done": lambda event: type(event.body) is ToolResult,
    "cancel_sent": lambda event: isinstance(event.body, RunEnded) and event.body.status == "cancelled",
}
CLEANUP = "cleanup"
POINTS = (*AFTER, *BEFORE, CLEANUP)


class FailingLog(ForwardingLog):
    """Another log, until the point is reached."""

    def __init__(self, log: Log, point: str) -> None:
        super().__init__(log)
        name, _, times = point.partition(":")
        if name not in POINTS:
            raise ConfigError(f"RETINUE_FAILPOINT: there is no point '{name}'; there is {', '.join(POINTS)}")
        self._point = name
        self._left = int(times or 1)

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        if self._point in BEFORE and BEFORE[self._point](event) and self._reached():
            _die()
        if type(event.body) is AFTER.get(self._point) and self._reached():
            written = self._log.append(event, True)
            if written is None:
                _die()
            asyncio.ensure_future(written).add_done_callback(lambda _: _die())
            return asyncio.get_running_loop().create_future() if wait else None
        return self._log.append(event, wait)

    def _reached(self) -> bool:
        self._left -= 1
        return self._left == 0

    async def close(self) -> None:
        if self._point == CLEANUP:
            _die()
        await self._log.close()


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit  # never: no process outlives that signal
