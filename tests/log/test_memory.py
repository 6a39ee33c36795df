"""The log in memory keeps the contract of logs, also if the start of a watcher takes a while."""

import asyncio

import pytest

from retinue.core.events import Event
from retinue.core.ports import Log, LogReader
from retinue.log.feed import Feed
from retinue.log.memory import MemoryLog
from tests.log.contract import LogContract
from tests.log.kit import fill, make_ended, write


class Memory:
    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def open(self) -> Log:
        return self._log

    def reader(self) -> LogReader:
        return self._log

    def count_watched(self, log: Log) -> int:
        assert isinstance(log, MemoryLog)
        return len(log._feeds)


class SlowLog(MemoryLog):
    """A log in memory whose watchers wait for a lookup, as for an answer of a server."""

    async def _make_feed(self, tree: str) -> Feed:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super()._make_feed(tree)


class TestMemoryLog(LogContract):
    @pytest.fixture
    def backend(self) -> Memory:
        return Memory(MemoryLog())


class TestSlowLog(LogContract):
    @pytest.fixture
    def backend(self) -> Memory:
        return Memory(SlowLog())


async def test_watchers_that_start_at_the_same_time_share_a_feed() -> None:
    log = SlowLog()
    await fill(log, 3, end=False)

    async def watch() -> list[int]:
        return [item.seq async for item in log.watch("t1") if isinstance(item, Event)]

    async with asyncio.TaskGroup() as group:
        first, second = group.create_task(watch()), group.create_task(watch())
        await asyncio.sleep(0)
        await write(log, make_ended(4))
    assert first.result() == second.result() == [1, 2, 3, 4]
    assert log._feeds == {}
