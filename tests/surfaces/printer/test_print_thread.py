"""Printing in a thread: in order, and nobody gets far ahead of it."""

import asyncio
import threading

from retinue.surfaces.printer.printer import AHEAD, PrintThread


async def test_work_is_done_in_order_and_waited_for_at_the_end() -> None:
    behind, done = PrintThread(), list[int]()
    for number in range(5 * AHEAD + 3):
        await behind.enqueue(done.append, number)
        assert len(done) >= number - AHEAD
    await behind.drain()
    assert done == list(range(5 * AHEAD + 3))
    behind.close()


async def test_a_thread_that_stands_still_holds_up_one_who_is_far_ahead() -> None:
    behind, stuck = PrintThread(), threading.Event()
    await behind.enqueue(stuck.wait)
    given = 1

    async def give() -> None:
        nonlocal given
        while True:
            await behind.enqueue(int)
            given += 1

    giving = asyncio.create_task(give())
    while given < AHEAD - 1:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not giving.done() and given == AHEAD - 1
    giving.cancel()
    stuck.set()
    await behind.drain()
    behind.close()


async def test_what_comes_after_the_last_words_is_not_printed_and_hurts_nobody() -> None:
    behind, done = PrintThread(), list[int]()
    await behind.enqueue(done.append, 1)
    await behind.drain()
    behind.close()
    behind.submit(done.append, 2)
    await behind.drain()
    assert done == [1]
