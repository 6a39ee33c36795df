"""A run asks its model while its first event is on the way to the disk; whatever it does then waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Limits, Profile
from retinue.core.errors import LogError
from retinue.core.events import Delta, Event, RunSpawned
from retinue.core.messages import Reply, Request
from retinue.core.ports import Log
from retinue.log.forwarding_log import ForwardingLog
from retinue.log.memory import MemoryLog
from retinue.models.scripted import ScriptedModel
from retinue.testing import scripted
from tests.supervisor.tree.kit import call, spawn


class SlowDisk(ForwardingLog):
    """Has first events written when the test says so."""

    def __init__(self, log: Log | None = None) -> None:
        super().__init__(log or MemoryLog())
        self.disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        self._log.append(event, wait)
        return self.disk if isinstance(event.body, RunSpawned) else None


class Noticed:
    """A model that says when it was asked, and by whom."""

    def __init__(self, model: ScriptedModel) -> None:
        self._model = model
        self.asked = asyncio.Event()
        self.runs: list[int] = []

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        self.runs.append(request.ref.run)
        reply = await self._model.complete(request, on_delta)
        self.asked.set()
        return reply


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def looking(r: retinue.Retinue, ran: list[str]) -> retinue.RunHandle:
    """A run that has asked its model, which wants a tool."""

    @retinue.tool(tier="observe", repeatable=True)
    async def look() -> str:
        """Look."""
        ran.append("look")
        return "seen"

    model = Noticed(scripted({"main": [call("look"), "done"]}))
    run = await r.spawn(Profile("main", "Look.", model=model, tools=[look]), "go")
    await model.asked.wait()
    return run


async def test_the_model_is_asked_at_once_and_its_reply_waits_for_the_disk() -> None:
    ran: list[str] = []
    async with retinue.open(mode="yes") as r:
        log = r.control.trees.log = SlowDisk()
        run = await looking(r, ran)
        await some_turns()
        assert ran == []
        log.disk.set_result(None)
        assert (await run.result()).final_response == "done"
    assert ran == ["look"]


async def test_a_first_event_that_cannot_be_written_ends_the_run_before_it_does_anything() -> None:
    ran: list[str] = []
    async with retinue.open(mode="yes") as r:
        log = r.control.trees.log = SlowDisk()
        run = await looking(r, ran)
        log.disk.set_exception(LogError("cannot write the log: the disk is full"))
        result = await run.result()
    assert (result.status, result.error_details) == ("failed", "cannot write the log: the disk is full")
    assert ran == []


class Streams:
    """A model that says three words at once."""

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        for word in ("one", "two", "three"):
            on_delta("text", word)
        return Reply("one two three")


@pytest.mark.requirement("P1")
async def test_what_a_run_says_is_shown_when_it_is_known_that_there_is_one(tmp_path: Path) -> None:
    async with retinue.open(tmp_path / ".retinue") as r:
        run = await r.spawn(Profile("main", "Say.", model=Streams()), "go")
        shown = [item async for item in r.control.watch(run.tree, deltas=True)]
    assert isinstance(shown[0], Event) and isinstance(shown[0].body, RunSpawned)
    assert "".join(item.text for item in shown if isinstance(item, Delta)) == "onetwothree"


async def test_a_function_waits_for_the_disk_before_it_is_called() -> None:
    called = []

    async def work(task: str, context: Any) -> str:
        called.append(task)
        return "done"

    async with retinue.open(mode="yes") as r:
        log = r.control.trees.log = SlowDisk()
        run = await r.spawn(Profile("main", "Work.", call=work), "go")
        await some_turns()
        assert called == []
        log.disk.set_result(None)
        await run.result()
    assert called == ["go"]


async def test_a_run_with_a_copy_which_may_have_to_be_set_up_waits_for_the_disk(tmp_path: Path) -> None:
    model = Noticed(scripted({"main": ["done"]}))
    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        log = r.control.trees.log = SlowDisk(r.control.log)
        run = await r.spawn(Profile("main", "Work.", model=model, workspace="copy"), "go")
        log.disk.set_exception(LogError("cannot write the log"))
        assert (await run.result()).error_details == "cannot write the log"
    assert not model.asked.is_set()
    assert not (tmp_path / ".retinue" / "runs").exists()


class RefusesOne(ForwardingLog):
    """Takes all but the first event of run 2."""

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        written = self._log.append(event, wait)
        if event.run == 2 and isinstance(event.body, RunSpawned):
            refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            refused.set_exception(LogError("cannot write the log"))
            return refused
        return written


async def test_a_run_that_waits_for_a_slot_and_cannot_be_written_asks_nothing() -> None:
    model = Noticed(scripted({"main": [spawn({"task": "a"}, {"task": "b"}), "done"], "*": ["done"]}))
    async with retinue.open(mode="yes") as r:
        r.control.trees.log = RefusesOne(r.control.log)
        profile = Profile("main", "Ask.", model=model, tools=["spawn_subagents"])
        result = await r.run(profile, "go", limits=Limits(concurrent=1))
    assert [child.error_details for child in result.children] == [None, "cannot write the log"]
    assert model.runs == [0, 1, 0]


async def test_a_run_that_goes_on_waits_for_the_disk() -> None:
    model = Noticed(scripted({"main": ["done"]}))
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", "Work.", model=model), "go")
        await run.result()
        model.asked.clear()
        log = r.control.trees.log = SlowDisk(r.control.log)
        again = await r.continue_run(run, "more", profiles=[Profile("main", "Work.", model=model)])
        await some_turns()
        assert not model.asked.is_set()
        log.disk.set_result(None)
        await again.result()
        assert model.asked.is_set()
