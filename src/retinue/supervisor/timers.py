"""The stall timer of a run. Knows no run; what happens on expiry is a callback."""

from __future__ import annotations

from collections.abc import Callable

from retinue.core.ports import Clock, Timer

LATE_SECONDS = 1.0


class StallTimer:
    """Calls `warn` after `seconds` without activity, and `on_expire` after as many again.

    Activity of a run counts for the timers of all runs above it (`parent`). Without `seconds` the timer only reports
    activity upward. Time does not count while the timer is paused, while `is_queued` says that a slot is waited for,
    and while this process itself did not run: then the callback is late, and counting starts again."""

    __slots__ = ("_clock", "_due", "_is_queued", "_last", "_on_expire", "_parent", "_pauses", "_timer", "_warn",
                 "_warned", "expired", "seconds")  # fmt: skip

    def __init__(
        self,
        seconds: float | None,
        clock: Clock,
        *,
        parent: StallTimer | None,
        is_queued: Callable[[], bool],
        warn: Callable[[], object],
        on_expire: Callable[[], None],
    ) -> None:
        self.seconds = seconds
        self.expired = False
        self._parent = parent
        self._clock = clock
        self._is_queued = is_queued
        self._warn = warn
        self._on_expire = on_expire
        self._warned = False
        self._pauses = 0
        self._last = self._due = 0.0
        self._timer: Timer | None = None

    def start(self) -> None:
        if self.seconds is not None:
            self._restart(self.seconds)

    def record_activity(self) -> None:
        now = self._clock.monotonic()
        timer: StallTimer | None = self
        while timer is not None:
            timer._last, timer._warned = now, False
            timer = timer._parent

    def pause(self) -> None:
        self._pauses += 1
        self._cancel()

    def resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self.seconds is not None:
            self._restart(self.seconds)

    def stop(self) -> None:
        self._pauses = 1  # a late resume must not start it again
        self.seconds = None
        self._cancel()

    def _restart(self, seconds: float) -> None:
        self._last = self._clock.monotonic()
        self._warned = False
        self._schedule(seconds)

    def _schedule(self, seconds: float) -> None:
        self._due = self._clock.monotonic() + seconds
        self._timer = self._clock.call_later(seconds, self._check)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self.seconds is None:
            return
        now = self._clock.monotonic()
        left = self._last + self.seconds - now
        if now - self._due > LATE_SECONDS or self._is_queued():
            self._restart(self.seconds)
        elif left > 0:
            self._schedule(left)
        elif self._warned:
            self.expired = True
            self._on_expire()
        else:
            self._warn()  # the warning is an event, so it counts as activity of the runs above
            self._last, self._warned = now, True
            self._schedule(self.seconds)
