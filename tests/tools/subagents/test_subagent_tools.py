"""Seed 004's tools for a model inside a tree: the same as for MCP clients, for the runs below its own and no others."""

import json
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Event, Limits, Profile
from retinue.core.events import Inbox, RunSpawned, ToolCall, ToolResult
from retinue.protocol.subagent_tools import TOOLS
from retinue.testing import scripted
from tests.gates import HeldClock
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree

WAIT = "custom_tool__wait_for_background_tool"
SLOW = {"task": "long " * 50, "subagent_id": "slow", "timeout_seconds": 90}


def replies(events: list[Event], *, run: int = 0) -> list[dict[str, Any]]:
    return [json.loads(body.text) for body in bodies(events, ToolResult, run=run)]


def offered(events: list[Event], *, run: int) -> set[str]:
    [spawned] = bodies(events, RunSpawned, run=run)
    return {tool["name"] for tool in json.loads(bytes(spawned.tools))}


@pytest.mark.finding("S1")
@pytest.mark.requirement("MASS-48", "MASS-50", "MASS-51", "MASS-54")
async def test_a_model_lists_waits_for_cancels_and_continues_its_subagents(tmp_path: Path) -> None:
    script = {
        "main": [
            spawn(SLOW, background=True),
            call("list_subagents"),
            call("custom_tool__get_background_tool_status", subagent_id="slow"),
            call(WAIT, subagent_id="slow", timeout_seconds=0),
            call("custom_tool__get_background_tool_result", subagent_id="slow"),
            call("continue_subagent", subagent_id="slow", message="go on"),
            call("custom_tool__cancel_background_tool", subagent_id="slow"),
            call("continue_subagent", subagent_id="slow", message="go on", timeout_seconds=100),
            call("custom_tool__list_background_tools"),
            call("custom_tool__list_background_tools", include_all=True),
            call(WAIT),
            {"text": "end"},
        ],
        "/main/subagent-1": [{"hang": True}],
        "/main/subagent-2": ["gone on"],
    }
    result, events = await tree(script, path=tmp_path / ".retinue")
    _, listed, status, waited, unready, busy, cancelled, continued, running, every, none = replies(events)
    assert result.final_response == "end"
    [entry] = listed["subagents"]
    assert (entry["subagent_id"], entry["status"], entry["continuable"]) == ("slow", "running", False)
    assert entry["session_id"] == f"{result.tree}/1" and entry["agent"] == "agent:1" and len(entry["task"]) == 100
    assert Path(entry["workspace"]).is_dir()
    assert entry["task"] == SLOW["task"][:100]
    assert entry["elapsed_seconds"] + entry["seconds_remaining"] == pytest.approx(90, abs=1)
    assert entry["timeout_seconds"] == 90
    assert status["subagent"]["timeout_seconds"] == 90
    assert json.loads(Path(status["subagent"]["status_file"]).read_text())["subagent_id"] == "slow"
    assert (waited["timed_out"], waited["results"], waited["running"][0]["subagent_id"]) == (True, [], "slow")
    assert waited["note"].startswith("Still running; nothing is lost.")
    assert unready["error"] == "'slow' has not ended: it is running (running)"
    assert busy["error"] == "'slow' is still running: wait for it, or cancel it first"
    assert (cancelled["operation"], cancelled["cancelled"]) == ("cancel_background_tool", True)
    assert cancelled["status"] == "cancelled"  # so it can be continued at once
    assert (continued["success"], continued["operation"], continued["timeout_seconds"]) == (
        True,
        "continue_subagent",
        100,
    )
    [answer] = continued["results"]
    assert (answer["subagent_id"], answer["timeout_seconds"], answer["answer"]) == ("slow", 100, "gone on")
    assert running["subagents"] == []
    assert [each["status"] for each in every["subagents"]] == ["cancelled", "completed"]
    for each in every["subagents"]:
        assert {"subagent_id", "status", "task", "workspace", "session_id", "continuable"} <= set(each)
        assert not {"elapsed_seconds", "seconds_remaining"} & set(each)  # it has ended
    assert none["note"] == "No subagent is running."
    [spawned] = bodies(events, RunSpawned, run=2)
    assert (spawned.continues, spawned.parent, spawned.background) == (1, 0, False)


@pytest.mark.finding("S1")
@pytest.mark.requirement("MASS-49", "MASS-50")
async def test_every_spelling_of_a_tool_is_the_same_tool() -> None:
    spellings = [
        f"{first}{second}wait_for_background_tool" for first in ("", "mcp_") for second in ("", "custom_tool__")
    ]
    script = {
        "main": [
            spawn({"task": "t", "subagent_id": "s"}),
            *(call(name, subagent_id="s") for name in spellings),
            call("mcp_get_agent", agent_id=1),
            call("get_background_tool_result", job_id="s"),
            {"text": "end"},
        ],
        "*": ["found"],
    }
    _, events = await tree(script)
    results = bodies(events, ToolResult, run=0)
    assert [json.loads(each.text)["results"][0]["answer"] for each in results[:5]] == ["found"] * 5
    assert results[5].text == "found"
    assert json.loads(results[6].text)["result"]["status"] == "completed"
    assert {body.name for body in bodies(events, ToolCall, run=0)[1:5]} == {WAIT}  # so rules and logs have one name
    assert not (set(spellings) - {WAIT}) & offered(events, run=0)
    assert not {"check_subagent_status", "get_subagent_result", "get_subagent_costs"} & offered(events, run=0)


@pytest.mark.finding("S1")
async def test_a_rule_that_denies_a_tool_holds_in_every_spelling() -> None:
    script = {
        "main": [spawn({"task": "t", "subagent_id": "s"}, background=True), call("mcp_cancel_background_tool", agent=1),
                 {"text": "end"}, {"text": "end"}],
        "*": ["found"],
    }  # fmt: skip
    async with retinue.open(mode="yes", deny=["custom_tool__cancel_background_tool"]) as r:
        run = await r.spawn(main(script), "go")
        events = [event async for event in run.events()]
    assert "custom_tool__cancel_background_tool" in bodies(events, ToolResult, run=0)[1].text


@pytest.mark.finding("S1")
async def test_a_model_reaches_only_the_runs_below_its_own() -> None:
    inner = [
        call("custom_tool__cancel_background_tool", subagent_id="other"),
        call("send_message_to_subagent", subagent_id="agent:0", message="x"),
        call("get_background_tool_result", subagent_id="agent:2"),
        call(WAIT, subagent_id="inner"),
        call("list_subagents"),
        {"text": "tried"},
    ]
    script = {
        "main": [
            spawn({"task": "a", "subagent_id": "other"}, background=True),
            spawn({"task": "b", "subagent_id": "inner"}),
            call("cancel_background_tool", subagent_id="other"),
            {"text": "end"},
            {"text": "end"},
        ],
        "other": [{"hang": True}],
        "inner": inner,
    }
    _, events = await tree(script)
    *refused, listed = replies(events, run=2)
    for reply, name in zip(refused, ("other", "agent:0", "agent:2", "inner"), strict=True):
        assert reply["error"] == f"There is no subagent '{name}' below this run; list_subagents says which there are."
    assert listed["subagents"] == []
    assert replies(events)[2]["cancelled"] is True  # the other one was at work all the time


@pytest.mark.finding("S1")
async def test_a_message_reaches_a_subagent_and_its_receipt_says_when() -> None:
    message = {"subagent_id": "kid", "message": "leave the tests alone"}
    script = {
        "main": [
            spawn({"task": "t", "subagent_id": "kid"}, background=True),
            call("send_message_to_subagent", **message, timeout_seconds=60),
            call(WAIT, subagent_id="kid"),
            call("send_message_to_subagent", **message),
            {"text": "end"},
        ],
        "kid": [call("list_agents"), {"delay": 1, **call("list_agents")}, {"text": "done"}, {"text": "understood"}],
    }
    clock, events = HeldClock(), []
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=scripted(script, clock=clock)), "go")
        async for event in run.events():
            events.append(event)
            if isinstance(event.body, Inbox):
                clock.release()
    _, sent, _, late = replies(events)
    assert (sent["success"], sent["state"]) == (True, "delivered")
    assert sent["note"] == f"delivered at turn {sent['turn']}"
    assert (late["success"], late["state"], late["error"]) == (False, "too_late", "too late: the run has ended: done")
    [read] = bodies(events, Inbox, run=1)
    assert (read.text, read.source) == ("leave the tests alone", "asker")


@pytest.mark.finding("S1")
async def test_waiting_for_a_queued_subagent_gives_the_slot_away() -> None:
    script = {
        "main": [spawn({"task": "m", "subagent_id": "middle"}), {"text": "end"}],
        "middle": [
            spawn({"task": "d", "subagent_id": "deep"}, background=True),
            call(WAIT, subagent_id="deep"),
            {"text": "has it"},
        ],
        "deep": ["found"],
    }
    _, events = await tree(script, limits=Limits(concurrent=1))
    assert replies(events, run=1)[1]["results"][0]["answer"] == "found"


@pytest.mark.finding("S1")
async def test_only_who_can_spawn_has_the_tools_for_subagents() -> None:
    leaf = Profile("leafy", leaf=True)
    script = {"main": [spawn({"task": "a"}), call("subagent_leafy", task="b"), {"text": "end"}], "*": ["ok"]}
    model = scripted(script)
    async with retinue.open(mode="yes", profiles=[leaf]) as r:
        wide = await r.spawn(Profile("main", model=model), "go", limits=Limits(depth=1))
        events = [event async for event in wide.events()]
        none = await r.spawn(Profile("main", model=scripted({"*": ["ok"]})), "go", limits=Limits(depth=0))
        flat = [event async for event in none.events()]
        given = Profile("main", model=scripted({"*": ["ok"]}), tools=["read", leaf])
        by_value = [event async for event in (await r.spawn(given, "go")).events()]
        plain = Profile("main", model=scripted({"*": ["ok"]}), tools=["read"])
        without = [event async for event in (await r.spawn(plain, "go")).events()]
    assert set(TOOLS) <= offered(events, run=0)
    assert not set(TOOLS) & offered(events, run=1)  # as deep as it may be
    assert not set(TOOLS) & offered(events, run=2)  # a leaf
    assert not set(TOOLS) & offered(flat, run=0)  # nesting is disabled
    assert set(TOOLS) <= offered(by_value, run=0)
    assert not set(TOOLS) & offered(without, run=0)


FINDER = Profile(
    "finder",
    "You find.",
    description="Finds where something is defined.",
    expected_input=["the name to look for", "the folder"],
)
ABOUT_FINDER = "Finds where something is defined. Expected input: the name to look for; the folder."


def find_specs(events: list[Event], *, run: int = 0) -> dict[str, Any]:
    [spawned] = bodies(events, RunSpawned, run=run)
    return {tool["name"]: tool for tool in json.loads(bytes(spawned.tools))}


@pytest.mark.finding("S2")
@pytest.mark.requirement("SDK-13")
async def test_a_parent_reads_what_each_profile_is_for_and_what_input_it_expects() -> None:
    async with retinue.open(mode="yes", profiles=[FINDER, Profile("plain")]) as r:
        run = await r.spawn(Profile("main", model=scripted({"*": ["ok"]})), "go")
        specs = find_specs([event async for event in run.events()])
        value = Profile("main", model=scripted({"*": ["ok"]}), tools=[FINDER])
        given = find_specs([event async for event in (await r.spawn(value, "go")).events()])
    sentence = (
        "Spawn a subagent named '{}' to handle a task. "
        "The subagent will work independently and return only its final response."
    )
    for tools in (specs, given):
        assert tools["subagent_finder"]["description"] == f"{sentence.format('finder')} {ABOUT_FINDER}"
    assert specs["subagent_plain"]["description"] == sentence.format("plain")
    task = specs["spawn_subagents"]["schema"]["properties"]["tasks"]["items"]["properties"]
    kinds = task["subagent_type"]["description"].splitlines()
    assert kinds[0] == "Which kind of subagent (profile); leave it out for a general one."
    assert f"- finder: {ABOUT_FINDER}" in kinds and "- plain" in kinds


@pytest.mark.finding("S10")
@pytest.mark.requirement("CODEY-16", "CODEY-19", "CODEY-38")
@pytest.mark.parametrize("tool", ["spawn_agent", "subagent_finder"])
async def test_one_subagent_gets_its_task_and_its_context(tool: str) -> None:
    script = {
        "main": [
            call(tool, task="look", task_context="The name is Foo."),
            call(tool, task="look", background=True),
            call(WAIT, subagent_id="agent:2"),
            {"text": "end"},
        ],
        "*": ["found"],
    }
    async with retinue.open(mode="yes", profiles=[FINDER]) as r:
        run = await r.spawn(Profile("main", model=scripted(script)), "go")
        events = [event async for event in run.events()]
    results = bodies(events, ToolResult, run=0)
    assert (results[0].text, results[1].text) == ("found", "agent:2")
    assert [bodies(events, RunSpawned, run=run)[0].task_context for run in (1, 2)] == ["The name is Foo.", ""]


@pytest.mark.finding("S10")
async def test_the_context_of_a_task_is_in_the_instructions_of_its_subagent() -> None:
    seen: list[str] = []

    class Watching:
        name = "watching"

        def __init__(self) -> None:
            self.model = scripted(
                {"main": [call("spawn_agent", task="t", task_context="Mind the gap."), "end"], "*": ["ok"]}
            )

        async def complete(self, request: Any, on_delta: Any) -> Any:
            seen.append(request.system if request.ref.run == 1 else "")
            return await self.model.complete(request, on_delta)

    async with retinue.open(mode="yes") as r:
        await r.run(Profile("main", model=Watching()), "go")
    assert any("Mind the gap." in system for system in seen)


@pytest.mark.finding("S10")
@pytest.mark.parametrize(
    ("name", "args", "known"),
    [
        ("read", {"path": "a"}, "path, offset, limit"),
        ("shell", {"command": "true"}, "command, timeout"),
        ("list_agents", {}, "none"),
        ("spawn_agent", {"task": "t"}, "task, task_context, background"),
        ("subagent_finder", {"task": "t"}, "task, task_context, background"),
        ("spawn_subagents", {"tasks": [{"task": "t"}]}, "tasks, background, refine"),
        ("list_subagents", {}, "offset"),
        (WAIT, {"subagent_id": "x"}, "subagent_id, timeout_seconds"),
        ("apply_subagent", {"subagent_id": "x"}, "subagent_id"),
        ("add", {"one": 1}, "one"),
    ],
)
async def test_an_unknown_argument_is_an_error_that_names_the_known_ones(
    name: str, args: dict[str, Any], known: str
) -> None:
    @retinue.tool(tier="observe")
    def add(one: int) -> int:
        return one + 1

    script = {"main": [call(name, **args, colour="red"), {"text": "end"}], "*": ["ok"]}
    names = ["read", "shell", "list_agents", "spawn_agent", "spawn_subagents", "apply_subagent", FINDER, add]
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=scripted(script), tools=names), "go")
        events = [event async for event in run.events()]
    [result] = bodies(events, ToolResult)
    assert (result.success, result.text) == (False, f"{name}: unknown argument 'colour'. Known arguments: {known}")
    assert len(bodies(events, RunSpawned)) == 1  # nothing was run
