"""Uses of the library that type checkers accept, with the types that they must see. Checked, never run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, assert_never, assert_type

import msgspec
import pydantic

import retinue
from retinue import (
    Allow,
    Approval,
    Approver,
    Context,
    Deny,
    Event,
    EventBody,
    Limits,
    OpenOptions,
    Profile,
    Result,
    Retinue,
    RunHandle,
    Usage,
    events,
    tool,
)
from retinue.models import Model, OnDelta, Reply, Request
from retinue.subagent import AgentHooks, SubagentConfig, SubagentFactory, SubagentTool


@dataclass
class Finding:
    file: str


class Report(pydantic.BaseModel):
    title: str


class Row(msgspec.Struct):
    number: int


class Pair(TypedDict):
    left: str


# Outputs: the type of the profile reaches the handle, the result and the output.

assert_type(Profile("p"), Profile[str])
assert_type(Profile("p", "Do it.", model="anthropic:x", tools=["read"]), Profile[str])
assert_type(Profile("p", output=Finding), Profile[Finding])
assert_type(Profile("p", output=Report), Profile[Report])
assert_type(Profile("p", output=Row), Profile[Row])
assert_type(Profile("p", output=Pair), Profile[Pair])
assert_type(Profile("p", output=list[Finding]), Profile[list[Finding]])
assert_type(Profile("p", output={"type": "object"}), Profile[Any])
assert_type(replace(Profile("p", output=Finding), leaf=True), Profile[Finding])
assert_type(retinue.load_profile("explorer"), Profile[str])
Profile("p", output=Finding | None)
Profile("p", output=Literal["yes", "no"])

FINDER = Profile("finder", output=Finding)
PLAIN = Profile("plain")
ANY: Sequence[Profile] = [FINDER, PLAIN]

assert_type(retinue.run_sync(FINDER, "go").output(), Finding)
assert_type(retinue.run_sync(PLAIN, "go", mode="yes", path=".retinue", limits=Limits(turns=3)).output(), str)
retinue.run_sync("explorer", "go", profiles=ANY, model="anthropic:x")


async def use_runs(r: Retinue) -> None:
    run = await r.spawn(FINDER, "go", limits=Limits(tokens=10), context_paths=["src"])
    assert_type(run, RunHandle[Finding])
    result = await run.result()
    assert_type(result, Result[Finding])
    assert_type(result.output(), Finding)
    assert_type((await r.run(FINDER, "go", limits=Limits())).output(), Finding)
    assert_type((await r.run(PLAIN, "go")).output(), str)
    assert_type(await r.continue_run(run, "more"), RunHandle[Finding])
    assert_type(await r.continue_run(result, "more"), RunHandle[Finding])
    named: RunHandle[str] = await r.spawn("explorer", "go")
    assert_type((await named.result()).output(), str)
    async for piece in run.stream_text():
        assert_type(piece, str)
    async for event in run.events():
        assert_type(event, Event)
        assert_type(event.body, EventBody)
    async for item in run.events(deltas=True):
        assert_type(item, Event | events.Delta)


async def use_context(task: str, ctx: Context) -> str:
    child = await ctx.spawn(FINDER, task)
    assert_type((await child.result()).output(), Finding)
    return (await child.result()).output().file


Profile("agent", call=use_context)


# Approvers: async, with any name for the parameter.


async def decide(anything: Approval) -> Allow | Deny:
    return Allow(scope="run")


async def allow(_: Approval) -> Allow:
    return Allow()


async def decide_for(who: str, question: Approval) -> Allow | Deny:
    return Deny(who)


class Person:
    async def __call__(self, asked: Approval) -> Deny:
        return Deny("no")

    async def answer(self, asked: Approval, more: int = 0) -> Allow | Deny:
        return Allow()


for approver in (decide, allow, Person(), Person().answer, partial(decide_for, "me")):
    retinue.open(approver=approver)
one: Approver = decide
retinue.run_sync(PLAIN, "go", approver=allow)


# Events: every body is in the union, and a match narrows it.


def describe(body: EventBody) -> str:
    match body:
        case events.ToolCall(name=name, args=args):
            assert_type(name, str)
            assert_type(args, dict[str, Any])
            return name
        case events.UsageReported():
            assert_type(body.usage, Usage)
            assert_type(body.cost, Decimal | None)
            return body.model
        case events.Unknown():
            assert_type(body, events.Unknown)
            return body.kind
        case events.Message(text=text) | events.Thinking(text=text) | events.Warned(text=text):
            return text
        case _:
            return body.kind


def name_kind(body: EventBody) -> str:
    match body:
        case events.RunSpawned() | events.RunStarted() | events.RunRemote() | events.RunResumed() | events.RunEnded():
            return "run"
        case events.RunWaiting() | events.ModelChanged():
            return "conversation"
        case events.TurnStarted() | events.TurnEnded() | events.Thinking() | events.Message() | events.Inbox():
            return "turn"
        case events.ToolCall() | events.ToolStarted() | events.ToolResult():
            return "tool"
        case events.ApprovalAsked() | events.ApprovalDecided():
            return "approval"
        case events.UsageReported() | events.Warned() | events.Gap() | events.ProgressReported():
            return "note"
        case events.AnswerGiven() | events.AnswersShown() | events.VoteCast() | events.MemberLost():
            return "member"
        case events.TeamDecided():
            return "team"
        case events.RoundAnswered() | events.RoundEvaluated() | events.RoundVoted():
            return "round"
        case events.ChecklistAccepted() | events.ImprovementsProposed():
            return "checklist"
        case events.Unknown():
            return body.kind
        case _:
            assert_never(body)


# Options that a function of one's own passes on.


async def open_strictly(**options: Unpack[OpenOptions]) -> None:
    async with retinue.open(".retinue", model="anthropic:x", **options) as r:
        await use_runs(r)


# Tools keep the types of their functions.


@tool
def add(a: int, b: int = 2) -> int:
    """Add."""
    return a + b


@tool(tier="observe", repeatable=True)
async def look(ctx: Context, where: str) -> Mapping[str, str]:
    """Look."""
    return {"where": ctx.path}


assert_type(add(1, b=3), int)
Profile("p", tools=["read", add, look, FINDER])


# Models and prices of one's own.


class Echo:
    async def complete(self, asked: Request, show: OnDelta) -> Reply:
        show("text", asked.system)
        return Reply(asked.system, usage=Usage(1, 1))


class Flat:
    def price(self, name: str, used: Usage) -> Decimal:
        return Decimal(used.total_tokens)


echo: Model = Echo()
retinue.open(model=Echo(), prices=Flat())
Profile("p", model=Echo())


# The names of the agent_sdk.

SubagentTool(SubagentConfig("s").with_max_turns(3), tools=["read"], hooks=AgentHooks(), approver=decide, mode="ask")
SubagentFactory(model=Echo(), max_depth=1, project=".", config="retinue.yaml")
