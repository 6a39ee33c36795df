"""Shared helpers for the tests of seed 001: two tools, a model that remembers, and three ways to run one agent."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

import retinue
from retinue import Limits, Profile, Result, Retinue, tool
from retinue.core.messages import Model, Reply, Request
from retinue.subagent import SubagentConfig, SubagentFactory
from retinue.testing import ManualClock, scripted

Replies = Sequence[dict[str, Any]]


@tool(tier="observe")
def echo(message: str) -> str:
    """Says it back."""
    return message


@tool(tier="confirm")
def launch() -> str:
    """Needs a person."""
    return "launched"


def calls(name: str, **args: Any) -> dict[str, Any]:
    """Return a reply with a tool call."""
    return {"tools": [{"name": name, "args": args}]}


class Spy:
    """A model that records its requests, its turns, and its aborted calls."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.reached: defaultdict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        self.requests.append(msgspec.structs.replace(request, thread=list(request.thread)))
        self.reached[request.ref.agent, request.turn].set()
        try:
            return await self._model.complete(request, on_delta)
        except asyncio.CancelledError:
            self.aborted.append(request.ref.agent)
            raise

    def asked(self, agent: str) -> list[Request]:
        return [request for request in self.requests if request.ref.agent == agent]


def spy(agents: dict[str, Any], *, clock: ManualClock | None = None) -> Spy:
    return Spy(scripted(agents, clock=clock))


@dataclass
class Play:
    """An agent called `worker`, the script of its model, and the actions on it from outside."""

    replies: Replies
    limits: Limits = field(default_factory=Limits)
    act: Callable[["Play", Callable[[], Awaitable[object]]], Awaitable[None]] | None = None
    cancel_before: bool = False

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.model = spy({"worker": list(self.replies)}, clock=self.clock)

    def profile(self) -> Profile:
        return Profile("worker", "Work.", model=self.model, tools=[echo, launch], limits=self.limits)


async def _meanwhile(play: Play, cancel: Callable[[], Awaitable[object]], work: Awaitable[Any]) -> Any:
    if play.act is None:
        return await work
    running = asyncio.ensure_future(work)
    await play.act(play, cancel)
    return await running


async def as_primary(play: Play, r: Retinue) -> Result[Any]:
    run = await r.spawn(play.profile(), "the task")
    if play.cancel_before:
        await run.cancel()
    return await _meanwhile(play, run.cancel, run.result())


async def as_child(play: Play, r: Retinue) -> Result[Any]:
    results: list[Result[Any]] = []

    async def boss(task: str, ctx: retinue.Context) -> str:
        child = await ctx.spawn(play.profile(), "the task")

        async def cancel() -> bool:
            return await r.control.cancel(ctx.tree, child.number)

        if play.cancel_before:
            await cancel()
        results.append(await _meanwhile(play, cancel, child.result()))
        return "over"

    await r.run(Profile("boss", call=boss, tools=[echo, launch]), "go")
    [result] = results
    return result


async def as_tool(play: Play, r: Retinue) -> dict[str, Any]:
    """Through `retinue.subagent`: the result as its JSON."""
    limits = msgspec.to_builtins(play.limits)
    seconds = limits.get("seconds")
    config = SubagentConfig("worker", max_turns=limits.get("turns"), system_prompt="Work.")
    if seconds is not None:
        config = config.with_timeout_ms(round(seconds * 1000))
    token = asyncio.Event()
    if play.cancel_before:
        token.set()

    async def cancel() -> None:
        token.set()

    async with SubagentFactory(retinue=r, model=play.model, tools=[echo, launch]) as factory:
        executing = factory.create(config).execute(None, {"task": "the task"}, cancel=token)
        outcome = await _meanwhile(play, cancel, executing)
    assert outcome.data is not None
    assert (outcome.success, outcome.output) == (outcome.data["success"], outcome.data["final_response"])
    assert outcome.duration_ms == outcome.data["duration_ms"]
    return outcome.data
