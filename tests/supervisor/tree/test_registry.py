"""Tests of the registry of a tree: numbers, parents, labels, states and details of its runs."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

import retinue
from retinue import Profile
from retinue.core.events import Inbox, RunEnded, RunSpawned, RunStarted, ToolCall, ToolResult
from retinue.core.messages import Call, RunRef
from retinue.core.ports import Link, SpawnedRun, SpawnOrder
from retinue.log.runs import Runs
from retinue.testing import ManualClock
from retinue.tools.subagents import SpawnAgent, SpawnProfile
from tests.supervisor.tree.kit import bodies, call, kinds, main, spawn, tree, until
from tests.tools.folders import make_folders

LONG = "Übersetze die Überschriften in diesem Ordner"


@pytest.mark.requirement("CODEY-7", "CODEY-10", "CODEY-11", "CODEY-13", "P1", "P2")
async def test_numbers_grow_from_the_primary_and_parents_are_kept() -> None:
    script = {
        "main": [spawn({"task": "one", "subagent_id": "one"}, {"task": "two"}), spawn({"task": "four"}), "end"],
        "one": [spawn({"task": "three"}), {"text": "one is done"}],
        "*": [{"text": "leaf"}],
    }
    before = time.time()
    result, events = await tree(script)
    runs = Runs.of(result.tree, events)
    begun = Runs.of(result.tree, [event for event in events if isinstance(event.body, RunSpawned)])
    assert [(run.label, run.status) for run in begun.runs.values()] == [
        ("main", None), ("one", None), ("two", None), ("three", None), ("four", None),
    ]  # fmt: skip
    assert [run.status for run in runs.runs.values()] == ["done"] * 5
    made = [run.spawned_at for run in runs.runs.values()]
    assert made == sorted(made) and before <= made[0] and made[-1] <= time.time()
    assert [(run.number, run.spawned.parent) for run in runs.runs.values()] == [
        (0, None), (1, 0), (2, 0), (3, 1), (4, 0),  # a number is not used again when its run has ended
    ]  # fmt: skip
    assert runs.primary is runs.runs[0]
    assert [runs.runs[n].spawned.depth for n in range(5)] == [0, 1, 1, 2, 1]
    for number in runs.runs:
        assert kinds(events, run=number)[0] == "run.spawned"
        assert kinds(events, run=number)[-1] == "run.ended"
    spawned = [event.run for event in events if isinstance(event.body, RunSpawned)]
    assert spawned == [0, 1, 2, 3, 4]
    assert runs.runs[3].path == "/main/subagent-1/subagent-3"


@pytest.mark.requirement("CODEY-18")
async def test_a_label_is_the_task_cut_to_thirty_characters_and_unique() -> None:
    script = {"main": [spawn({"task": LONG}, {"task": LONG}, {"task": LONG}), {"text": "end"}], "*": [{"text": "x"}]}
    _, events = await tree(script)
    labels = [body.label for body in bodies(events, RunSpawned)]
    assert labels == ["main", LONG[:30], LONG[:30] + "-2", LONG[:30] + "-3"]
    assert len(labels[1]) == 30


@pytest.mark.requirement("CODEY-20")
async def test_a_spawn_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="retinue"):
        await tree({"main": [spawn({"task": "look around"}), {"text": "end"}], "*": [{"text": "x"}]})
    assert "Spawned sub-agent 1 with label 'look around'" in caplog.messages


class OrderBook:
    """A link that takes orders and carries out none of them."""

    def __init__(self) -> None:
        self.orders: list[SpawnOrder] = []
        self.children = self

    async def spawn_runs(self, orders: Sequence[SpawnOrder]) -> list[SpawnedRun]:
        self.orders += orders
        ref = RunRef("t", 7, "/main/kid-7", "look", "kid", "kid_1")
        return [SpawnedRun(run=7, ref=ref, workspace="", timeout_seconds=None, status_file="") for _ in orders]


@pytest.mark.finding("S13")
@pytest.mark.requirement("CODEY-15")
@pytest.mark.parametrize("tool", [SpawnProfile(Profile("kid")), SpawnAgent()], ids=lambda tool: tool.spec.name)
async def test_a_spawn_tool_orders_an_agent_and_does_not_run_it(tool: SpawnProfile, tmp_path: Path) -> None:
    link = OrderBook()
    args = {"task": "look", "task_context": "Mind the gap.", "background": True}
    outcome = await tool(Call("c1", tool.spec.name, args), make_folders(tmp_path), cast("Link", link))
    [order] = link.orders
    assert (order.task.text, order.task.context, order.call_id, order.background) == (
        "look", "Mind the gap.", "c1", True,
    )  # fmt: skip
    assert order.profile is tool.profile
    assert outcome.text == "agent:7"


@pytest.mark.requirement("CODEY-8", "CODEY-9", "CODEY-15")
async def test_calls_of_parallel_agents_go_back_to_who_made_them() -> None:
    seen: list[tuple[int, str]] = []

    @retinue.tool(tier="observe")
    async def echo(ctx: retinue.Context, word: str) -> str:
        """Say it again."""
        seen.append((ctx.run, word))
        for _ in range(3):
            await asyncio.sleep(0)
        return f"{ctx.run} said {word}"

    kid = Profile("kid", tools=[echo])
    script = {
        "main": [spawn(*({"task": w, "subagent_id": w, "subagent_type": "kid"} for w in "abc")), {"text": "end"}],
        **{w: [call("echo", word=w), {"text": "{{last_result}}"}] for w in "abc"},
    }
    primary = main(script, tools=["spawn_subagents", kid])
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(primary, "go")
        events = [event async for event in run.events()]
        result = await run.result()
    assert sorted(seen) == [(1, "a"), (2, "b"), (3, "c")]
    assert [child.final_response for child in result.children] == ["1 said a", "2 said b", "3 said c"]
    for number, word in ((1, "a"), (2, "b"), (3, "c")):
        [made] = bodies(events, ToolCall, run=number)
        [given] = bodies(events, ToolResult, run=number)
        assert (made.args, given.text, made.call_id) == ({"word": word}, f"{number} said {word}", given.call_id)


@pytest.mark.requirement("CODEY-14", "CODEY-21", "CODEY-37", "CODEY-38")
async def test_a_finished_child_wakes_its_parent_once_with_its_last_message() -> None:
    result, events = await tree(
        {
            "main": [call("subagent_kid", task="go"), {"text": "got {{last_result}}"}],
            "kid": [{"text": "first", **call("list_agents")}, {"text": "last"}],
        },
        profiles=[Profile("kid")],
    )
    assert result.final_response == "got last"
    [ended] = [event for event in events if event.run == 1 and isinstance(event.body, RunEnded)]
    [given] = [event for event in events if event.run == 0 and isinstance(event.body, ToolResult)]
    assert ended.seq < given.seq
    assert (ended.body.status, ended.body.final_response, given.body.text) == ("done", "last", "last")


@pytest.mark.requirement("CODEY-14")
async def test_finishing_again_and_stopping_what_is_unknown_change_nothing() -> None:
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main({"main": [{"text": "x"}]}), "go")
        result = await run.result()
        assert await run.cancel() is False
        assert await r.control.cancel(run.tree, 99) is False
        assert await r.control.cancel("nosuchtree") is False
        assert await run.result() is result
        assert [event.kind async for event in run.events()].count("run.ended") == 1


@pytest.mark.finding("S13")
@pytest.mark.requirement("CODEY-14")
async def test_a_child_that_has_ended_is_not_ended_again_by_whoever_stops_it() -> None:
    script = {"main": [call("subagent_kid", task="go"), {"hang": True}], "kid": [{"text": "last"}]}
    async with retinue.open(mode="yes", profiles=[Profile("kid")]) as r:
        run = await r.spawn(main(script), "go")
        await until(run, ToolResult, number=0)
        assert [await r.control.cancel(run.tree, 1) for _ in range(2)] == [False, False]
        assert [await run.cancel(), await run.cancel()] == [True, False]
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert [(child.status, child.final_response) for child in result.children] == [("done", "last")]
    assert [kinds(events, run=number).count("run.ended") for number in (0, 1)] == [1, 1]


@pytest.mark.requirement("CODEY-21", "P25")
async def test_a_child_without_a_word_hands_over_an_empty_string_and_says_so() -> None:
    result, _ = await tree(
        {"main": [call("subagent_kid", task="x"), {"text": "got <{{last_result}}>"}], "kid": [{"text": ""}]},
        profiles=[Profile("kid")],
    )
    [child] = result.children
    assert result.final_response == "got <>"
    assert (child.status, child.final_response) == ("done", "")
    assert child.warning is not None and "without any text" in child.warning


@pytest.mark.requirement("CODEY-22")
async def test_a_parent_that_is_gone_when_its_child_ends_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    script = {"main": [call("subagent_kid", task="x", background=True), {"error": "boom"}], "kid": [{"hang": True}]}
    result, events = await tree(script, profiles=[Profile("kid")])
    assert result.status == "failed"
    assert result.children[0].status == "cancelled"
    assert kinds(events, run=1)[-1] == "run.ended"
    assert events[-1].run == 0 and events[-1].kind == "run.ended"
    assert bodies(events, Inbox) == []  # nobody is there to be told
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.finding("S13")
@pytest.mark.requirement("CODEY-22")
async def test_a_child_that_ends_after_a_waiter_gave_up_wakes_the_others() -> None:
    go_on = asyncio.Event()

    async def work(task: str, ctx: retinue.Context) -> str:
        await go_on.wait()
        return "kept"

    async def give_up(task: str, ctx: retinue.Context) -> str:
        child = await ctx.spawn(Profile("kid", call=work), "go")
        given_up, waiting = (asyncio.ensure_future(child.result()) for _ in range(2))
        await ManualClock.settle()
        given_up.cancel()
        go_on.set()
        return (await waiting).final_response

    async with retinue.open(mode="yes") as r:
        result = await r.run(Profile("main", call=give_up), "go")
    assert (result.status, result.final_response) == ("done", "kept")
    assert [child.status for child in result.children] == ["done"]


@pytest.mark.requirement("CODEY-14", "CODEY-19", "CODEY-35")
async def test_in_the_background_the_parent_goes_on_and_is_told_later() -> None:
    gate = asyncio.Event()

    @retinue.tool(tier="observe")
    async def wait_for_gate() -> str:
        """Wait."""
        await gate.wait()
        return "open"

    @retinue.tool(tier="observe")
    async def open_gate() -> str:
        """Open."""
        gate.set()
        return "opened"

    kid = Profile("kid", tools=[wait_for_gate])
    script = {
        "main": [
            call("subagent_kid", task="wait", background=True),
            call("open_gate"),
            {"text": "waiting"},
            call("get_agent", agent_id=1),
            {"text": "kid said {{last_result}}"},
        ],
        "kid": [call("wait_for_gate"), {"text": "the gate is {{last_result}}"}],
    }
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script, tools=[kid, open_gate, "get_agent"]), "go")
        events = [event async for event in run.events()]
        result = await run.result()
    first = bodies(events, ToolResult, run=0)[0]
    assert first.text == "agent:1"
    assert bodies(events, RunSpawned, run=1)[0].parent == 0
    [notice] = bodies(events, Inbox, run=0)
    assert notice.about == 1 and "has ended: done" in notice.text
    assert result.final_response == "waiting\n\nkid said the gate is open"


@pytest.mark.finding("S13")
@pytest.mark.requirement("CODEY-12", "CODEY-23", "CODEY-29", "CODEY-3")
async def test_list_agents_shows_running_finished_and_failed_ones() -> None:
    script = {
        "main": [
            spawn({"task": "good", "subagent_id": "good"}, {"task": "bad", "subagent_id": "bad"}),
            call("subagent_slow", task="slow", background=True),
            call("list_agents"),
            call("get_agent", agent_id=1),
            call("get_agent", agent_id=2),
            call("get_agent", agent_id=3),
            {"text": "{{last_result}}"},
        ],
        "good": [{"text": "fine"}],
        "bad": [{"error": "broken"}],
        "slow": [{"hang": True}],
    }
    async with retinue.open(mode="yes", profiles=[Profile("slow")]) as r:
        run = await r.spawn(main(script), "go")
        got: list[tuple[bool, str]] = []
        async for event in run.events():
            if isinstance(event.body, ToolResult) and event.body.name in ("list_agents", "get_agent"):
                got.append((event.body.success, event.body.text))
                if len(got) == 4:
                    await run.cancel()
    lines = got[0][1].splitlines()
    assert got[1:3] == [(True, "fine"), (False, "broken")]
    assert not got[3][0] and got[3][1].startswith("agent:3 is still running (")
    assert [line.split(" (")[0] for line in lines] == [
        "agent:1 [good] Finished",
        "agent:2 [bad] Error(failed: broken)",
        "agent:3 [slow] Running",
    ]
    assert all("by agent:0)" in line for line in lines)


@pytest.mark.requirement("CODEY-29", "CODEY-30")
async def test_the_agent_tools_are_described_as_agreed() -> None:
    _, events = await tree({"main": [{"text": "x"}]})
    [spawned] = bodies(events, RunSpawned)
    import msgspec

    tools = {tool["name"]: tool for tool in msgspec.json.decode(spawned.tools)}
    assert tools["list_agents"]["description"] == "List all spawned sub-agents and their status"
    assert tools["list_agents"]["schema"]["properties"] == {}
    assert tools["get_agent"]["description"] == "Get the result from a finished sub-agent"
    assert tools["get_agent"]["schema"]["required"] == ["agent_id"]
    assert tools["get_agent"]["schema"]["properties"]["agent_id"]["type"] == "integer"


@pytest.mark.requirement("CODEY-30")
async def test_get_agent_may_be_asked_again_and_says_what_is_wrong() -> None:
    script = {
        "main": [
            spawn({"task": "x", "subagent_id": "x"}),
            {"tools": [{"name": "get_agent", "args": {"agent_id": n}} for n in (1, 1, 7, "1")]},
            {"text": "end"},
        ],
        "x": [{"text": "the result"}],
    }
    _, events = await tree(script)
    texts = [body.text for body in bodies(events, ToolResult, run=0)][1:]
    assert texts == [
        "the result",
        "the result",
        "There is no agent:7 below this run.",
        "get_agent: 'agent_id' must be an integer",
    ]


@pytest.mark.requirement("CODEY-4", "CODEY-31")
async def test_the_result_is_the_newest_message_with_text() -> None:
    result, _ = await tree({"main": [{"text": "early"}]})
    assert result.final_response == "early"
    result, _ = await tree({"main": [{"text": "said while calling", **call("list_agents")}, {"text": ""}]})
    assert result.final_response == "said while calling"
    assert result.status == "done"
    result, _ = await tree({"main": [{"text": "said while calling", **call("list_agents")}, {"text": "last"}]})
    assert result.final_response == "last"
    early, late = ({"text": text, **call("list_agents")} for text in ("early", "late"))
    result, _ = await tree({"main": [early, late, {"text": ""}]})
    assert result.final_response == "late"
    result, _ = await tree({"main": [call("list_agents"), {"text": ""}]})
    assert result.final_response == ""  # no message has text


@pytest.mark.requirement("CODEY-2")
async def test_all_that_a_grandchild_does_is_among_the_events() -> None:
    script = {
        "main": [spawn({"task": "a", "subagent_id": "a"}), {"text": "end"}],
        "a": [spawn({"task": "b", "subagent_id": "b"}), {"text": "a"}],
        "b": [{"thinking": "hm", "text": "looking", **call("list_agents")}, {"text": "b"}],
    }
    _, events = await tree(script)
    assert kinds(events, run=2) == [
        "run.spawned", "run.started", "turn.started", "thinking", "message", "usage", "tool.call", "tool.result",
        "turn.ended", "turn.started", "message", "usage", "turn.ended", "run.ended",
    ]  # fmt: skip


async def test_a_child_s_events_can_be_followed_alone() -> None:
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main({"main": [spawn({"task": "a"}), {"text": "end"}], "*": [{"text": "x"}]}), "go")
        started = await until(run, RunStarted, number=1)
        assert started.path == "/main/subagent-1"
        await run.result()
