"""The contract of a clock, for the one of the event loop: alarms ring in order, once, and not when cancelled."""

import asyncio
import random

from retinue.concurrency import SystemClock


async def test_alarms_ring_in_order_and_cancelled_ones_do_not() -> None:
    clock, rung, over = SystemClock(), [], asyncio.Event()
    order = list(range(40))
    random.Random(7).shuffle(order)
    alarms = {n: clock.call_later(0.002 * n, lambda n=n: rung.append(n)) for n in order}  # type: ignore[misc]
    in_order = sorted(order, key=lambda n: alarms[n].when())  # where making them took long, not that of their numbers
    for n in range(0, 40, 3):
        alarms[n].cancel()
        alarms[n].cancel()
    clock.call_later(0.1, over.set)
    await over.wait()
    assert rung == [n for n in in_order if n % 3]
    alarms[1].cancel()  # one that has rung


async def test_an_earlier_alarm_overtakes_and_one_set_while_ringing_rings() -> None:
    clock, rung, over = SystemClock(), [], asyncio.Event()
    clock.call_later(60, lambda: rung.append("never"))

    def first() -> None:
        rung.append("first")
        clock.call_later(0, lambda: (rung.append("second"), over.set()))  # type: ignore[func-returns-value]

    clock.call_later(0.001, first)
    await over.wait()
    assert rung == ["first", "second"]


async def test_an_alarm_that_breaks_takes_no_other_with_it() -> None:
    clock, over, told = SystemClock(), asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about))

    def broken() -> None:
        raise RuntimeError("broken")

    clock.call_later(0.001, broken)
    clock.call_later(0.002, over.set)
    await over.wait()
    assert [str(about["exception"]) for about in told] == ["broken"]
