"""The model that asks another model again after a failed call. Nothing else in Retinue retries model calls.

All runs on one model share its back-off: until it is over no run calls the model, so twenty children do not each call
an overloaded provider. The waits use the Clock, so tests control time. The usage of failed attempts is added to the
usage of the reply; within a budget each attempt is reserved like a call. Text already shown by a failed attempt stays
shown.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import msgspec

from retinue.core.errors import CallCancelled, Limited, ModelError
from retinue.core.messages import Model, Reply, Request, can_search_web, close_model, get_model_name
from retinue.core.ports import Clock
from retinue.core.usage import NO_USAGE

ATTEMPTS = 6
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 30.0
LONGEST_ASKED_SECONDS = 600.0
SPREAD_SECONDS = 0.5


class RetryingModel:
    """A wrapper around another model that makes up to ATTEMPTS calls for one request. It gives up if the provider asks
    for a wait of more than LONGEST_ASKED_SECONDS. It has the name and the web search of the other model, and closes
    it."""

    def __init__(self, model: Model, clock: Clock, *, chance: Callable[[], float] = random.random) -> None:
        self._model = model
        self.name = get_model_name(model)
        self._clock = clock
        self._chance = chance
        self._closed_until = 0.0

    def can_search_web(self, *, domains: bool) -> bool:
        return can_search_web(self._model, domains=domains)

    async def aclose(self) -> None:
        await close_model(self._model)

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        spent, notice, estimated = NO_USAGE, "", False
        for attempt in itertools.count(1):
            try:
                if notice:
                    if request.again is not None:
                        await request.again(spent, estimated=estimated)
                    on_delta("retry", notice)
                await self._wait_for_back_off()
                reply = await self._model.complete(request, on_delta)
            except asyncio.CancelledError:
                if spent == NO_USAGE:
                    raise
                raise CallCancelled(spent, estimated=estimated) from None
            except (CallCancelled, Limited) as error:
                error.add_usage(spent, estimated=estimated)
                raise
            except ModelError as error:
                error.add_usage(spent, estimated=estimated)
                spent, estimated = error.usage, error.estimated
                seconds = self._choose_delay(error, attempt)
                if seconds is None:
                    _explain_end(error, attempt)
                    raise
                self._closed_until = max(self._closed_until, self._clock.monotonic() + seconds)
                if error.status is not None:  # the provider answered, so the next call needs a new idempotency key
                    request = msgspec.structs.replace(request, attempt=attempt)
                notice = f"{error}; asking again in {seconds:.0f} s (attempt {attempt + 1})"
            else:
                if spent == NO_USAGE:
                    return reply
                whole = spent + reply.usage
                return msgspec.structs.replace(reply, usage=whole, estimated=estimated or reply.estimated)
        raise AssertionError("unreachable")

    async def _wait_for_back_off(self) -> None:
        """Wait until the back-off is over. A random extra wait spreads the calls."""
        while (seconds := self._closed_until - self._clock.monotonic()) > 0:
            await self._clock.sleep(seconds + SPREAD_SECONDS * self._chance())

    def _choose_delay(self, error: ModelError, attempt: int) -> float | None:
        """Return the seconds until the next attempt, never less than the provider asked for, or None to give up."""
        if not error.transient or attempt >= ATTEMPTS:
            return None
        if error.retry_after is not None:
            return None if error.retry_after > LONGEST_ASKED_SECONDS else max(error.retry_after, FIRST_SECONDS / 2)
        grown = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** (attempt - 1))
        return grown * (0.5 + self._chance() / 2)


def _explain_end(error: ModelError, attempts: int) -> None:
    """Add to an error how many attempts were made, if several, and why there are no more, if the provider asked for a
    longer wait than allowed."""
    text = f"{error}; given up after {attempts} attempts" if attempts > 1 else str(error)
    if error.transient and error.retry_after is not None and error.retry_after > LONGEST_ASKED_SECONDS:
        asked, longest = round(error.retry_after), round(LONGEST_ASKED_SECONDS)
        text = f"{text}; not retried: the provider asks to wait {asked} s, and {longest} s is the longest wait"
    error.args = (text,)
