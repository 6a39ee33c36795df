"""Time as the event loop has it. A test puts its own in this place (`retinue.testing.ManualClock`).

Nearly every run sets an alarm that never goes off: its deadline. As timers of the loop they would all lie in the heap
it sorts its short sleeps in, and every turn of the loop would pay for them. So alarms have a heap of their own, and the
loop has one timer, for the next of them.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

import msgspec

CANCELLED_KEPT = 256


class Alarm(msgspec.Struct, order=True):
    """One alarm of a clock. They are in order of time, those of one time in the order they were set."""

    due: float
    number: int
    clock: SystemClock
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self.clock.forget_one()


class SystemClock:
    """Deadlines run on the monotonic clock; the wall clock only dates events. Belongs to one event loop."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)

    def __init__(self) -> None:
        self._due: list[Alarm] = []
        self._made = 0
        self._cancelled = 0
        self._timer: asyncio.TimerHandle | None = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        self._made += 1
        alarm = Alarm(time.monotonic() + seconds, self._made, self, callback)
        heapq.heappush(self._due, alarm)
        if self._due[0] is alarm or self._timer is None:
            self._set_timer()
        return alarm

    def forget_one(self) -> None:
        """An alarm was cancelled; when most of those kept are, the heap is made anew."""
        self._cancelled += 1
        if self._cancelled > CANCELLED_KEPT and self._cancelled > len(self._due) // 2:
            self._due = [alarm for alarm in self._due if alarm.callback is not None]
            heapq.heapify(self._due)
            self._cancelled = 0

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait = max(0.0, self._due[0].due - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = time.monotonic()
        try:
            while self._due and self._due[0].due <= now:
                alarm = heapq.heappop(self._due)
                callback, alarm.callback = alarm.callback, None
                if callback is None:
                    self._cancelled = max(0, self._cancelled - 1)
                else:
                    callback()
        finally:  # one that breaks must not take the others with it
            if self._due and self._timer is None:
                self._set_timer()
