"""A run asks its model while its first event is on the way to the disk; whatever it does then waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import retinue
from retinue import Profile
from retinue.core.errors import LogError
from retinue.core.events import Event, RunSpawned
from retinue.core.messages import Reply, Request
from retinue.log.memory import MemoryLog
from retinue.log.wrapped import Wrapped
from retinue.models.scripted import ScriptedModel
from retinue.testing import scripted
from tests.tree.kit import call


class SlowDisk(Wrapped):
    """Has first events written when the test says so."""

    def __init__(self) -> None:
        super().__init__(MemoryLog())
        self.disk: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        self._log.append(event, wait)
        return self.disk if isinstance(event.body, RunSpawned) else None


class Noticed:
    """A model that says when it was asked."""

    def __init__(self, model: ScriptedModel) -> None:
        self._model = model
        self.asked = asyncio.Event()

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        reply = await self._model.complete(request, on_delta)
        self.asked.set()
        return reply


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_model_is_asked_at_once_and_its_reply_waits_for_the_disk() -> None:
    ran = []

    @retinue.tool(tier="observe", repeatable=True)
    async def look() -> str:
        """Look."""
        ran.append("look")
        return "seen"

    model = Noticed(scripted({"main": [call("look"), "done"]}))
    async with retinue.open(mode="yes") as r:
        log = r.supervisor.log = SlowDisk()
        run = await r.spawn(Profile("main", "Look.", model=model, tools=[look]), "go")
        await model.asked.wait()
        await some_turns()
        assert ran == []
        log.disk.set_result(None)
        assert (await run.result()).final_response == "done"
    assert ran == ["look"]


async def test_a_first_event_that_cannot_be_written_ends_the_run_before_it_does_anything() -> None:
    ran = []

    @retinue.tool(tier="observe", repeatable=True)
    async def look() -> str:
        """Look."""
        ran.append("look")
        return "seen"

    model = Noticed(scripted({"main": [call("look"), "done"]}))
    async with retinue.open(mode="yes") as r:
        log = r.supervisor.log = SlowDisk()
        run = await r.spawn(Profile("main", "Look.", model=model, tools=[look]), "go")
        await model.asked.wait()
        log.disk.set_exception(LogError("cannot write the log: the disk is full"))
        result = await run.result()
    assert (result.status, result.error_details) == ("failed", "cannot write the log: the disk is full")
    assert ran == []


async def test_a_function_waits_for_the_disk_before_it_is_called() -> None:
    called = []

    async def work(task: str, context: Any) -> str:
        called.append(task)
        return "done"

    async with retinue.open(mode="yes") as r:
        log = r.supervisor.log = SlowDisk()
        run = await r.spawn(Profile("main", "Work.", call=work), "go")
        await some_turns()
        assert called == []
        log.disk.set_result(None)
        await run.result()
    assert called == ["go"]
