"""Tests of timeouts from retinue.yaml: the default is exact, and a timeout from a model is clamped."""

from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Limits, Profile, Task
from retinue.core.events import RunSpawned, RunStarted
from retinue.testing import ManualClock, scripted
from tests.supervisor.tree.kit import bodies, spawn, until

CONFIG = """
orchestrator:
  coordination: {subagent_default_timeout: 40, subagent_min_timeout: 100, subagent_max_timeout: 200}
profiles:
  exact: {description: x, limits: {seconds: 7}}
"""


async def seconds_of_child(folder: Path, order: dict[str, Any]) -> float | None:
    (folder / "retinue.yaml").write_text(CONFIG)
    model = scripted({"main": [spawn({"task": "x", **order}), {"text": "end"}]})
    async with retinue.open(config=folder / "retinue.yaml", project=folder, path=folder / "s", mode="yes") as r:
        run = await r.spawn(Profile("main", model=model), "go")
        await run.result()
        [spawned] = bodies(await r.control.log.read(run.tree), RunSpawned, run=1)
    seconds: float | None = spawned.timeout_seconds
    return seconds


@pytest.mark.requirement("MASS-46")
@pytest.mark.parametrize(
    ("order", "given"),
    [
        ({}, 40),  # the default stands, though it is below the minimum: a person set it
        ({"timeout_seconds": 1}, 100),
        ({"timeout_seconds": 150}, 150),
        ({"timeout_seconds": 100_000}, 200),
        ({"subagent_type": "exact"}, 7),
        ({"subagent_type": "exact", "timeout_seconds": 150}, 7),
    ],
)
async def test_a_child_gets_the_default_or_what_was_asked_clamped(
    tmp_path: Path, order: dict[str, Any], given: float
) -> None:
    assert await seconds_of_child(tmp_path, order) == given


@pytest.mark.requirement("MASS-46")
async def test_the_timeout_is_the_one_that_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "retinue.yaml").write_text(CONFIG)
    clock = ManualClock()
    model = scripted({"main": [spawn({"task": "x"}), {"text": "end"}], "subagent": [{"hang": True}]}, clock=clock)
    async with retinue.open(config=tmp_path / "retinue.yaml", project=tmp_path, clock=clock, mode="yes") as r:
        run = await r.spawn(Profile("main", model=model), "go")
        await until(run, RunStarted, number=1)
        await clock.advance(39.9)
        assert await run.state() == "waiting_children"
        await clock.advance(0.2)
        result = await run.result()
    assert result.children[0].error_details == "Subagent 'subagent' timed out after 40000ms"


@pytest.mark.requirement("MASS-46")
async def test_what_a_person_sets_is_exact() -> None:
    model = scripted({"main": [{"text": "end"}]})
    async with retinue.open() as r:
        for limits, task, expected in (
            (Limits(seconds=3), Task("x"), 3),
            (None, Task("x", timeout_seconds=5), 5),
            (None, Task("x"), None),
        ):
            run = await r.spawn(Profile("main", model=model), task, limits=limits)
            await run.result()
            [spawned] = bodies(await r.control.log.read(run.tree), RunSpawned)
            assert spawned.timeout_seconds == expected
