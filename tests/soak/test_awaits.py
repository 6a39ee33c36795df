"""Stopped at every await, once, twice, by a deadline: one ending for each run, and nothing of the tree is left."""

import asyncio
import gc
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import retinue
from retinue import Allow, Approval, Context, Deny, Event, Limits, Profile
from retinue.core.events import Delta, RunEnded, Warned
from retinue.supervisor.supervisor import Supervisor
from tests.soak.checks import (
    check_calls,
    check_families,
    check_folds,
    check_no_tasks,
    check_nothing_left,
    check_order,
    plain,
)
from tests.soak.conftest import Note
from tests.soak.steps import Steps
from tests.soak.test_cancel import parts
from tests.supervisor.tree.kit import bodies, call, main, spawn

SECONDS = 150.0  # only ends what hangs
WAYS = ("primary", "one", "twice", "killed", "timed out", "one, then all")
MID = [spawn({"task": "deep"}), call("shell", command="echo mid; sleep 0.01; echo done"), {"text": "mid", "chunks": 3}]
SCRIPT = {
    "main": [
        {"text": "begin", "chunks": 3, "tools": [{"name": name, "args": {}} for name in ("look", "act", "aside")]},
        spawn({"task": "m", "subagent_type": "mid"}, {"task": "s"}),
        spawn({"task": "behind"}, background=True),
        {"text": "end", "chunks": 2},
    ],
    "mid": MID,
    "*": [call("act"), {"text": "leaf", "chunks": 2}],
}


@retinue.tool(tier="observe")
async def look() -> str:
    """Takes a few turns, and one more to clean up."""
    try:
        for _ in range(3):
            await asyncio.sleep(0)
    finally:
        await asyncio.sleep(0)
    return "seen"


@retinue.tool(tier="observe")
def aside() -> str:
    """In a thread."""
    return "aside"


@retinue.tool(tier="confirm")
async def act(ctx: Context) -> str:
    """Asks once more itself."""
    return str(await ctx.approve("again"))


async def decide(question: Approval) -> Allow | Deny:
    for _ in range(2):
        await asyncio.sleep(0)
    return Deny("no") if question.tool == "act" and question.run % 2 else Allow()


def processes() -> set[str]:
    return {pid for task in os.listdir("/proc/self/task") for pid in _children(task)}


def _children(task: str) -> Iterator[str]:
    try:
        yield from Path(f"/proc/self/task/{task}/children").read_text().split()
    except OSError:
        return


def stop(way: str, chance: random.Random, supervisor: Supervisor, tree: str, steps: Steps) -> None:
    """Done at the step: what there is to stop is what there is then."""
    found = supervisor.trees.get(tree)
    if found is None:
        return
    match way:
        case "primary":
            found.runs[0].stop("cancelled")
        case "one":
            chance.choice(found.runs).stop("cancelled")
        case "timed out":
            chance.choice(found.runs).time_out()
        case "killed":
            supervisor.trees[tree].kill()
        case "twice" | "one, then all":
            run = found.runs[0] if way == "twice" else chance.choice(found.runs)
            run.stop("cancelled")
            steps.pull[steps.count + chance.choice((1, 1, 2, 3, 5, 8))] = supervisor.trees[tree].kill


async def stopped_at(at: int, way: str, folder: Path, *, durable: bool) -> int:
    """Stop a tree in this way at this step. Return the total number of its steps."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    chance, steps = random.Random(f"{at} {way}"), Steps()
    gc.collect()
    tasks, files, before = asyncio.all_tasks(), len(os.listdir("/proc/self/fd")), processes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(temporary))
        async with (
            asyncio.timeout(SECONDS),
            retinue.open(
                folder / ".retinue" if durable else None,
                project=folder,
                approver=decide,
                profiles=[Profile("mid")],
                limits=Limits(tokens=10**9, stall=60.0),
            ) as r,
        ):
            seen: list[Event | Delta] = []
            with steps.armed():
                tools = ["spawn_subagents", "shell", look, aside, act]
                run = await r.spawn(main(SCRIPT, tools=tools), "go")
                steps.pull[at] = lambda: stop(way, chance, r.control, run.tree, steps)
                async for item in r.control.watch(run.tree, deltas=True):
                    seen.append(item)
                result = await run.result()
            held = await r.control.log.read(run.tree)
    check(held, seen, result)
    await check_no_tasks(tasks)
    await check_nothing_left(
        {
            "a file is left open": lambda: len(os.listdir("/proc/self/fd")) - files,
            "a process is left": lambda: processes() ^ before,
            "a temporary file is left": lambda: list(temporary.iterdir()),
        }
    )
    return steps.count


def check(held: list[Event], seen: list[Event | Delta], result: retinue.Result) -> None:  # type: ignore[type-arg]
    check_order(held)
    check_calls(held)
    check_families(held, depth=3)
    check_folds(held, result)
    assert plain([item for item in seen if isinstance(item, Event)]) == plain(held)
    assert not [body for body in bodies(held, Warned) if body.code == "abandoned"]
    ended: set[int] = set()
    for item in seen:
        assert item.run not in ended, f"{item} comes after the ending of its run"
        if isinstance(item, Event) and isinstance(item.body, RunEnded):
            ended.add(item.run)


@pytest.fixture(scope="module", autouse=True)
def freeze_the_rest() -> None:
    """Exempt from the many collections here what earlier tests of this process imported."""
    gc.collect()
    gc.freeze()


async def sweep(folder: Path, note: Note, part: range, ways: tuple[str, ...], *, durable: bool) -> None:
    for at in part:
        for way in ways:
            try:
                count = await stopped_at(at, way, folder / f"{at}-{way}", durable=durable)
            except BaseException as error:
                error.add_note(f"{way} at step {at}, durable={durable}")
                raise
            note(stops=1)
        if count < at:
            return


async def test_the_tree_that_is_swept_does_all_it_should(tmp_path: Path, note: Note) -> None:
    steps = await stopped_at(10**9, "primary", tmp_path, durable=False)
    note(steps=steps)
    assert steps > 40  # more of them where threads and processes are quicker than the loop


@pytest.mark.parametrize("way", WAYS)
async def test_a_tree_stopped_at_an_await_leaves_nothing(way: str, tmp_path: Path, note: Note) -> None:
    first = 1 + WAYS.index(way)
    await sweep(tmp_path, note, range(first, 10_000, 31), (way,), durable=False)


async def test_a_durable_tree_stopped_at_an_await_leaves_nothing(tmp_path: Path, note: Note) -> None:
    await sweep(tmp_path, note, range(5, 10_000, 79), ("primary", "twice"), durable=True)


@pytest.mark.soak
@pytest.mark.parametrize("part", parts(6), ids=lambda part: f"from {part[0]}")
@pytest.mark.parametrize("way", WAYS)
async def test_a_tree_stopped_at_every_await_leaves_nothing(way: str, part: range, tmp_path: Path, note: Note) -> None:
    await sweep(tmp_path, note, part, (way,), durable=False)


@pytest.mark.soak
@pytest.mark.parametrize("part", parts(12), ids=lambda part: f"from {part[0]}")
async def test_a_durable_tree_stopped_at_every_await_leaves_nothing(part: range, tmp_path: Path, note: Note) -> None:
    await sweep(tmp_path, note, part, ("primary", "twice"), durable=True)
