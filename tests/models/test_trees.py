"""Tests of whole trees on real provider SDKs: runs, refusals and costs."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

import retinue
from retinue import Event, Profile, Result, Task, tool
from retinue.core.events import Delta, Message, RunEnded, Thinking, ToolCall, ToolResult, UsageReported, Warned
from retinue.core.messages import AssistantTurn, Thought
from retinue.core.usage import Usage
from retinue.log.threads import fold_thread
from retinue.models.providers import build_messages
from retinue.models.retrying import ATTEMPTS
from retinue.subagent import SubagentResult
from retinue.testing import ManualClock
from tests.models import streams
from tests.models.kit import CHAT, CLAUDE, serving
from tests.models.server import Answer, refusal
from tests.supervisor.tree.kit import bodies

ADDED: list[int] = []


@tool
async def add(a: int) -> str:
    """Adds it."""
    ADDED.append(a)
    return f"added {a}"


@pytest.fixture(autouse=True)
def nothing_added() -> None:
    ADDED.clear()


async def run(profile: Profile, task: str | Task = "go", **options: Any) -> tuple[Result[Any], list[Event]]:
    """One tree to its end. Whenever a model waits to be asked again, time moves on."""
    clock = ManualClock()
    async with retinue.open(mode="yes", clock=clock, **options) as r:
        started = await r.spawn(profile, task)
        events = []
        async for event in started.events():
            events.append(event)
            if isinstance(event.body, Warned) and event.body.code == "retry":
                await clock.advance(60)
        return await started.result(), events


async def test_a_run_with_thinking_and_a_tool() -> None:
    thinks = (streams.thinking("hm", "sig=="), streams.text("I add."), streams.tool("c1", "add", '{"a": 1}'))
    usage = {"input_tokens": 10, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20}
    answers = (Answer(streams.anthropic(*thinks, stop="tool_use", usage=usage)), streams.said("It is done."))
    async with serving(*answers) as server:
        result, events = await run(Profile("main", "You add.", model=CLAUDE, tools=[add]))
    assert (result.status, result.final_response, ADDED) == ("done", "It is done.", [1])
    assert result.usage == Usage(140, 14, 100, 20)
    assert [body.usage for body in bodies(events, UsageReported)] == [Usage(130, 7, 100, 20), Usage(10, 7)]
    assert [body.text for body in bodies(events, Thinking)] == ["hm"]
    assert [body.text for body in bodies(events, ToolResult)] == ["added 1"]
    again = server.requests[1].body["messages"][1]["content"]
    assert (again[0]["thinking"], again[0]["signature"]) == ("hm", "sig==")
    turn = next(turn for turn in fold_thread(events, 0) if isinstance(turn, AssistantTurn))
    assert turn.thoughts == (Thought("hm", "thinking", "sig==", "", "anthropic"),)


async def test_thoughts_go_back_in_their_places() -> None:
    """A signature holds for a thought where it stood; Claude refuses a thread in which it was moved."""
    blocks = (
        streams.thinking("first", "s1"), streams.text("One."), streams.thinking("second", "s2"),
        streams.tool("c1", "add", '{"a": 1}'), streams.thinking("third", "s3"), streams.text(" Two."),
        streams.tool("c2", "add", '{"a": 2}'),
    )  # fmt: skip
    async with serving(Answer(streams.anthropic(*blocks, stop="tool_use")), streams.said("done")) as server:
        result, events = await run(Profile("main", model=CLAUDE, tools=[add]))
    assert (result.status, sorted(ADDED)) == ("done", [1, 2])
    sent = server.requests[1].body["messages"][1]["content"]
    said = [part.get("signature") or part.get("text") or part.get("id") for part in sent]
    assert said == ["s1", "One.", "s2", "c1", "s3", " Two.", "c2"]
    again = build_messages("", fold_thread(events, 0), provider="anthropic")  # and so after a crash
    assert [type(part).__name__ for part in again[1].parts] == [
        "ThinkingPart", "TextPart", "ThinkingPart", "ToolCallPart", "ThinkingPart", "TextPart", "ToolCallPart"
    ]  # fmt: skip


@pytest.mark.finding("S13")
@pytest.mark.requirement("CODEY-31")
async def test_text_blocks_are_joined_by_newlines_and_calls_are_skipped() -> None:
    first = (streams.text("One,", " two."), streams.tool("c1", "add", '{"a": 1}'), streams.text("Three."))
    last = (streams.text("Four."), streams.text(""), streams.text("Fi", "ve."))
    answers = (Answer(streams.anthropic(*first, stop="tool_use")), Answer(streams.anthropic(*last)))
    said: list[str] = []
    async with serving(*answers), retinue.open(mode="yes") as r:
        started = await r.spawn(Profile("main", model=CLAUDE, tools=[add]), "go")
        async for event in r.control.watch(started.tree, deltas=True):
            if isinstance(event, Delta):
                said.append(event.text)
        result = await started.result()
        events = await r.control.log.read(started.tree)
    assert [body.text for body in bodies(events, Message)] == ["One, two.\nThree.", "Four.\nFive."]
    assert (result.status, result.final_response) == ("done", "Four.\nFive.")
    assert "".join(said) == "One, two.\nThree.Four.\nFive."  # as it was seen meanwhile


async def test_after_a_search_a_text_that_is_cut_at_its_sources_stays_one_text() -> None:
    cited = (streams.text("It was "), streams.text("1916"), streams.text(", they say."))
    blocks = (streams.text("I look."), *streams.searched("srvtoolu_1", "when", ("Notes", "https://a.com/")), *cited)
    async with serving(Answer(streams.anthropic(*blocks))):
        result, _ = await run(Profile("main", model=CLAUDE, tools=["web_search"]), network=["*"])
    assert result.final_response == "I look.\nIt was 1916, they say."


async def test_text_that_is_only_space_does_not_go_back() -> None:
    blocks = (streams.text("\n\n"), streams.tool("c1", "add", '{"a": 1}'))
    async with serving(Answer(streams.anthropic(*blocks, stop="tool_use")), streams.said("done")) as server:
        await run(Profile("main", model=CLAUDE, tools=[add]))
    assert [part["type"] for part in server.requests[1].body["messages"][1]["content"]] == ["tool_use"]


async def test_deltas_are_seen_while_the_model_speaks() -> None:
    hold = asyncio.Event()
    async with serving(Answer(streams.anthropic(streams.text("Hel", "lo")), hold=hold)), retinue.open() as r:
        started = await r.spawn(Profile("main", model=CLAUDE, tools=[]), "go")
        seen: list[str] = []
        async for event in r.control.watch(started.tree, deltas=True):
            if event.__class__ is Delta:
                seen.append(event.text)
            elif isinstance(event.body, Message):  # type: ignore[union-attr]
                seen.append("whole: " + event.body.text)  # type: ignore[union-attr]
            hold.set()
    *pieces, whole = seen
    # A letter with which a secret of this process begins (they are random) waits for the next one.
    assert ("".join(pieces), whole) == ("Hello", "whole: Hello") and len(pieces) >= 2


async def test_calls_of_one_reply_run_side_by_side() -> None:
    together = asyncio.Barrier(2)

    @tool
    async def meet(who: str) -> str:
        """Waits for the other."""
        await together.wait()
        return f"{who} met"

    calls = (streams.tool("c1", "meet", '{"who": "a"}'), streams.tool("c2", "meet", '{"who": "b"}'))
    async with serving(Answer(streams.anthropic(*calls, stop="tool_use")), streams.said("ok")) as server:
        result, _ = await run(Profile("main", model=CLAUDE, tools=[meet]))
    assert result.status == "done"
    sent = server.requests[1].body["messages"][-1]["content"]
    assert [(part["tool_use_id"], "met" in json.dumps(part)) for part in sent] == [("c1", True), ("c2", True)]


async def test_models_of_profiles_and_of_tasks() -> None:
    tasks = [
        {"task": "x", "subagent_type": "poet"},
        {"task": "y", "subagent_type": "poet", "model": "anthropic:claude-task"},
        {"task": "z", "subagent_type": "plain"},
    ]
    spawn = streams.called("c1", "spawn_subagents", {"tasks": tasks})
    profiles = [Profile("poet", model="anthropic:claude-poet", tools=[]), Profile("plain", tools=[])]
    answers = (spawn, *[streams.said("ok")] * 4)
    async with serving(*answers) as server:
        result, _ = await run(Profile("main", tools=["spawn_subagents"]), profiles=profiles, model="anthropic:claude-m")
    assert result.status == "done"
    asked = [request.body["model"] for request in server.requests]
    assert sorted(asked[1:4]) == ["claude-m", "claude-poet", "claude-task"]
    assert asked[0] == asked[4] == "claude-m"
    async with serving(streams.said("ok")) as server:
        await run(Profile("main", model="anthropic:claude-m", tools=[]), Task("go", model="anthropic:claude-other"))
    assert [request.body["model"] for request in server.requests] == ["claude-other"]


async def test_a_call_that_is_cut_never_runs() -> None:
    """Not in any attempt; the attempts have an end; what each spent is counted once: the three tokens that came."""
    whole = streams.anthropic(streams.text("I add."), streams.tool("c1", "add", '{"a": 1', "}"), stop="tool_use")
    async with serving(*[Answer(whole[:6], ending="cut")] * 20) as server:
        result, events = await run(Profile("main", model=CLAUDE, tools=[add]))
    assert result.status == "disconnected"
    assert len(server.requests) == ATTEMPTS
    assert (ADDED, bodies(events, ToolCall)) == ([], [])
    assert [body.usage for body in bodies(events, UsageReported)] == [Usage(10 * ATTEMPTS, 3 * ATTEMPTS)]
    assert result.usage == Usage(10 * ATTEMPTS, 3 * ATTEMPTS)
    [ended] = bodies(events, RunEnded)
    assert ended.partial == "I add."


async def test_a_provider_that_recovers() -> None:
    answers = (
        refusal(529, "Overloaded", "overloaded_error"),
        refusal(429, "slow", Retry_After="20"),
        streams.said("ok"),
    )
    async with serving(*answers) as server:
        result, events = await run(Profile("main", model=CLAUDE, tools=[]))
    assert (result.final_response, result.usage, len(server.requests)) == ("ok", Usage(10, 7), 3)
    assert [(body.code, body.text.partition(";")[0]) for body in bodies(events, Warned)] == [
        ("retry", "Server error (529): Overloaded"),
        ("retry", "Rate limited (429): slow"),
    ]
    assert len(bodies(events, UsageReported)) == 1


@pytest.mark.finding("S13")
@pytest.mark.requirement("SDK-12", "SDK-54")
async def test_a_provider_that_does_not_recover_and_no_tool_is_blamed() -> None:
    asks = Answer(streams.anthropic(streams.tool("c1", "add", '{"a": 1}'), stop="tool_use"))
    async with serving(asks, *[refusal(500, "llm transport failed")] * ATTEMPTS) as server:
        result, _ = await run(Profile("main", model=CLAUDE, tools=[add]))
    assert (result.status, len(server.requests)) == ("failed", 1 + ATTEMPTS)
    assert result.error_details == f"Server error (500): llm transport failed; given up after {ATTEMPTS} attempts"
    assert SubagentResult.of(result).failed_tool is None


async def test_a_request_that_is_wrong_fails_at_once() -> None:
    async with serving(refusal(400, "max_tokens: too large")) as server:
        result, _ = await run(Profile("main", model=CLAUDE, tools=[]))
    assert (result.status, len(server.requests)) == ("failed", 1)
    assert result.error_details == "Request rejected (400): max_tokens: too large"


@pytest.mark.parametrize("name", [CLAUDE, CHAT])
async def test_arguments_that_are_no_json_go_back_to_the_model(name: str) -> None:
    bad = {
        CLAUDE: streams.anthropic(streams.tool("c1", "add", '{"a": 1'), stop="tool_use"),
        CHAT: streams.chat(calls=[("c1", "add", ['{"a": 1'])], finish="tool_calls"),
    }
    good = {CLAUDE: streams.anthropic(streams.text("sorry")), CHAT: streams.chat(content=["sorry"])}
    async with serving(Answer(bad[name]), Answer(good[name])) as server:
        result, events = await run(Profile("main", model=name, tools=[add]))
    assert (result.status, result.final_response, ADDED) == ("done", "sorry", [])
    [told] = bodies(events, ToolResult)
    assert not told.success and "not a JSON object" in told.text
    assert "not a JSON object" in json.dumps(server.requests[1].body)


async def test_a_refusal_ends_the_run_refused() -> None:
    async with serving(streams.said("I will not.", stop="refusal")):
        result, _ = await run(Profile("main", model=CLAUDE, tools=[]))
    assert (result.status, result.final_response) == ("refused", "I will not.")


async def test_a_cancelled_run_lets_its_connection_go() -> None:
    async with (
        serving(Answer(streams.anthropic(streams.text("Hel"))[:3], ending="hang")) as server,
        retinue.open() as r,
    ):
        started = await r.spawn(Profile("main", model=CLAUDE, tools=[]), "go")
        await server.asked(1)
        await started.cancel()
        assert (await started.result()).status == "cancelled"


@pytest.mark.finding("R2")
@pytest.mark.parametrize("name", [CLAUDE, CHAT])
async def test_a_tool_that_a_model_makes_up_does_not_spoil_the_thread(name: str) -> None:
    """Providers refuse every later request that has a name or an id of another form than theirs."""
    call_id, made_up = "call 1/☃", "repo.read file"
    first = {
        CLAUDE: streams.anthropic(streams.tool(call_id, made_up, "{}"), stop="tool_use"),
        CHAT: streams.chat(calls=[(call_id, made_up, ["{}"]), ("", "", ["{}"])], finish="tool_calls"),
    }
    last = {CLAUDE: streams.said("end"), CHAT: Answer(streams.chat(content=["end"]))}
    async with serving(Answer(first[name]), last[name]) as server:
        result, events = await run(Profile("main", model=name, tools=[add]))
    assert result.final_response == "end"
    assert bodies(events, ToolResult)[0].text.startswith(f"Unknown tool '{made_up}'.")
    sent = json.dumps(server.requests[1].body["messages"])
    names = re.findall(r'"name": "(.*?)"', sent)
    ids = re.findall(r'"(?:tool_use_id|tool_call_id|id)": "(.*?)"', sent)
    assert names[0] == "repo_read_file" and all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", each) for each in [*names, *ids])
    assert len(set(ids)) * 2 == len(ids)  # a call and its result have the same
