"""Remaining limits that travel down to servers: they only ever make things narrower."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.control.reporting import Reporting
from retinue.core.caller import NOBODY, Caller, narrow_caller
from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError, SpawnRefused
from retinue.core.limits import Limits
from retinue.core.ports import SpawnOrder
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS
from retinue.supervisor.supervisor import Supervisor
from retinue.testing import ManualClock, scripted
from tests.protocol.test_inherited_limits import FULL, TRACE
from tests.remote.collector.kit import open_collector

SPAWN = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "deeper"}]}}]}


def test_of_two_the_narrower() -> None:
    other = Caller(depth=5, deadline=1.0, tokens=None, cost=Decimal(1), parent_id="q")
    both = narrow_caller(FULL, other)
    assert (both.depth, both.deadline, both.tokens, both.cost) == (2, 1.0, 1000, Decimal("0.125"))
    assert (both.parent_id, both.root_id, both.traceparent) == ("q", "r", TRACE)
    assert narrow_caller(NOBODY, FULL) == FULL == narrow_caller(FULL, NOBODY)


def test_a_primary_takes_a_level_unless_it_stands_for_the_caller() -> None:
    assert Caller(depth=2).narrow(Limits(depth=3)).depth == 1
    assert Caller(depth=2).as_client().narrow(Limits(depth=3)).depth == 2
    assert Caller(depth=9).narrow(Limits(depth=3)).depth == 3
    assert Caller(tokens=5).narrow(Limits(tokens=None, depth=1)).tokens == 5
    assert NOBODY.narrow(Limits()).tokens is UNSET
    assert Caller(depth=0).as_client().may_spawn and not Caller(depth=0).may_spawn


@asynccontextmanager
async def spawnable(folder: Path) -> AsyncIterator[tuple[Supervisor, Reporting]]:
    """A process that may go three levels deep and starts servers."""
    supervisor = make_supervisor(Parts(project=folder, mode="yes"))
    reporting = Reporting(None, serves=False, strict=True, limits=Limits(), caller=supervisor.caller)
    reporting.attach(supervisor, supervisor)
    try:
        yield supervisor, reporting
    finally:
        await reporting.close()
        await supervisor.close()


async def finished(supervisor: Supervisor, caller: Caller | None, **limits: Any) -> Result[Any]:
    script = {"main": [SPAWN, {"text": "done"}], "*": [SPAWN, {"text": "deeper still"}]}
    profile = Profile("main", "x", model=scripted(script))
    run = supervisor.spawner.spawn_primary(
        profile, Task("go"), limits=Limits(**limits) if limits else None, caller=caller
    )
    await run.join()
    return run.result()


def levels(result: Result[Any]) -> int:
    return 1 + max((levels(child) for child in result.children), default=0)


async def test_a_tree_made_for_a_call_goes_no_deeper_than_what_is_left(tmp_path: Path) -> None:
    """Whatever the profile and the settings here say."""
    supervisor = make_supervisor(Parts(project=tmp_path, mode="yes", limits=Limits(depth=5)))
    try:
        assert levels(await finished(supervisor, None)) == 6
        assert levels(await finished(supervisor, Caller(depth=3))) == 3
        assert levels(await finished(supervisor, Caller(depth=3), depth=9)) == 3
        assert levels(await finished(supervisor, Caller(depth=1))) == 1
        with pytest.raises(SpawnRefused) as refused:
            await finished(supervisor, Caller(depth=0))
        assert str(refused.value) == (
            "Subagent depth limit exceeded (0/0). Cannot spawn nested subagent 'main' \u2014 maximum nesting depth "
            "reached."
        )
    finally:
        await supervisor.close()


async def test_a_tree_that_goes_on_later_stays_within_what_was_left(tmp_path: Path) -> None:
    """Also in a process that inherits nothing, and when its answer is continued as a tree of its own."""
    supervisor = make_supervisor(Parts(project=tmp_path, mode="yes"))
    profile = Profile("main", "x", model=scripted({"main": [{"text": "first"}, {"text": "second"}]}))
    try:
        first = supervisor.spawner.spawn_primary(profile, Task("go"), caller=Caller(depth=2), limits=Limits(turns=7))
        await first.join()
        assert first.view.spawned.limits == Limits(depth=1, turns=7)
        handle = await supervisor.continue_run(first.ref.tree, 0, "go on", ResumeOverrides(profiles=[profile]))
        again = supervisor.trees[handle.tree].runs[0]
        assert (first.max_depth, again.max_depth, again.max_turns) == (1, 1, 7)
        await again.join()
    finally:
        await supervisor.close()


async def test_a_process_keeps_within_what_it_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no recursion gets around the limit, be it through a server that passes nothing on but its environment."""
    depths = []
    inherited: dict[str, str] = {}
    for _ in range(5):
        for name, value in inherited.items():
            monkeypatch.setenv(name, value)
        async with spawnable(tmp_path) as (supervisor, reporting):
            try:
                depths.append(levels(await finished(supervisor, None)))
            except SpawnRefused:
                depths.append(0)
            inherited = dict(reporting.collector.environment("next"))
            inherited = {name: value for name, value in inherited.items() if name not in (ADDRESS, CPE_ADDRESS)}
    assert depths == [4, 3, 2, 1, 0]


async def test_a_call_carries_what_is_left_to_its_run(tmp_path: Path) -> None:
    before = time.time()
    async with open_collector(tmp_path, limits=Limits(depth=2, tokens=50_000, seconds=100.0)) as h:
        await h.until("run.started")
        meta = h.collector.meta(h.main.ref)
        assert meta["retinue/depth"] == 2
        assert meta["retinue/tokens"] == 50_000
        assert before + 100 <= meta["retinue/deadline"] <= time.time() + 100
        assert meta["traceparent"].split("-")[1] == h.supervisor.trees[h.tree].trace_id
        [child] = h.supervisor.spawner.spawn_children(
            h.main, [SpawnOrder(Profile("kid", "x", limits=Limits(tokens=20_000)), Task("t"))]
        )
        below = h.collector.meta(child.ref)
        assert (below["retinue/depth"], below["retinue/tokens"]) == (1, 20_000)
        h.main.stop("cancelled")
        await h.main.join()
        gone = h.collector.meta(h.main.ref)
        assert gone["retinue/depth"] == 0 and gone["retinue/deadline"] == 0.0


async def test_time_and_money_are_narrowed_too(tmp_path: Path) -> None:
    clock = ManualClock()
    parts = Parts(project=tmp_path, mode="yes", clock=clock)
    supervisor = make_supervisor(parts)
    try:
        profile = Profile("main", "x", model=scripted({"main": [{"hang": True}]}), limits=Limits(seconds=500.0))
        late = supervisor.spawner.spawn_primary(
            profile, Task("go"), caller=Caller(deadline=clock.wall() + 60, tokens=7000)
        )
        assert late.seconds == pytest.approx(60)
        assert late.account is not None and late.account.tokens == 7000
        soon = supervisor.spawner.spawn_primary(profile, Task("go"), caller=Caller(deadline=clock.wall() + 9999))
        assert soon.seconds == 500.0
        over = supervisor.spawner.spawn_primary(
            profile, Task("go"), caller=Caller(deadline=clock.wall() - 1, traceparent=TRACE)
        )
        await over.join()
        assert over.result().status == "timed_out"
        assert over.view.spawned.trace_id == TRACE.split("-")[1] and over.view.spawned.traceparent == TRACE
        with pytest.raises(ConfigError, match="the price of model 'ScriptedModel' is not known"):
            supervisor.spawner.spawn_primary(profile, Task("go"), caller=Caller(cost=Decimal(1)))
    finally:
        await supervisor.close()
