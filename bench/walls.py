"""What a wall costs: how soon a walled run says its first word, what it weighs, and how fast its link is."""

from __future__ import annotations

import asyncio
import os
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
from retinue.build import Parts, make_supervisor
from retinue.core.events import Delta, Inbox, TurnStarted
from retinue.core.limits import Caps
from retinue.core.messages import Reply
from retinue.core.profiles import Task
from retinue.sandbox import bubblewrap
from retinue.sandbox.box import LIBRARY, Box, NoWall, Opening, python
from retinue.sandbox.isolated import Isolated
from retinue.testing import scripted

STARTS = 12
CROWD = 200
TALKERS = 50
WORDS = 100
SETTLE_SECONDS = 8.0
MANY = 50_000
SPEAK = f"""
import os, sys, threading, time
nap = threading.Event().wait
sys.path.append({LIBRARY!r})
from retinue.core.events import Inbox
from retinue.protocol.link import VERSION, Fact, End, Hello, Wire
wire = Wire("down")
def say(*frames):
    data = b"".join(map(wire.pack, frames))
    while data:
        data = data[os.write(1, data):]
say(Hello(VERSION))
"""
TALK = (
    SPEAK
    + f"""
nap(max(0, BEGIN - time.monotonic()))
for n in range({WORDS}):
    nap(0.05)
    say(Fact(Inbox(str(time.monotonic()))))
say(End("failed", "said"))
nap(60)
"""
)
POUR = (
    SPEAK
    + f"""
for n in range(0, {MANY}, 50):
    say(*(Fact(Inbox("a word")) for _ in range(50)))
say(End("failed", "said"))
nap(60)
"""
)


class Speaking:
    """The wall with another program behind it."""

    def __init__(self, wall: bubblewrap.Bubblewrap, script: str) -> None:
        self._wall, self._script = wall, script
        self.words, self.counts_memory = wall.words, wall.counts_memory

    def open(self, box: Box) -> Opening:
        return self._wall.open(box, [python(), "-I", "-S", "-c", self._script])


def rows() -> Iterator[Row]:
    folder = Path(tempfile.mkdtemp(prefix="retinue-bench-"))
    folder.chmod(0o755)
    try:
        wall = bubblewrap.probe(folder / "probe")
        yield from _rows(wall, folder)
    except NoWall as error:
        yield Row("walls: not measured", str(error)[:40])
    finally:
        shutil.rmtree(folder)


def _rows(wall: bubblewrap.Bubblewrap, folder: Path) -> Iterator[Row]:
    nothing = min(_nothing(wall, folder / str(n)) for n in range(STARTS))
    yield Row("reference: the same wall around python -I -c pass", f"{nothing * 1e3:.1f} ms")
    first = asyncio.run(_first_word(folder))
    yield Row("isolated: from spawn to the child's first event", f"{first * 1e3:.1f} ms", first / nothing, 8)
    weight, seconds = asyncio.run(_crowd(folder))
    yield Row(f"{CROWD} isolated runs at once: private memory of each", f"{seconds:.1f} s", weight / 2**20, 25, "MB")
    late = asyncio.run(_late(wall, folder))
    yield Row(f"child's event to a watcher, {TALKERS} runs, p99", f"{late * 1e3:.1f} ms", late * 1e3, 15, "ms")
    speed = asyncio.run(_speed(wall, folder))
    yield Row("events over one link into the memory log", f"{speed:,.0f} /s", 20_000 / speed, 1)


def _nothing(wall: bubblewrap.Bubblewrap, folder: Path) -> float:
    for name in ("workspace", "outputs", "lent", "hidden"):
        (folder / name).mkdir(parents=True)
    paths = [str(folder / name) for name in ("workspace", "outputs", "lent", "hidden")]
    opening = wall.open(Box("bench", paths[0], True, paths[1], paths[2], (), paths[3], Caps()),
                        [python(), "-I", "-c", "pass"])  # fmt: skip
    started = time.perf_counter()
    subprocess.run(opening.argv, env=dict(opening.env), pass_fds=opening.fds, check=True)
    taken = time.perf_counter() - started
    opening.drop()
    if opening.group is not None:
        opening.group.remove_soon()
    return taken


async def _first_word(folder: Path) -> float:
    seconds = []
    async with retinue.open(project=folder, runtime="isolated") as r:
        for _ in range(STARTS):
            started = time.perf_counter()
            run = await r.spawn(retinue.Profile("main", model=scripted({"main": [{"text": "x"}]})), "go")
            async for event in run.events():
                if isinstance(event.body, TurnStarted):
                    seconds.append(time.perf_counter() - started)
    return min(seconds)


class Gathering:
    """A model that answers when all have asked."""

    name = "gathering"

    def __init__(self, then: Callable[[], Awaitable[Any]]) -> None:
        self._then, self._here, self._all = then, 0, asyncio.Event()

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        self._here += 1
        if self._here == CROWD:
            await self._then()
            self._all.set()
        await self._all.wait()
        return Reply("done")


async def _crowd(folder: Path) -> tuple[float, float]:
    weights: list[int] = []

    async def weigh() -> None:
        weights.extend(_private(pid) for pid in _below(os.getpid()))

    started = time.perf_counter()
    async with retinue.open(project=folder, runtime="isolated") as r:
        profile = retinue.Profile("main", model=Gathering(weigh), workspace="scratch")
        runs = [await r.spawn(profile, "go") for _ in range(CROWD)]
        results = [await run.result() for run in runs]
    assert {result.status for result in results} == {"done"}, results[0].error_details
    return sum(weights) / CROWD, time.perf_counter() - started


def _below(pid: int) -> Iterator[int]:
    for listed in Path("/proc", str(pid), "task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            yield child
            yield from _below(child)


def _private(pid: int) -> int:
    lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


async def _late(wall: bubblewrap.Bubblewrap, folder: Path) -> float:
    late: list[float] = []

    def seen(text: str) -> None:
        late.append(time.monotonic() - float(text))

    begin = time.monotonic() + SETTLE_SECONDS  # when all have started: starting is measured above
    await _spoken(wall, folder, TALK.replace("BEGIN", str(begin)), TALKERS, seen)
    return statistics.quantiles(late, n=100)[98]


async def _speed(wall: bubblewrap.Bubblewrap, folder: Path) -> float:
    moments: list[float] = []
    await _spoken(wall, folder, POUR, 1, lambda _: moments.append(time.perf_counter()))
    assert len(moments) == MANY
    return MANY / (moments[-1] - moments[0])


async def _spoken(
    wall: bubblewrap.Bubblewrap, folder: Path, script: str, count: int, seen: Callable[[str], None]
) -> None:
    owner = make_supervisor(Parts(folder))
    owner._planner._runtimes._made["isolated"] = Isolated(Speaking(wall, script))  # type: ignore[attr-defined]
    profile = retinue.Profile("main", model=scripted({}), runtime="isolated", workspace="scratch")
    nodes = [owner.spawn(profile, Task("go")) for _ in range(count)]

    async def watch(tree: str) -> None:
        async for event in owner.watch(tree):
            if not isinstance(event, Delta) and isinstance(event.body, Inbox):
                seen(event.body.text)

    await asyncio.gather(*(watch(node.ref.tree) for node in nodes))
    await owner.close()
