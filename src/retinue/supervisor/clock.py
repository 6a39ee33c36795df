"""Time as the event loop has it. A test puts its own in this place (`retinue.testing.ManualClock`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class SystemClock:
    """Deadlines run on the monotonic clock; the wall clock only dates events."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, callback)

    sleep = staticmethod(asyncio.sleep)
