"""The stall budget of one run: how long nothing at all may happen in it and below it.

Any event and any delta of the subtree counts as happening. Waiting for a person, for a slot or for the budget does
not count, nor does time in which this process itself did not run: then the timer is late, and counting starts again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from retinue.core.events import Body, Warned
from retinue.core.ports import Clock, Timer

if TYPE_CHECKING:
    from retinue.supervisor.nodes import Node

LATE_SECONDS = 1.0


def stall_of(
    node: Node, seconds: float | UnsetType | None, clock: Clock, write: Callable[[Node, Body], object]
) -> Stall | None:
    """The stall budget of a run, which is its parent's when nothing is said; without one, but below one, what tells
    that one of life here; or nothing."""
    above = None if node.parent is None else node.parent.stall
    if seconds is UNSET:
        seconds = None if above is None else above.seconds
    if seconds is None and above is None:
        return None
    text = f"stalled: nothing has happened in it for {seconds or 0:g} s; it ends after as long again"
    warn = partial(write, node, Warned(text, code="stalled"))
    return Stall(seconds, clock, above=above, queued=node.queued_below, warn=warn, give_up=node.time_out)


class Stall:
    """Calls `warn` after `seconds` of nothing, and `give_up` after as many again. Without `seconds` it only passes on
    to the one above it that something happened."""

    __slots__ = ("_above", "_clock", "_due", "_give_up", "_last", "_pauses", "_queued", "_timer", "_warn", "_warned",
                 "over", "seconds")  # fmt: skip

    def __init__(
        self,
        seconds: float | None,
        clock: Clock,
        *,
        above: Stall | None,
        queued: Callable[[], bool],
        warn: Callable[[], object],
        give_up: Callable[[], None],
    ) -> None:
        self.seconds = seconds
        self.over = False
        self._above = above
        self._clock = clock
        self._queued = queued
        self._warn = warn
        self._give_up = give_up
        self._warned = False
        self._pauses = 0
        self._last = self._due = 0.0
        self._timer: Timer | None = None

    def start(self) -> None:
        if self.seconds is not None:
            self._begin_again(self.seconds)

    def touch(self) -> None:
        """Something happened."""
        now = self._clock.monotonic()
        stall: Stall | None = self
        while stall is not None:
            stall._last, stall._warned = now, False
            stall = stall._above

    def pause(self) -> None:
        self._pauses += 1
        self._cancel()

    def resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self.seconds is not None:
            self._begin_again(self.seconds)

    def stop(self) -> None:
        self._pauses = 1  # a late resume must not start it again
        self.seconds = None
        self._cancel()

    def _begin_again(self, seconds: float) -> None:
        self._last = self._clock.monotonic()
        self._warned = False
        self._schedule(seconds)

    def _schedule(self, seconds: float) -> None:
        self._due = self._clock.monotonic() + seconds
        self._timer = self._clock.call_later(seconds, self._look)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self.seconds is None:
            return
        now = self._clock.monotonic()
        left = self._last + self.seconds - now
        if now - self._due > LATE_SECONDS or self._queued():
            self._begin_again(self.seconds)
        elif left > 0:
            self._schedule(left)
        elif self._warned:
            self.over = True
            self._give_up()
        else:
            self._warn()  # which itself is an event, so that those above see something happen
            self._last, self._warned = now, True
            self._schedule(self.seconds)
