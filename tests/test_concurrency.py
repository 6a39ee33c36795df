"""Owning tasks: all are ended, in time, and nothing they raise is lost."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import pytest

from retinue.concurrency import (
    RateLimit,
    TaskOwner,
    call_when_done,
    finish_despite_cancel,
    run_in_thread,
    run_until_first,
)
from retinue.testing import ManualClock
from tests.gates import pass_time


async def forever(ended: list[str], name: str = "") -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def test_an_owner_ends_all_its_tasks() -> None:
    ended: list[str] = []
    async with TaskOwner() as owner:
        for name in "abc":
            owner.start(forever(ended, name), name=name)
        await asyncio.sleep(0)
        assert len(owner) == 3 and {task.get_name() for task in owner} == {"a", "b", "c"}
    assert sorted(ended) == ["a", "b", "c"] and len(owner) == 0


async def test_waiting_includes_tasks_that_tasks_start_and_has_a_deadline() -> None:
    owner, go, seen = TaskOwner(), asyncio.Event(), []

    async def second() -> None:
        seen.append("second")

    async def first() -> None:
        await go.wait()
        owner.start(second())

    owner.start(first())
    assert not await owner.wait(0.01)
    go.set()
    assert await owner.wait(100) and seen == ["second"]


async def test_a_task_that_does_not_end_costs_no_more_than_the_deadline() -> None:
    release, owner = asyncio.Event(), TaskOwner()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()

    task = owner.start(stubborn())
    await asyncio.sleep(0)
    assert not await owner.close(0.01) and not task.done()
    release.set()
    assert await owner.wait(100)


async def test_an_exception_is_told_to_the_owner_or_to_the_one_who_awaits() -> None:
    async def fail() -> None:
        raise KeyError("x")

    told: list[BaseException] = []
    owner = TaskOwner(on_error=told.append)
    owner.start(fail())
    assert await owner.wait(100) and [type(error) for error in told] == [KeyError]
    with pytest.raises(KeyError):
        await TaskOwner().start(fail())


async def test_the_first_to_end_ends_the_others() -> None:
    ended: list[str] = []

    async def fail() -> None:
        raise KeyError("x")

    assert await run_until_first([forever(ended), asyncio.sleep(0), forever(ended)]) == 1
    assert len(ended) == 2
    with pytest.raises(KeyError):
        await run_until_first([forever(ended), fail()])
    assert len(ended) == 3


async def test_a_cancelled_caller_takes_its_tasks_along() -> None:
    ended: list[str] = []
    caller = asyncio.create_task(run_until_first([forever(ended), forever(ended)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert len(ended) == 2


async def test_work_is_finished_although_its_caller_is_cancelled_and_hurried_the_second_time() -> None:
    go, hurries, started, done = asyncio.Event(), [], asyncio.Event(), []

    async def work() -> str:
        started.set()
        await go.wait()
        done.append(True)
        return "result"

    def hurry() -> None:
        hurries.append(True)
        go.set()

    caller = asyncio.create_task(finish_despite_cancel(work(), hurry=hurry))
    await started.wait()
    caller.cancel()
    await pass_time(0)
    assert not caller.done() and not hurries
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done and hurries


async def test_two_cancellations_in_one_turn_of_the_loop_hurry_too() -> None:
    hurried, started = asyncio.Event(), asyncio.Event()

    async def clean_up_when_cancelled() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await finish_despite_cancel(hurried.wait(), hurry=hurried.set)

    caller = asyncio.create_task(clean_up_when_cancelled())
    await started.wait()
    caller.cancel()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert hurried.is_set()


async def test_finished_work_gives_its_result_or_its_exception() -> None:
    async def fail() -> None:
        raise KeyError("x")

    assert await finish_despite_cancel(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(KeyError):
        await finish_despite_cancel(fail())


async def test_a_callback_comes_also_after_an_error_which_is_left_to_others_to_tell() -> None:
    untold: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: untold.append(context))
    done = asyncio.Event()

    class FullDisk:
        def __await__(self) -> Iterator[None]:
            yield
            raise OSError("the disk is full")

    call_when_done(FullDisk(), lambda _: done.set())
    await done.wait()
    gc.collect()
    await asyncio.sleep(0)
    assert untold == []


async def test_blocking_work_is_told_to_stop_and_waited_for() -> None:
    began, stopped = threading.Event(), threading.Event()

    def work(stop: threading.Event) -> None:
        began.set()
        assert stop.wait(100)
        stopped.set()

    caller = asyncio.create_task(run_in_thread(work))
    await asyncio.to_thread(began.wait, 100)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert stopped.is_set()
    assert await run_in_thread(lambda stop: stop.is_set()) is False


async def test_each_of_several_waiters_takes_a_token_of_its_own() -> None:
    clock = ManualClock()
    limit, passed = RateLimit(2, burst=1, clock=clock), []

    async def act() -> None:
        await limit.wait()
        passed.append(clock.monotonic())

    async with TaskOwner() as owner:
        for _ in range(4):
            owner.start(act())
        await clock.advance(5)
    assert passed == [0.0, 0.5, 1.0, 1.5]
    assert [limit.take(), limit.take()] == [0.0, 0.5]
