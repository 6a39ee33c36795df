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

CANCELLED_KEPT = 256


class Alarm:
    """One alarm of a clock."""

    __slots__ = ("_clock", "callback")

    def __init__(self, clock: SystemClock, callback: Callable[[], None]) -> None:
        self._clock = clock
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self._clock.forget_one()


class SystemClock:
    """Deadlines run on the monotonic clock; the wall clock only dates events. Belongs to one event loop."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Alarm]] = []
        self._made = 0
        self._cancelled = 0
        self._timer: asyncio.TimerHandle | None = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        alarm = Alarm(self, callback)
        self._made += 1
        entry = (time.monotonic() + seconds, self._made, alarm)
        heapq.heappush(self._due, entry)
        if self._due[0] is entry or self._timer is None:
            self._set_timer()
        return alarm

    def forget_one(self) -> None:
        """An alarm was cancelled; when most of those kept are, the heap is made anew."""
        self._cancelled += 1
        if self._cancelled > CANCELLED_KEPT and self._cancelled > len(self._due) // 2:
            self._due = [entry for entry in self._due if entry[2].callback is not None]
            heapq.heapify(self._due)
            self._cancelled = 0

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait = max(0.0, self._due[0][0] - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._ring)

    def _ring(self) -> None:
        self._timer = None
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            alarm = heapq.heappop(self._due)[2]
            callback, alarm.callback = alarm.callback, None
            if callback is None:
                self._cancelled = max(0, self._cancelled - 1)
            else:
                callback()
        if self._due and self._timer is None:
            self._set_timer()
