"""Batches work for any durable log: these are written to a list."""

import asyncio
import threading

import pytest

from retinue.core.errors import LogError, LogLost
from retinue.core.events import Event
from retinue.log.batches import BatchWriter
from retinue.log.feed import Feed
from retinue.log.tree_index import TreeRow
from tests.log.kit import make_event


class ListWriter(BatchWriter):
    """Writes batches to a list, but raises the `failures` first. `catches` are the values of `idle` so far."""

    def __init__(self, *failures: LogError, patience: float | None = None) -> None:
        self.feeds = {"t1": Feed(TreeRow("t1", 0.0))}
        super().__init__(self.feeds)
        self.batches: list[list[int]] = []
        self.catches: list[bool] = []
        self.is_idle = threading.Event()
        self.is_released = False
        self._failures, self._patience = list(failures), patience
        self.start()

    def write_batch(self, batch: list[Event]) -> LogError | None:
        if self._failures:
            return self._failures.pop(0)
        self.batches.append([event.seq for event in batch])
        return None

    def catch_up(self, *, idle: bool) -> float | None:
        self.catches.append(idle)
        if idle:
            self.is_idle.set()
        return None if idle else self._patience

    def release(self) -> LogError | None:
        self.is_released = True
        return None


async def append(writer: BatchWriter, *seqs: int) -> None:
    for seq in seqs:
        written = writer.append(make_event(seq), seq == seqs[-1])
    assert written is not None
    await written


async def test_a_batch_that_failed_is_written_before_later_events_and_published_then() -> None:
    writer = ListWriter(LogError("the server is away"))
    with pytest.raises(LogError, match="away"):
        await append(writer, 1, 2)
    assert (writer.batches, writer.feeds["t1"].events) == ([], [])
    await append(writer, 3)
    assert writer.batches == [[1, 2, 3]]
    assert [event.seq for event in writer.feeds["t1"].events] == [1, 2, 3]
    assert await writer.close() is None and writer.is_released


async def test_a_writer_that_is_lost_takes_nothing_more_and_tells_how_much_is_lost() -> None:
    writer = ListWriter(LogLost("another process has it"))
    with pytest.raises(LogLost):
        await append(writer, 1, 2)
    with pytest.raises(LogLost):
        writer.append(make_event(3))
    lost = await writer.close()
    assert isinstance(lost, LogLost) and str(lost) == "another process has it; 2 events are lost"
    assert (writer.batches, writer.is_released) == ([], True)


async def test_other_work_is_done_after_each_batch_and_once_there_are_no_events() -> None:
    writer = ListWriter(patience=0.001)
    await append(writer, 1)
    await asyncio.to_thread(writer.is_idle.wait)
    assert writer.catches == [False, True]
    await writer.close()
    assert writer.catches == [False, True, False]
