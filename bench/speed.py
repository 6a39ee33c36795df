"""How much the full path costs over bare tasks that do the same awaits."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.table import Row, best, micros
from bench.work import MODEL_CALLS, bare, ours

COUNT = 1000
DELAY = 0.05
REPEATS = 12  # the fastest counts, of the reference too: on a shared machine every slower one is somebody else's


async def durable(folder: str, *, count: int, delay: float, at_once: bool, guarded: bool = False) -> int:
    """The same with the durable log in a new project; gives the commits it took."""
    state = Path(tempfile.mkdtemp(dir=folder)) / ".retinue"
    r = await ours(state, count=count, delay=delay, at_once=at_once, guarded=guarded)
    commits: int = r.control.log.commits  # type: ignore[attr-defined]
    return commits


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from rows_in(folder)


def rows_in(folder: str) -> Iterator[Row]:
    reference = best(lambda: bare(count=COUNT, delay=0, at_once=True), times=REPEATS)
    yield Row("reference: bare tasks, per parent and subagent", micros(reference, COUNT))
    seconds = best(lambda: ours(None, count=COUNT, delay=0, at_once=False), times=REPEATS)
    yield Row("in memory, one by one", micros(seconds, COUNT), seconds / reference, 8)
    seconds = best(lambda: ours(None, count=COUNT, delay=0, at_once=True), times=REPEATS)
    yield Row("in memory, 1,000 at once", micros(seconds, COUNT), seconds / reference, 8)
    for what, at_once in (("one by one", False), ("1,000 at once", True)):
        guarded = partial(ours, None, count=COUNT, delay=0, at_once=at_once, guarded=True)
        seconds = best(guarded, times=REPEATS)
        yield Row(f"in memory, {what}, rules and budget on", micros(seconds, COUNT), seconds / reference, 8)
    seconds = best(lambda: durable(folder, count=COUNT, delay=0, at_once=True), times=REPEATS)
    yield Row("durable log, 1,000 at once", micros(seconds, COUNT), seconds / reference, 20)
    seconds = best(partial(durable, folder, count=COUNT, delay=0, at_once=True, guarded=True), times=REPEATS)
    yield Row("durable log, 1,000 at once, rules and budget on", micros(seconds, COUNT), seconds / reference, 20)
    few = 200
    commits: list[int] = []

    async def one_by_one() -> None:
        commits.append(await durable(folder, count=few, delay=0, at_once=False))

    seconds = best(one_by_one, times=2)
    yield Row("durable log, one by one", micros(seconds, few))
    yield Row("durable log, one by one: commits per subagent", f"{min(commits)} / {few}", min(commits) / few, 8, "")
    ideal = MODEL_CALLS * DELAY
    for what, guarded in (("", False), (", rules and budget on", True)):
        seconds = best(partial(durable, folder, count=COUNT, delay=DELAY, at_once=True, guarded=guarded), times=REPEATS)
        name = f"durable log, 1,000 at once, 50 ms a model call{what}"
        yield Row(name, f"{seconds:.3f} s", seconds / ideal, 1.5, "ideal")


def many_rows() -> Iterator[Row]:
    """In a process of its own, so that its memory is its own."""
    code = "from bench.speed import many; many()"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    yield Row("10,000 at once in memory, per parent and subagent", f"{float(out[0]):.1f} us")
    yield Row("10,000 at once in memory: memory per run", f"{float(out[1]):.1f} KiB")


def many() -> None:
    count = 10_000

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    asyncio.run(ours(None, count=10, delay=0, at_once=True))
    before = resident()
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, resident())
            await asyncio.sleep(0.05)

    async def work() -> None:
        watching = asyncio.create_task(watch())
        await ours(None, count=count, delay=0, at_once=True)
        watching.cancel()

    seconds = best(work, times=1)
    print(seconds / count * 1e6, (max(most, resident()) - before) / (2 * count) / 1024)
