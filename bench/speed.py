"""Benchmark of the full path against bare tasks with the same awaits, in the same order: serial or concurrent."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.table import Row, compare, micros, time_run
from bench.work import MODEL_CALLS, bare, ours

COUNT = 1000
DELAY = 0.05
ROUNDS = 12
AS_LONG = 10  # runs of the reference that take as long as one of ours: what disturbs one disturbs both


def time_durable(folder: str, *, delay: float = 0.0, guarded: bool = False) -> tuple[float, float]:
    """Time the same with the durable log in a new project: until every result is there, and from then until all is
    closed, with the index of the log and the files of every subagent (MASS-55), which nobody waits for before."""
    answered = 0.0

    async def work() -> None:
        nonlocal answered
        started = time.perf_counter()

        def note_time() -> None:
            nonlocal answered
            answered = time.perf_counter() - started

        state = Path(tempfile.mkdtemp(dir=folder)) / ".retinue"
        await ours(state, count=COUNT, delay=delay, at_once=True, guarded=guarded, when_answered=note_time)

    closed = time_run(work)
    return answered, closed - answered


def time_results(folder: str, *, delay: float = 0.0, guarded: bool = False) -> float:
    """Time the same until every result is there."""
    return time_durable(folder, delay=delay, guarded=guarded)[0]


async def bare_files(folder: str, *, count: int) -> None:
    """The folders and files that a parent and its subagent leave, with nothing but the calls that make them. Nothing
    else here depends so much on the disk: ext4 takes ten times as long for a new file where many were deleted within
    the last minutes, as after a run of the tests."""
    top = Path(tempfile.mkdtemp(dir=folder))
    for number in range(count):
        tree = top / str(number)
        live, full = tree / "1/live_logs", tree / "1/full_logs"
        for made in (tree, tree / "1", live, full):
            made.mkdir()
        for file, size in (
            (live / "events.ndjson", 6000),
            (full / "status.json", 600),
            (full / "transcript.md", 500),
            (tree / "metrics_summary.json", 300),
        ):
            file.write_bytes(b"x" * size)
        (full / "events.ndjson").hardlink_to(live / "events.ndjson")


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from rows_in(folder)


def rows_in(folder: str) -> Iterator[Row]:
    modes = {"one by one": False, "1,000 at once": True}
    references = {
        what: partial(time_run, partial(bare, count=COUNT, delay=0, at_once=at_once), times=AS_LONG)
        for what, at_once in modes.items()
    }
    for what, reference in references.items():
        seconds = statistics.median(reference() for _ in range(ROUNDS))
        yield Row(f"reference: bare tasks, {what}, per parent and subagent", micros(seconds, COUNT))
    for guards, guarded in (("", False), (", rules and budget on", True)):
        for what, at_once in modes.items():
            work = partial(ours, None, count=COUNT, delay=0, at_once=at_once, guarded=guarded)
            seconds, ratio = compare(partial(time_run, work), references[what], rounds=ROUNDS)
            yield Row(f"in memory, {what}{guards}", micros(seconds, COUNT), ratio, 10)
    reference = references["1,000 at once"]
    for guards, guarded in (("", False), (", rules and budget on", True)):
        # Without a limit: bare tasks at once save the wake-ups that runs one by one need.
        work = partial(ours, None, count=COUNT, delay=0, at_once=False, guarded=guarded)
        seconds, ratio = compare(partial(time_run, work), reference, rounds=ROUNDS)
        yield Row(f"in memory, one by one{guards}, of bare tasks at once", micros(seconds, COUNT), ratio)
    for guards, guarded in (("", False), (", rules and budget on", True)):
        lasting = partial(time_results, folder, guarded=guarded)
        seconds, ratio = compare(lasting, reference, rounds=ROUNDS)
        yield Row(f"durable log, 1,000 at once{guards}", micros(seconds, COUNT), ratio, 14)
    yield from _rows_of_files(folder)
    yield from _rows_one_by_one(folder)
    ideal = MODEL_CALLS * DELAY
    for guards, guarded in (("", False), (", rules and budget on", True)):
        seconds = statistics.median(time_results(folder, delay=DELAY, guarded=guarded) for _ in range(ROUNDS))
        name = f"durable log, 1,000 at once, 50 ms a model call{guards}"
        yield Row(name, f"{seconds:.3f} s", seconds / ideal, 1.8, "ideal")


def _rows_of_files(folder: str) -> Iterator[Row]:
    bare_work = partial(time_run, partial(bare_files, folder, count=COUNT))
    pairs = [(time_durable(folder)[1], bare_work()) for _ in range(3)]
    seconds, written = (statistics.median(each) for each in zip(*pairs, strict=True))
    yield Row("reference: the files of a subagent, written bare", micros(written, COUNT))
    name = "index and files of a subagent, after the results"
    yield Row(name, micros(seconds, COUNT), statistics.median(one / two for one, two in pairs), 3)


def _rows_one_by_one(folder: str) -> Iterator[Row]:
    few = 200
    commits: list[int] = []

    async def one_by_one() -> None:
        state = Path(tempfile.mkdtemp(dir=folder)) / ".retinue"
        r = await ours(state, count=few, delay=0, at_once=False)
        commits.append(r.control.log.commits)  # type: ignore[attr-defined]

    seconds = min(time_run(one_by_one) for _ in range(2))
    yield Row("durable log, one by one", micros(seconds, few))
    yield Row("durable log, one by one: commits per subagent", f"{min(commits)} / {few}", min(commits) / few, 8, "")


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

    seconds = time_run(work)
    print(seconds / count * 1e6, (max(most, resident()) - before) / (2 * count) / 1024)
