"""A server of ours that another retinue started: its runs are reported, and within what is left to the caller."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any

import pytest

from tests.surfaces.cli.shell import Project
from tests.surfaces.mcp.kit import piped

ENVIRONMENT = """
import json, os
from mcp.server.mcpserver import MCPServer

server = MCPServer("below")


@server.tool(structured_output=False)
def show() -> str:
    "Show the variables of a collector and of limits."
    return json.dumps({name: os.environ[name] for name in sorted(os.environ) if "SUBAGENT" in name})


server.run()
"""
READ = {"thinking": "where is it?", "tools": [{"name": "glob", "args": {"pattern": "*"}}]}


async def reports(project: Project, *arguments: str, agents: dict[str, Any], call: dict[str, Any], **more: Any) -> Any:
    """Make a tool call. Return its result and the reports posted meanwhile."""
    posted: list[dict[str, Any]] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                posted.append(json.loads(await reader.readexactly(length)))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        gone.append(writer)

    gone: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(take, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/secret"
    async with (
        server,
        piped(project, *arguments, agents=agents, RETINUE_SUBAGENT_LOGGING_ADDRESS=address, **more) as client,
    ):
        await client.hello()
        result = (await client.ask("tools/call", **call))["result"]
    for writer in gone:
        await writer.wait_closed()
    return result, posted


@pytest.mark.finding("S13")
@pytest.mark.requirement("CPE-24", "CPE-46", "CPE-56", "CPE-61")
async def test_one_profile_reports_its_calls_results_and_thoughts_under_the_run_id(project: Project) -> None:
    call = {"name": "explorer", "arguments": {"prompt": "look", "runId": "run-7"}}
    agents = {"explorer": [READ, "found"]}
    result, posted = await reports(project, "--profile", "explorer", agents=agents, call=call)
    assert result["content"][0]["text"] == "found"
    assert [event["type"] for event in posted] == [
        "subagent_start", "thought_trace", "tool_call", "tool_result", "subagent_end",
    ]  # fmt: skip
    assert {event["subagentRunID"] for event in posted} == {"run-7"}
    assert [event["seq"] for event in posted] == [1, 2, 3, 4, 5]  # one event a post, in the order they happened


async def test_what_a_client_spawns_is_reported_and_the_client_is_not(project: Project) -> None:
    tasks = {"tasks": [{"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}]}
    call = {"name": "spawn_subagents", "arguments": tasks, "_meta": {"retinue/parentRunID": "up"}}
    result, posted = await reports(project, agents={"*": [READ, "found"]}, call=call)
    assert result["structuredContent"]["success"]
    assert sorted(event["type"] for event in posted).count("subagent_start") == 2
    assert len({event["subagentRunID"] for event in posted}) == 2
    assert {event["subagentName"] for event in posted} == {"subagent"}


async def test_depth_and_deadline_of_the_caller_hold(project: Project) -> None:
    spawn = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "deeper"}]}}]}
    meta = {"retinue/depth": 1, "retinue/deadline": 4102444800}
    call = {"name": "explorer", "arguments": {"prompt": "look", "runId": "r"}, "_meta": meta}
    agents = {"explorer": [spawn, "said {{last_result}}"], "*": ["too deep"]}
    result, _ = await reports(project, "--profile", "explorer", "--yes", agents=agents, call=call)
    assert "depth" in result["content"][0]["text"] or "no tool" in result["content"][0]["text"].lower()
    refused = {**call, "_meta": {"retinue/depth": 0}}
    result, _ = await reports(project, "--profile", "explorer", agents=agents, call=refused)
    assert result["isError"] and "depth" in result["content"][0]["text"].lower()
    variable = {"RETINUE_SUBAGENT_DEPTH": "0"}
    spawned = {"name": "spawn_subagents", "arguments": {"tasks": [{"task": "t"}]}}
    result, _ = await reports(project, agents=agents, call=spawned, **variable)
    assert "depth limit exceeded" in result["structuredContent"]["error"]


async def test_what_is_left_to_the_caller_is_shared_by_all_that_its_call_makes(project: Project) -> None:
    spends = {"text": "spent", "usage": {"input_tokens": 5000, "output_tokens": 5000}}
    async with piped(project, agents={"*": [spends]}) as client:
        await client.hello()
        tasks = {"tasks": [{"task": str(number)} for number in range(4)]}
        meta = {"retinue/tokens": 10_000}
        answer = await client.ask("tools/call", name="spawn_subagents", arguments=tasks, _meta=meta)
    reply = answer["result"]["structuredContent"]
    assert sorted(each["status"] for each in reply["results"]) == ["completed", "error", "error", "error"], reply
    assert "budget of 10,000 tokens of the caller is spent" in str(reply)


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"retinue/depth": 0}, "depth limit exceeded"),
        ({"retinue/tokens": 0}, "budget of 0 tokens"),
        ({"retinue/cost": "0"}, "budget of $0"),
        ({"retinue/deadline": 1}, "timed out"),
    ],
)
async def test_continuing_keeps_within_what_is_left_to_the_caller(
    project: Project, meta: dict[str, Any], why: str
) -> None:
    async with piped(project) as client:
        await client.hello()
        await client.call("spawn_subagents", tasks=[{"task": "t", "subagent_id": "a"}])
        more = {"subagent_id": "a", "message": "more"}
        answer = await client.ask("tools/call", name="continue_subagent", arguments=more, _meta=meta)
    assert why in answer["result"]["content"][0]["text"]


async def test_a_primary_that_is_continued_is_reported_too(project: Project) -> None:
    """Hidden here, since it is shown where it is reported."""
    model = project.script({"main": ["first"]})
    assert project.retinue("run", "go", "--model", model).returncode == 0
    tree = project.rows()[0]["tree"]
    more = {"subagent_id": f"{tree}/0", "message": "more"}
    call = {"name": "continue_subagent", "arguments": more, "_meta": {"retinue/parentRunID": "up"}}
    result, posted = await reports(project, agents={"main": [READ, "second"]}, call=call)
    assert result["structuredContent"]["results"][0]["answer"] == "second"
    assert [event["type"] for event in posted] == [
        "subagent_start", "thought_trace", "tool_call", "tool_result", "subagent_end",
    ]  # fmt: skip
    assert {(event["subagentName"], event["parentRunID"]) for event in posted} == {("main", "up")}


@pytest.mark.finding("S6")
@pytest.mark.requirement("CPE-31")
@pytest.mark.parametrize("inherited", ["", "http://127.0.0.1:9/secret"])
async def test_a_server_opens_no_collector_and_passes_on_only_an_address_that_it_got(
    project: Project, inherited: str
) -> None:
    (project.folder / "below.py").write_text(ENVIRONMENT)
    below = {"command": sys.executable, "args": [str(project.folder / "below.py")]}
    settings = {"mcp_servers": {"below": below}, "orchestrator": {"coordination": {"subagent_reports": "best_effort"}}}
    (project.folder / "retinue.yaml").write_text(json.dumps(settings))
    agents = {"subagent": [{"tools": [{"name": "mcp__below__show", "args": {}}]}, {"text": "{{last_result}}"}]}
    more = {"RETINUE_SUBAGENT_LOGGING_ADDRESS": inherited} if inherited else {}
    async with piped(project, "--yes", "--config", "retinue.yaml", agents=agents, **more) as client:
        await client.hello()
        call = {"name": "spawn_subagents", "arguments": {"tasks": [{"task": "look"}]}}
        said = (await client.ask("tools/call", **call))["result"]["structuredContent"]
    found = json.loads(said["results"][0]["answer"])
    assert found.pop("RETINUE_SUBAGENT_DEPTH")  # limits travel down in any case
    addresses = {"RETINUE_SUBAGENT_LOGGING_ADDRESS": inherited, "CPE_SUBAGENT_LOGGING_ADDRESS": inherited}
    assert {name: value for name, value in found.items() if name in addresses} == (addresses if inherited else {})
