"""Memory of trees that have ended: nothing is left. The garbage collector does not look into the runs of a tree, so
the supervisor itself cuts their cycles, however the tree ends."""

import asyncio
import gc
import tracemalloc
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import retinue
from retinue import Limits, Profile, Retinue, Task, tool
from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError
from retinue.core.events import RunWaiting, ToolCall
from retinue.supervisor import restore, spawner
from retinue.supervisor.tree import Run
from tests.supervisor.tree.kit import call, main, until

TREES = 20


@tool(tier="observe", repeatable=True)
async def look() -> str:
    """Looks."""
    return "seen"


@tool(tier="observe", repeatable=True)
async def hang() -> str:
    """Hangs until its run is told to stop."""
    await asyncio.get_running_loop().create_future()
    return ""


def make_tree(child: list[Any], *after: Any) -> Profile:
    tools = [Profile("child", "c", tools=[look, hang])]
    return main({"main": [call("subagent_child", task="x"), *after], "child": child}, tools=tools)


DONE = make_tree([call("look"), "done"], "end")
FAILED = make_tree([{"error": "no"}], {"error": "boom"})
HANGS = make_tree([call("hang"), "done"], "end")


async def end_tree(r: Retinue, how: str) -> None:
    """Run one tree to its end."""
    profile = {"failed": FAILED, "cancelled": HANGS, "killed": HANGS}.get(how, DONE)
    limits = Limits(stall=60, tokens=10**7) if how == "limits" else None
    handle = await r.spawn(profile, Task("go", conversation=how == "conversation"), limits=limits)
    if how in ("cancelled", "killed"):
        await until(handle, ToolCall, number=1)
    elif how == "conversation":
        await until(handle, RunWaiting)
    if how == "killed":
        await r.control.kill(handle.tree)
    elif how in ("cancelled", "conversation"):
        await handle.cancel()
    await handle.result()


def count_runs(module: ModuleType = spawner) -> int:
    """Count the runs alive, by the place where they are made and their size: nothing as large is made there."""
    gc.collect()
    made = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, module.__file__ or "")]).traces
    return sum(each.size >= Run.__basicsize__ for each in made)


@pytest.mark.parametrize("how", ["done", "failed", "limits", "cancelled", "killed", "conversation"])
async def test_nothing_is_left_of_a_tree_that_has_ended(how: str, tmp_path: Path) -> None:
    async with retinue.open(tmp_path / "state", mode="yes") as r:
        for _ in range(2):  # caches grow with their first use
            await end_tree(r, how)
        tracemalloc.start()
        try:
            for _ in range(TREES):
                await end_tree(r, how)
            left = count_runs()
        finally:
            tracemalloc.stop()
    assert left == 0


async def test_nothing_is_left_of_a_stored_tree_whose_child_cannot_be_continued(tmp_path: Path) -> None:
    """For each attempt, the tree is rebuilt from the log before the price of the child's model is missed."""
    async with retinue.open(tmp_path / "state", mode="yes") as r:
        handle = await r.spawn(DONE, "go")
        await handle.result()
        child = Profile("child", "c", tools=[look, hang], model=DONE.model, limits=Limits(cost=Decimal(1)))
        given = ResumeOverrides(profiles=[replace(DONE, tools=[child]), child])
        tracemalloc.start()
        try:
            for _ in range(TREES):
                with pytest.raises(ConfigError, match="the price of model"):
                    await r.control.continue_run(handle.tree, 1, "more", given)
            left = count_runs(restore)
        finally:
            tracemalloc.stop()
    assert left == 0
