"""Short ways to run a scripted tree and look at what it did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import retinue
from retinue import Event, Limits, Profile, Result, Task
from retinue.core.control import RunHandle
from retinue.core.events import Body, RunWaiting
from retinue.testing import scripted


def main(agents: dict[str, Any], **fields: Any) -> Profile:
    """A primary whose whole tree is scripted."""
    return Profile("main", "You are main.", model=scripted(agents), **fields)


def call(name: str, /, **args: Any) -> dict[str, Any]:
    return {"tools": [{"name": name, "args": args}]}


def spawn(*tasks: dict[str, Any], **options: Any) -> dict[str, Any]:
    return call("spawn_subagents", tasks=list(tasks), **options)


async def tree(
    agents: dict[str, Any], *, task: str | Task = "go", limits: Limits | None = None, **options: Any
) -> tuple[Result[Any], list[Event]]:
    """Runs it to its end with every tool allowed; the result and all events."""
    options = {"mode": "yes", **options}
    async with retinue.open(**options) as r:
        run = await r.spawn(main(agents), task, limits=limits)
        events = [event async for event in run.events()]
        return await run.result(), events


def bodies(events: Sequence[Event], kind: type[Any], *, run: int | None = None) -> list[Any]:
    return [event.body for event in events if isinstance(event.body, kind) and (run is None or event.run == run)]


def kinds(events: Sequence[Event], *, run: int) -> list[str]:
    return [event.kind for event in events if event.run == run]


async def until(run: RunHandle, kind: type[Body], *, number: int | None = None) -> Event:
    """Waits for the first such event of the run's subtree."""
    async for event in run.events():
        if isinstance(event.body, kind) and (number is None or event.run == number):
            return event
    raise AssertionError(f"the run ended without {kind.kind}")


class Talk:
    """One conversation, step by step. Each wait is for events after those already seen."""

    def __init__(self, run: RunHandle) -> None:
        self.run = run
        self._seen = 0

    async def next(self, kind: type[Any], *, number: int = 0) -> Any:
        async for event in self.run.events(after=self._seen):
            self._seen = event.seq
            if isinstance(event.body, kind) and event.run == number:
                return event.body
        raise AssertionError(f"the conversation ended without {kind.kind}")

    async def say(self, text: str) -> RunWaiting:
        await self.run.send(text)
        waiting: RunWaiting = await self.next(RunWaiting)
        return waiting

    async def interrupt(self) -> RunWaiting:
        assert await self.run.control.interrupt_turn(self.run.tree)
        waiting: RunWaiting = await self.next(RunWaiting)
        return waiting

    async def end(self) -> list[Event]:
        assert await self.run.control.end_conversation(self.run.tree)
        await self.run.result()
        return [event async for event in self.run.events()]
