"""The contract of remote runs: what holds for every adapter, whatever its peer speaks.

An adapter brings a `Bench`: a supervisor, one run at a peer, and the hand of the peer. `CONTRACT` has the checks, each
of which takes a new bench, with the capability that an adapter needs for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from decimal import Decimal
from typing import Any, Protocol

import msgspec

from retinue.core.approvals import Allow, Decision
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Delta,
    Event,
    Gap,
    Inbox,
    Message,
    RunEnded,
    RunSpawned,
    RunStarted,
    Thinking,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    UsageReported,
    Warned,
)
from retinue.core.results import ChangedFile, Result
from retinue.core.usage import Usage
from retinue.log.runs import Runs
from retinue.remote.port import STARTED, Capabilities, RemoteSpawned
from retinue.supervisor.supervisor import Supervisor

# The fields that a peer may set, for each kind of event that it may report. A decision, and not read from the code: who
# adds a field to an event decides here whether our log, screens, clocks, approvals and resumed runs may believe it.
MAY_SET: dict[type[Body], str] = {
    RunStarted: "sandbox",
    TurnStarted: "turn",
    Thinking: "text type",
    Message: "text final host",
    ToolCall: "call_id name args display_name waits timeout_seconds host within raw",
    ToolStarted: "call_id",
    ToolResult: "call_id name text success duration_ms sandbox",
    ApprovalAsked: "approval_id call_id tool args preview",
    ApprovalDecided: "approval_id call_id allowed reason tool args",
    Inbox: "text",
    UsageReported: "model usage cost estimated",
    TurnEnded: "turn",
    Warned: "text code",
    Gap: "count reason",
    RunEnded: "final_response error_details partial structured",
}
# Fields of which only known values are taken, and what becomes of any other.
INSTEAD: dict[tuple[type[Body], str], Any] = {
    (ToolCall, "tier"): "confirm",
    (ToolResult, "outcome"): "",
    (Message, "replies_to"): "",
    (Inbox, "source"): "notice",
    (RunEnded, "status"): "failed",
    (RunEnded, "code"): "",
    (RunEnded, "duration_ms"): 0,
}
_HOSTILE: dict[str, Any] = {
    "str": "evil",
    "bool": True,
    "int": 7,
    "float": 7.0,
    "Decimal": Decimal(7),
    "dict[str, Any]": {"evil": 7},
    "Any": {"evil": 7},
    "tuple[str, ...]": ("evil",),
    "tuple[int, ...]": (0, 1),
    "tuple[ChangedFile, ...]": (ChangedFile("evil", "modified"),),
    "Usage": Usage(7, 7),
}


def make_hostile(kind: type[Body]) -> Body:
    """Return a body of which every field has a value that is not its default. A field of a new type needs one too."""
    return kind(**{name: _HOSTILE[type_.removesuffix(" | None")] for name, type_ in _list_fields(kind)})


def _list_fields(kind: type[Body]) -> Iterator[tuple[str, str]]:
    for field in kind.__struct_fields__:
        yield field, next(base.__annotations__[field] for base in kind.__mro__ if field in base.__annotations__)


def expect_fields(said: Body) -> dict[str, Any]:
    """Return the fields of an event as they may arrive, if the peer has said this."""
    kind, defaults = type(said), {field.name: field.default for field in msgspec.structs.fields(said)}
    return {
        name: getattr(said, name) if name in MAY_SET[kind].split() else INSTEAD.get((kind, name), defaults[name])
        for name in kind.__struct_fields__
    }


class Bench(Protocol):
    """One run at a peer. `run` is its number in the tree."""

    supervisor: Supervisor
    capabilities: Capabilities
    tree: str
    run: int

    async def say(self, body: Body | RemoteSpawned, run: str = STARTED) -> None:
        """Have the peer report this; a report that it may not make is not an error here."""
        ...

    async def end(self, status: str, text: str) -> None:
        """Have the peer report the ending of the run."""
        ...

    async def lose(self) -> None:
        """Have the peer go away."""
        ...

    async def take_words(self) -> str:
        """Wait for words that reach the peer, and have it confirm them."""
        ...

    async def wait_for_cancel(self) -> None: ...

    async def take_answer(self) -> Decision: ...


Check = Callable[[Bench], Awaitable[None]]


async def events_until(bench: Bench, kind: type[Any], *, run: int | None = None) -> list[Event]:
    """Wait for an event of that kind of the run; return the log of the tree up to it."""
    wanted = bench.run if run is None else run
    seen: list[Event] = []
    async with asyncio.timeout(150), aclosing(bench.supervisor.watch(bench.tree)) as events:
        async for event in events:
            if not isinstance(event, Delta):
                seen.append(event)
                if event.run == wanted and isinstance(event.body, kind):
                    return seen
    raise AssertionError(f"the tree ended without {kind.__name__} of run {wanted}")


def result_of(bench: Bench, events: list[Event]) -> Result[Any]:
    return Runs.of(bench.tree, events).runs[bench.run].result(bench.tree)


def bodies(events: list[Event], run: int, *kinds: type[Body]) -> list[Any]:
    return [event.body for event in events if event.run == run and isinstance(event.body, kinds)]


async def streams_what_the_peer_does(bench: Bench) -> None:
    """Each report is an event of our run before the ending comes, in order."""
    said = [Thinking("I look"), ToolCall("c1", "grep", {"pattern": "x"}), ToolResult("c1", "grep", "found")]
    for number, body in enumerate(said):
        await bench.say(body)
        seen = bodies(await events_until(bench, type(body)), bench.run, Thinking, ToolCall, ToolResult)
        assert [type(each) for each in seen] == [type(each) for each in said[: number + 1]]
    await bench.end("done", "over")
    result = result_of(bench, await events_until(bench, RunEnded))
    assert (result.status, result.final_response, result.tool_count) == ("done", "over", 1)


async def ends_once(bench: Bench) -> None:
    """Nothing that comes after an ending is written."""
    await bench.end("failed", "it broke")
    await events_until(bench, RunEnded)
    await bench.say(Thinking("still here"))
    await bench.end("done", "after all")
    await bench.supervisor.cancel(bench.tree)
    events = [event async for event in bench.supervisor.watch(bench.tree) if isinstance(event, Event)]
    assert [body.status for body in bodies(events, bench.run, RunEnded)] == ["failed"]
    assert bodies(events, bench.run, Thinking) == []


async def shows_runs_below_under_names_of_ours(bench: Bench) -> None:
    await bench.say(RemoteSpawned(parent=STARTED, agent="../evil name", task="dig", subagent_id="x"), "below")
    await bench.say(Thinking("deep"), "below")
    number = bench.run + 1
    events = await events_until(bench, Thinking, run=number)
    [above, below] = [event for event in events if event.run >= bench.run and isinstance(event.body, RunSpawned)]
    assert below.path == f"{above.path}/evil-name-{number}"
    assert below.body.parent == bench.run and below.body.remote_id  # type: ignore[union-attr]
    await bench.end("done", "over")
    events = await events_until(bench, RunEnded)
    assert [body.status for body in bodies(events, number, RunEnded)] == ["disconnected"]  # nobody has said how


async def takes_nothing_about_runs_that_nobody_announced(bench: Bench) -> None:
    await bench.say(Thinking("who am I"), "stranger")
    await bench.say(RemoteSpawned(parent="stranger", agent="child"), "child")
    await bench.end("done", "over")
    events = await events_until(bench, RunEnded)
    assert [event.run for event in events if event.kind == "run.spawned"] == list(range(bench.run + 1))
    assert not any(isinstance(event.body, Thinking) for event in events)


async def cannot_be_lied_to(bench: Bench) -> None:
    """Names are short, numbers can be added up, and turns do not go back."""
    await bench.say(ToolCall("c" * 150, "n" * 150, {}))
    await bench.say(UsageReported("m", Usage(10**15, 1)))
    await bench.say(UsageReported("m", Usage(5, 1)))
    await bench.end("unheard of", "")
    events = await events_until(bench, RunEnded)
    result = result_of(bench, events)
    assert (result.status, result.usage.input_tokens) == ("failed", 5)
    assert all(len(body.name) <= 200 for body in bodies(events, bench.run, ToolCall))


async def sets_only_the_fields_that_a_peer_may_set(bench: Bench) -> None:
    """Nothing of another field arrives: not a rule, a run number, an id of a question, a path or an ending's time."""
    said = [make_hostile(kind) for kind in MAY_SET if kind is not RunEnded]
    for body in said:
        await bench.say(body)
    await bench.end("done", "over")
    events = await events_until(bench, RunEnded)
    arrived = [each for each in bodies(events, bench.run, *MAY_SET) if not isinstance(each, RunEnded)]
    assert arrived
    for body in arrived:
        hostile = msgspec.structs.asdict(make_hostile(type(body)))
        believed = {name for name, value in hostile.items() if getattr(body, name) == value}
        assert believed <= set(MAY_SET[type(body)].split()), body
        if isinstance(body, ApprovalAsked | ApprovalDecided):
            assert body.approval_id.startswith(f"{bench.tree}/{bench.run}/")


async def ends_disconnected_when_the_peer_is_lost(bench: Bench) -> None:
    await bench.say(Thinking("I was"))
    await events_until(bench, Thinking)
    await bench.lose()
    assert result_of(bench, await events_until(bench, RunEnded)).status == "disconnected"


async def stops_when_it_is_cancelled(bench: Bench) -> None:
    assert await bench.supervisor.cancel(bench.tree, bench.run)
    await bench.wait_for_cancel()
    await bench.end("cancelled", "stopped")
    assert result_of(bench, await events_until(bench, RunEnded)).status == "cancelled"


async def takes_words_or_says_that_they_do_not_reach_it(bench: Bench) -> None:
    sending = asyncio.create_task(bench.supervisor.send(bench.tree, bench.run, "left, not right"))
    if not bench.capabilities.send:
        assert (await sending).state == "elsewhere"
        return
    assert await bench.take_words() == "left, not right"
    receipt = await sending
    [words] = bodies(await events_until(bench, Inbox), bench.run, Inbox)
    assert (receipt.state, words.text, words.source) == ("queued", "left, not right", "user")


async def has_its_questions_answered_here(bench: Bench) -> None:
    await bench.say(ApprovalAsked("their-id", "call-1", "shell", {"command": "ls"}))
    asked = (await events_until(bench, ApprovalAsked))[-1].body
    assert isinstance(asked, ApprovalAsked) and asked.approval_id != "their-id"  # the id is ours
    [question] = bench.supervisor.approvals.pending(bench.tree)
    assert (question.tool, question.args) == ("shell", {"command": "ls"})
    assert bench.supervisor.approvals.answer(question.id, Allow(), by="user") == "taken"
    assert await bench.take_answer() == Allow()
    assert (await events_until(bench, ApprovalDecided))[-1].body.allowed  # type: ignore[union-attr]


CONTRACT: dict[Check, str] = {
    streams_what_the_peer_does: "",
    ends_once: "",
    shows_runs_below_under_names_of_ours: "",
    takes_nothing_about_runs_that_nobody_announced: "",
    cannot_be_lied_to: "",
    sets_only_the_fields_that_a_peer_may_set: "",
    ends_disconnected_when_the_peer_is_lost: "",
    takes_words_or_says_that_they_do_not_reach_it: "",
    stops_when_it_is_cancelled: "",
    has_its_questions_answered_here: "answer",
}


def checks_for(capabilities: Capabilities) -> list[Check]:
    return [check for check, need in CONTRACT.items() if not need or getattr(capabilities, need)]
