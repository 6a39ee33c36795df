"""Benchmark of the delay from a tool's result to its watcher, and of the events that the log takes in a second."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import retinue
from bench.table import Row
from bench.work import USAGE
from retinue.core.events import Event, RunEnded, RunSpawned, ToolResult, TurnStarted
from retinue.log.memory import MemoryLog
from retinue.log.sqlite import SqliteLog
from retinue.testing import scripted

CALLS = 50


async def tool_to_watcher(state: Path | None, *, runs: int) -> float:
    """The median time from a tool's return to its result in a watcher's hands."""
    returned: dict[str, float] = {}
    late: list[float] = []

    @retinue.tool(tier="observe")
    async def stamp(ctx: retinue.Context, n: int) -> str:
        """Note the time."""
        await asyncio.sleep(0.001)
        key = f"{ctx.tree}/{n}"
        returned[key] = time.perf_counter()
        return key

    script = [{"tools": [{"name": "stamp", "args": {"n": n}}], "usage": USAGE, "delay": 0.005} for n in range(CALLS)]
    profile = retinue.Profile("p", model=scripted({"p": script}), tools=[stamp])

    async def watch(run: retinue.RunHandle) -> None:
        async for event in run.events():
            if isinstance(event.body, ToolResult):
                late.append(time.perf_counter() - returned[event.body.text])

    async with retinue.open(state) as r:
        started = [await r.spawn(profile, "go") for _ in range(runs)]
        await asyncio.gather(*(watch(run) for run in started))
    return statistics.median(late)


async def events_a_second(log: MemoryLog | SqliteLog, *, count: int) -> float:
    started = time.perf_counter()
    log.append(Event(1, "t", 0, "/main", "main", 1.0, RunSpawned(None, "main", 0, "x", "x", "/x")))
    for seq in range(2, count):
        log.append(Event(seq, "t", 0, "/main", "main", 1.0, TurnStarted(seq)))
        if seq % 1000 == 0:
            await asyncio.sleep(0)
    written = log.append(Event(count, "t", 0, "/main", "main", 1.0, RunEnded("done", "x", 1)), True)
    if written is not None:
        await written
    return count / (time.perf_counter() - started)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for what, state, runs in (
            ("in memory, one run", None, 1),
            ("in memory, 100 runs", None, 100),
            ("durable log, one run", Path(folder) / "a", 1),
            ("durable log, 100 runs", Path(folder) / "b", 100),
        ):
            seconds = asyncio.run(tool_to_watcher(state, runs=runs))
            yield Row(f"tool result to watcher, p50, {what}", f"{seconds * 1e6:.0f} us")

        async def durable() -> float:
            log = SqliteLog(Path(folder) / "c")
            try:
                return await events_a_second(log, count=200_000)
            finally:
                await log.close()

        yield Row("events a second into the durable log", f"{asyncio.run(durable()):,.0f}")
