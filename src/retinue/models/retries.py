"""Asks a model again when its provider says it may work later. A Model around a Model; the only place that retries.

All runs on one model share one back-off: while it lasts nobody calls, so that a provider that is overloaded is not
asked by twenty children in turn. Waits on the Clock, so that a test owns the time. What failed attempts spent is added
to the one usage that comes back; within a budget each attempt is reserved for like a call. Pieces of text that a failed
attempt showed are not taken back: they were only shown.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import msgspec

from retinue.core.errors import CallCancelled, Limited, ModelError
from retinue.core.messages import Reply, Request
from retinue.core.ports import Clock, Model
from retinue.core.usage import NO_USAGE

ATTEMPTS = 6
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 30.0
LONGEST_ASKED_SECONDS = 600.0
SPREAD_SECONDS = 0.5


class Retrying:
    """`attempts` bounds the calls for one request. A provider that wants more than ten minutes is not waited for."""

    def __init__(
        self, model: Model, clock: Clock, *, attempts: int = ATTEMPTS, chance: Callable[[], float] = random.random
    ) -> None:
        self._model = model
        self._clock = clock
        self._attempts = attempts
        self._chance = chance
        self._closed_until = 0.0
        self.name: str = getattr(model, "name", type(model).__name__)

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        spent, told = NO_USAGE, ""
        for attempt in itertools.count(1):
            try:
                if told:
                    if request.again is not None:
                        await request.again(spent)
                    on_delta("retry", told)
                await self._turn()
                reply = await self._model.complete(request, on_delta)
            except asyncio.CancelledError:
                if spent == NO_USAGE:
                    raise
                raise CallCancelled(spent, estimated=False) from None
            except CallCancelled as error:
                error.usage = spent + error.usage
                raise
            except Limited as error:
                error.usage = spent
                raise
            except ModelError as error:
                spent = error.usage = spent + error.usage
                seconds = self._back_off(error, attempt)
                if seconds is None:
                    raise
                self._closed_until = max(self._closed_until, self._clock.monotonic() + seconds)
                if error.status is not None:  # it was answered: the next call is another one
                    request = msgspec.structs.replace(request, attempt=attempt)
                told = f"{error}; asking again in {seconds:.0f} s (attempt {attempt + 1})"
            else:
                return reply if spent == NO_USAGE else msgspec.structs.replace(reply, usage=spent + reply.usage)
        raise AssertionError("unreachable")

    def searches(self, *, domains: bool) -> bool:
        searches = getattr(self._model, "searches", None)
        return searches is not None and bool(searches(domains=domains))

    async def aclose(self) -> None:
        close = getattr(self._model, "aclose", None)
        if close is not None:
            await close()

    async def _turn(self) -> None:
        """Waits until nobody is told to wait; those who waited do not all start at the same moment."""
        while (seconds := self._closed_until - self._clock.monotonic()) > 0:
            await self._clock.sleep(seconds + SPREAD_SECONDS * self._chance())

    def _back_off(self, error: ModelError, attempt: int) -> float | None:
        """Seconds until the next attempt; None when there is none. Never less than the provider asked for."""
        if not error.transient or attempt >= self._attempts:
            return None
        if error.retry_after is not None:
            return None if error.retry_after > LONGEST_ASKED_SECONDS else max(error.retry_after, FIRST_SECONDS / 2)
        grown = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** (attempt - 1))
        return grown * (0.5 + self._chance() / 2)
