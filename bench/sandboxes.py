"""Benchmark of sandboxes: no cost for a run without one, the delay of its first call, and its memory."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import retinue
from bench.table import Row
from retinue.core.events import ToolResult, TurnStarted
from retinue.core.limits import ResourceLimits
from retinue.core.messages import Call, Reply
from retinue.sandbox import bubblewrap
from retinue.sandbox.box import Box
from retinue.sandbox.builder import SandboxUnavailable, find_python
from retinue.testing import scripted

STARTS = 12
PAIRS = 50
CROWD = 200
TALKERS = 1000
ROUNDS = 3


def rows() -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp(prefix="retinue-bench-"))
    folder.chmod(0o755)
    try:
        builder = bubblewrap.probe_bubblewrap()
        yield from _rows(builder, folder)
    except SandboxUnavailable as error:
        yield Row("sandboxes: not measured", str(error)[:40])
    finally:
        shutil.rmtree(folder)


def _rows(builder: bubblewrap.Bubblewrap, folder: Path) -> Iterator[Row]:
    seconds, ratio = asyncio.run(_compare_first_event(folder))
    yield Row("isolated, no sandboxed call: spawn to first event, of inherited", f"{seconds * 1e3:.2f} ms", ratio, 1.5)
    seconds, ratio = asyncio.run(_compare_first_call(builder, folder))
    yield Row(
        "isolated: first sandboxed call, of the sandbox around python -c pass", f"{seconds * 1e3:.1f} ms", ratio, 4
    )
    seconds, ratio = _compare_talkers(folder)
    yield Row(f"{TALKERS} isolated runs that only talk to the model, of inherited", f"{seconds:.2f} s", ratio, 2)
    weight, seconds = asyncio.run(_weigh_crowd(folder))
    yield Row(f"{CROWD} sandboxes at once: private memory of each", f"{seconds:.1f} s", weight / 2**20, 25, "MB")


def _start_bare(builder: bubblewrap.Bubblewrap, folder: Path) -> float:
    for name in ("workspace", "outputs", "host_outputs", "hidden"):
        (folder / name).mkdir(parents=True)
    paths = [str(folder / name) for name in ("workspace", "outputs", "host_outputs", "hidden")]
    prepared = builder.prepare(Box("bench", paths[0], True, paths[1], paths[2], (), paths[3], ResourceLimits()),
                        [find_python(), "-I", "-c", "pass"])  # fmt: skip
    started = time.perf_counter()
    subprocess.run(prepared.argv, env=dict(prepared.env), pass_fds=prepared.fds, check=True)
    taken = time.perf_counter() - started
    prepared.discard()
    if prepared.group is not None:
        prepared.group.remove_soon()
    return taken


async def _compare_first_event(folder: Path) -> tuple[float, float]:
    """Time runs in both runtimes in turn; no process may be started."""
    profile = retinue.Profile("main", model=scripted({"main": [{"text": "x"}] * 9}))
    seconds: dict[str, list[float]] = {"inherited": [], "isolated": []}
    async with (
        retinue.open(project=folder, runtime="inherited") as inherited,
        retinue.open(project=folder, runtime="isolated") as isolated,
    ):
        for number in range(PAIRS):
            if number == 1:
                ended = _count_children_faults()
            for name, r in (("inherited", inherited), ("isolated", isolated)):
                started = time.perf_counter()
                run = await r.spawn(profile, "go")
                async for event in run.events():
                    if isinstance(event.body, TurnStarted):
                        seconds[name].append(time.perf_counter() - started)
                        break
                await run.result()
        is_alone = _count_children_faults() == ended and not list(_list_below(os.getpid()))
        assert is_alone, "a run without a sandboxed call has started a process"
    ratios = [two / one for one, two in zip(seconds["inherited"], seconds["isolated"], strict=True)]
    return statistics.median(seconds["isolated"]), statistics.median(ratios[1:])  # the first one probes


def _count_children_faults() -> int:
    """Count the page faults of all children that have ended: each had some."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


async def _compare_first_call(builder: bubblewrap.Bubblewrap, folder: Path) -> tuple[float, float]:
    """Time calls for which the sandbox has to be started, and bare starts of the same sandbox, in turn."""
    seconds, ratios = [], []
    replies = [{"tools": [{"name": "glob", "args": {"pattern": "*"}}]}, {"text": "x"}]
    profile = retinue.Profile("main", model=scripted({"main": replies}), workspace="scratch")
    async with retinue.open(project=folder, runtime="isolated", mode="yes") as r:
        for number in range(STARTS):
            bare = _start_bare(builder, folder / str(number))
            run = await r.spawn(profile, "go")
            async for event in run.events():
                if isinstance(event.body, ToolResult):
                    assert event.body.success, event.body.text
                    seconds.append(event.body.duration_ms / 1000)
                    ratios.append(seconds[-1] / bare)
    return statistics.median(seconds), statistics.median(ratios)


def _compare_talkers(folder: Path) -> tuple[float, float]:
    ratios, seconds = [], 0.0
    for _ in range(ROUNDS):
        reference = asyncio.run(_talk(folder, "inherited"))
        seconds = asyncio.run(_talk(folder, "isolated"))
        ratios.append(seconds / reference)
    return seconds, statistics.median(ratios)


async def _talk(folder: Path, runtime: str) -> float:
    profile = retinue.Profile("main", model=scripted({"main": [{"text": "x"}] * TALKERS}))
    async with retinue.open(project=folder, runtime=runtime) as r:  # type: ignore[arg-type]
        await (await r.spawn(profile, "go")).result()  # probes
        started = time.perf_counter()
        runs = [await r.spawn(profile, "go") for _ in range(TALKERS)]
        results = [await run.result() for run in runs]
        taken = time.perf_counter() - started
    assert {result.status for result in results} == {"done"}
    return taken


class Gathering:
    """A model that makes one sandboxed call, and answers once every run has made its own."""

    name = "gathering"

    def __init__(self, then: Callable[[], Awaitable[Any]]) -> None:
        self._then, self._here, self._all = then, 0, asyncio.Event()

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        if request.turn == 1:
            return Reply("", (Call("c1", "glob", {"pattern": "*"}),))
        self._here += 1
        if self._here == CROWD:
            await self._then()
            self._all.set()
        await self._all.wait()
        return Reply("done")


async def _weigh_crowd(folder: Path) -> tuple[float, float]:
    weights: list[int] = []

    async def weigh() -> None:
        weights.extend(_count_private_bytes(pid) for pid in _list_below(os.getpid()))

    started = time.perf_counter()
    async with retinue.open(project=folder, runtime="isolated", mode="yes") as r:
        profile = retinue.Profile("main", model=Gathering(weigh), workspace="scratch")
        runs = [await r.spawn(profile, "go") for _ in range(CROWD)]
        results = [await run.result() for run in runs]
    assert {result.status for result in results} == {"done"}, results[0].error_details
    return sum(weights) / CROWD, time.perf_counter() - started


def _list_below(pid: int) -> Iterator[int]:
    for listed in Path("/proc", str(pid), "task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            yield child
            yield from _list_below(child)


def _count_private_bytes(pid: int) -> int:
    lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
