"""Test tools for agents: a scripted model, a manual clock, fixed prices, approvers, and a log in memory."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from retinue.concurrency import SystemClock
from retinue.config.scripts import parse_script
from retinue.core.approvals import Allow, Approval, Deny
from retinue.core.ports import Clock
from retinue.core.usage import Usage
from retinue.log.memory import MemoryLog
from retinue.models.scripted import ScriptedModel

__all__ = ["FixedPrices", "ManualClock", "MemoryLog", "allow_all", "deny_all", "scripted"]


def scripted(agents: dict[str, Any], *, strict: bool = False, clock: Clock | None = None) -> ScriptedModel:
    """Return a model that gives the replies in `agents`, which has the format of a script file."""
    return ScriptedModel(parse_script({"agents": agents, "strict": strict}), clock or SystemClock())


class FixedPrices:
    """Prices from a table: for each model the US dollars for a million input and output tokens. `*` is any model."""

    def __init__(self, table: dict[str, tuple[str, str]]) -> None:
        self._table = {model: (Decimal(given), Decimal(got)) for model, (given, got) in table.items()}

    def price(self, model: str, usage: Usage) -> Decimal | None:
        found = self._table.get(model) or self._table.get("*")
        if found is None:
            return None
        return (usage.input_tokens * found[0] + usage.output_tokens * found[1]) / 1_000_000


async def allow_all(question: Approval) -> Allow | Deny:
    """Allow every call, as an approver."""
    return Allow()


async def deny_all(question: Approval) -> Allow | Deny:
    """Deny every call, as an approver."""
    return Deny("denied by the test")


class _Timer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """A clock that moves only in `advance`. Due timers fire in order, and the tasks they wake run before the next."""

    def __init__(self, *, wall: float = 1_700_000_000.0) -> None:
        self._now = 0.0
        self._wall = wall
        self._due: list[tuple[float, int, _Timer]] = []
        self._ids = itertools.count()

    def wall(self) -> float:
        return self._wall + self._now

    def monotonic(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> _Timer:
        timer = _Timer(callback)
        heapq.heappush(self._due, (self._now + seconds, next(self._ids), timer))
        return timer

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        over = asyncio.Event()
        timer = self.call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            timer.cancel()

    async def advance(self, seconds: float) -> None:
        """Move the time forward by `seconds`, and fire every timer that becomes due."""
        end = self._now + seconds
        await self.settle()
        while self._due and self._due[0][0] <= end:
            when, _, timer = heapq.heappop(self._due)
            self._now = max(self._now, when)
            if timer.callback is not None:
                timer.callback()
                await self.settle()
        self._now = end
        await self.settle()

    @staticmethod
    async def settle() -> None:
        """Let all tasks run that are ready."""
        for _ in range(50):
            await asyncio.sleep(0)
