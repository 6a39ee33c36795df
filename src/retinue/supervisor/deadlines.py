"""The wall clock of one run, which stands still while a person is being waited for."""

from __future__ import annotations

from collections.abc import Callable

from retinue.core.ports import Clock, Timer


class Deadline:
    """Calls `expired` once, when the run has been running (not waiting for a person) for `seconds`."""

    __slots__ = ("_clock", "_expired", "_left", "_pauses", "_since", "_stopped", "_timer")

    def __init__(self, seconds: float, clock: Clock, expired: Callable[[], None]) -> None:
        self._clock = clock
        self._expired = expired
        self._left = seconds
        self._pauses = 0
        self._stopped = False
        self._since = clock.monotonic()
        self._timer: Timer | None = clock.call_later(seconds, expired)

    @property
    def left(self) -> float:
        """Seconds until it expires, if it is not paused."""
        return self._left if self._timer is None else self._left - (self._clock.monotonic() - self._since)

    def pause(self) -> None:
        self._pauses += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left -= self._clock.monotonic() - self._since

    def resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and not self._stopped:
            self._since = self._clock.monotonic()
            self._timer = self._clock.call_later(max(0.0, self._left), self._expired)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
