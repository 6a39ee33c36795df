"""One line of the result, and the stop watch."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """What was measured, as text with its unit, and the ratio with the limit it must hold, where it has one."""

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


def best(work: Callable[[], Coroutine[Any, Any, object]], *, times: int) -> float:
    """Seconds of the fastest of several runs. What exists before is kept out of the collector, as after start-up."""
    fastest = float("inf")
    for _ in range(times):
        gc.collect()
        gc.freeze()
        started = time.perf_counter()
        asyncio.run(work())
        fastest = min(fastest, time.perf_counter() - started)
        gc.unfreeze()
    return fastest


def micros(seconds: float, count: int) -> str:
    return f"{seconds / count * 1e6:.1f} us"
