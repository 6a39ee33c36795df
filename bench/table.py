"""One line of the result, and the stopwatch."""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """A measurement: its text with the unit, and the ratio with its limit, if it has one."""

    what: str
    measured: str
    ratio: float | None = None
    limit: float | None = None
    unit: str = "x"

    @property
    def is_over(self) -> bool:
        return self.ratio is not None and self.limit is not None and self.ratio > self.limit

    def text(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f} {self.unit}"
        limit = "" if self.limit is None else f"<= {self.limit:g}{'   OVER' if self.is_over else ''}"
        return f"{self.what:68} {self.measured:>14} {ratio:>9}  {limit}".rstrip()


def time_run(work: Callable[[], Coroutine[Any, Any, object]], *, times: int = 1) -> float:
    """Return the seconds of one run in a loop of its own, the mean of `times`. Older objects are kept out of the
    collector, as after start-up."""
    gc.collect()
    gc.freeze()
    started = time.perf_counter()
    for _ in range(times):
        asyncio.run(work())
    seconds = time.perf_counter() - started
    gc.unfreeze()
    return seconds / times


def compare(candidate: Callable[[], float], reference: Callable[[], float], *, rounds: int) -> tuple[float, float]:
    """Time both in turn. Returns the median seconds of the candidate and the median of the ratios.

    The speed of a shared machine changes within a minute, so only what ran side by side is comparable.
    """
    candidate(), reference()  # the first of each fills caches
    pairs = [(candidate(), reference()) for _ in range(rounds)]
    return statistics.median(one for one, _ in pairs), statistics.median(one / two for one, two in pairs)


def micros(seconds: float, count: int) -> str:
    return f"{seconds / count * 1e6:.1f} us"
