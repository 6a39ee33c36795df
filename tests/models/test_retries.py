"""Asking again: what, how often, how long after, and what all runs on a model share. Time is the test's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest

from retinue.core.errors import ModelError, StreamCut
from retinue.core.messages import Reply, Request
from retinue.core.usage import Usage
from retinue.models.retrying import ATTEMPTS, RetryingModel
from retinue.testing import ManualClock
from tests.models import streams
from tests.models.kit import CLAUDE, Heard, provider, request, serving
from tests.models.server import Answer, refusal

BUSY = ModelError("busy", status=503, usage=Usage(5, 1), transient=True)


class Failing:
    """A model that fails as scripted, then answers, and records the times of its calls."""

    def __init__(self, clock: ManualClock, *errors: ModelError) -> None:
        self.asked: list[float] = []
        self._clock = clock
        self._errors = list(errors)

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        self.asked.append(self._clock.monotonic())
        await asyncio.sleep(0)  # others ask meanwhile
        if self._errors:
            error = self._errors.pop(0)
            raise type(error)(str(error), usage=error.usage, transient=error.transient, retry_after=error.retry_after)
        return Reply("ok", usage=Usage(10, 7))


class Searching(Failing):
    """A model that can search the web, but not restrict the search to given hosts."""

    def can_search_web(self, *, domains: bool) -> bool:
        return not domains


def test_a_model_that_is_asked_again_can_search_the_web() -> None:
    clock = ManualClock()
    model = RetryingModel(Searching(clock), clock)
    assert model.can_search_web(domains=False) and not model.can_search_web(domains=True)
    assert not RetryingModel(Failing(clock), clock).can_search_web(domains=False)


async def finished(asking: asyncio.Task[Reply], clock: ManualClock) -> Reply:
    while not asking.done():
        await clock.advance(1)
    return await asking


async def test_the_back_off_grows_and_usage_is_added_up_once() -> None:
    clock, heard = ManualClock(), Heard()
    failing = Failing(clock, BUSY, BUSY, BUSY, BUSY, BUSY)
    model = RetryingModel(failing, clock, chance=lambda: 1.0)
    reply = await finished(asyncio.create_task(model.complete(request(), heard)), clock)
    assert reply == Reply("ok", usage=Usage(35, 12))
    waits = [after - before for before, after in zip(failing.asked, failing.asked[1:], strict=False)]
    assert waits == [1.5, 2.5, 4.5, 8.5, 16.5]
    assert heard.of("retry")[0] == "Server error (503): busy; asking again in 1 s (attempt 2)"
    assert len(heard.pieces) == 5


async def test_a_failure_says_how_many_attempts_were_made() -> None:
    clock = ManualClock()
    failing = Failing(clock, *[BUSY] * 6)
    model = RetryingModel(failing, clock)
    with pytest.raises(ModelError, match=re.escape("Server error (503): busy; given up after 6 attempts")):
        await finished(asyncio.create_task(model.complete(request(), Heard())), clock)
    with pytest.raises(ModelError) as refused:
        await RetryingModel(Failing(clock, ModelError("no")), clock).complete(request(), Heard())
    assert str(refused.value) == "no"


async def test_jitter_never_makes_it_less_than_half() -> None:
    clock = ManualClock()
    failing = Failing(clock, BUSY)
    await finished(
        asyncio.create_task(RetryingModel(failing, clock, chance=lambda: 0.0).complete(request(), Heard())), clock
    )
    assert failing.asked == [0.0, 0.5]


async def test_there_is_an_end() -> None:
    clock = ManualClock()
    failing = Failing(clock, *[BUSY] * 99)
    with pytest.raises(ModelError) as raised:
        await finished(asyncio.create_task(RetryingModel(failing, clock).complete(request(), Heard())), clock)
    assert len(failing.asked) == ATTEMPTS
    assert raised.value.usage == Usage(5 * ATTEMPTS, ATTEMPTS)


@pytest.mark.parametrize(
    "error",
    [
        ModelError("no", status=400),
        ModelError("no such script"),
        ModelError("come back tomorrow", status=429, transient=True, retry_after=86_400),
    ],
)
async def test_what_is_not_asked_again(error: ModelError) -> None:
    clock = ManualClock()
    failing = Failing(clock, error)
    with pytest.raises(ModelError):
        await RetryingModel(failing, clock).complete(request(), Heard())
    assert len(failing.asked) == 1


@pytest.mark.parametrize(("asked", "waited"), [(30.0, 30.0), (0.0, 0.5)])
async def test_a_provider_that_says_when_is_taken_at_its_word(asked: float, waited: float) -> None:
    """But never asked again without a pause."""
    clock = ManualClock()
    failing = Failing(clock, ModelError("wait", status=429, transient=True, retry_after=asked))
    model = RetryingModel(failing, clock, chance=lambda: 0.0)
    await finished(asyncio.create_task(model.complete(request(), Heard())), clock)
    assert failing.asked == [0.0, waited]


async def test_one_429_holds_all_runs_of_the_model() -> None:
    """The second run, which never saw the 429, does not call before the time is over. Over the real streams."""
    clock, told = ManualClock(), asyncio.Event()
    async with (
        serving(refusal(429, "wait", Retry_After="30"), streams.said("one"), streams.said("two")) as server,
        provider(CLAUDE, clock=clock) as plain,
    ):
        model = RetryingModel(plain, clock, chance=lambda: 0.0)
        first = asyncio.create_task(model.complete(request(), lambda kind, _: told.set() if kind == "retry" else None))
        await told.wait()
        second = asyncio.create_task(model.complete(request(), Heard()))
        await clock.advance(29.9)
        assert len(server.requests) == 1
        await clock.advance(0.1)
        assert {(await first).text, (await second).text} == {"one", "two"}
        assert len(server.requests) == 3


async def test_who_may_ask_sooner_still_waits_for_the_longest() -> None:
    clock = ManualClock()
    long, short = (ModelError("busy", status=429, transient=True, retry_after=seconds) for seconds in (30, 2))
    failing = Failing(clock, long, short)
    model = RetryingModel(failing, clock, chance=lambda: 0.0)
    both = [asyncio.create_task(model.complete(request(), Heard())) for _ in range(2)]
    for asking in both:
        await finished(asking, clock)
    assert failing.asked == [0.0, 0.0, 30.0, 30.0]


async def test_a_call_that_is_cut_is_asked_again_as_a_whole() -> None:
    clock, heard, told = ManualClock(), Heard(), asyncio.Event()

    def on_delta(kind: str, text: str) -> None:
        heard(kind, text)
        if kind == "retry":
            told.set()

    whole = streams.anthropic(streams.text("Hel"), streams.tool("c1", "add", '{"a"', ": 1}"), stop="tool_use")
    async with serving(Answer(whole[:6], ending="cut"), Answer(whole)), provider(CLAUDE, clock=clock) as plain:
        asking = asyncio.create_task(RetryingModel(plain, clock).complete(request(), on_delta))
        await told.wait()
        await clock.advance(2)
        reply = await asking
    assert (reply.text, [call.args for call in reply.calls]) == ("Hel", [{"a": 1}])
    assert reply.usage == Usage(20, 8)
    assert heard.of("text") == ["Hel", "Hel"]


async def test_a_run_that_is_cancelled_while_it_waits_lets_go() -> None:
    clock = ManualClock()
    failing = Failing(clock, StreamCut("cut", transient=True))
    asking = asyncio.create_task(RetryingModel(failing, clock).complete(request(), Heard()))
    await clock.settle()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(failing.asked) == 1


@pytest.mark.finding("R9")
async def test_a_wait_that_is_too_long_is_said() -> None:
    clock = ManualClock()
    failing = Failing(clock, ModelError("slow down", status=429, transient=True, retry_after=86_400))
    with pytest.raises(ModelError) as raised:
        await RetryingModel(failing, clock).complete(request(), Heard())
    assert str(raised.value).startswith("Rate limited (429): slow down; not retried: the provider asks to wait 86400 s")
