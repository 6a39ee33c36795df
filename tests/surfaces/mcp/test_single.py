"""Tests of `--profile NAME`: one subagent as one tool, as seed 000 describes it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from tests.surfaces.cli.shell import Project
from tests.surfaces.mcp.kit import BOTH, connected, piped

SCHEMA = {
    "type": "object",
    "properties": {"files": {"type": "array", "items": {"type": "string"}}},
    "required": ["files"],
}


@pytest.fixture
def poet(project: Project) -> Project:
    (project.folder / "retinue.yaml").write_text("profiles:\n  poet:\n    description: Writes verse.\n")
    return project


def events(project: Project) -> list[dict[str, Any]]:
    return [json.loads(line) for line in project.retinue("tail", "--json").stdout.splitlines()]


@pytest.mark.requirement("CPE-8", "CPE-20", "CPE-21", "CPE-23")
@pytest.mark.parametrize("mode", BOTH)
async def test_any_client_calls_it_and_gets_its_text(poet: Project, mode: str) -> None:
    (poet.folder / "moon.txt").write_text("a moon")
    read = {"tools": [{"name": "read", "args": {"path": str(poet.folder / "moon.txt")}}]}
    async with connected(
        poet, "--profile", "poet", mode=mode, agents={"poet": [read, "verse about {{last_result}}"]}
    ) as client:
        [tool] = (await client.list_tools()).tools
        assert tool.name == "poet" and "Delegate" in tool.description and "Writes verse." in tool.description
        assert tool.output_schema is None
        properties = tool.input_schema["properties"]
        assert {name: field["type"] for name, field in properties.items()} == {
            "prompt": "string", "inputs": "array", "runId": "string",
        }  # fmt: skip
        assert properties["inputs"]["items"] == {"type": "string"}
        assert tool.input_schema["required"] == ["prompt", "runId"]
        call = {"prompt": "write about the moon", "inputs": ["moon.txt"], "runId": "run-42"}
        result = await client.call_tool("poet", call)
        assert not result.is_error and result.structured_content is None
        assert "a moon" in result.content[0].text
    spawned = next(event for event in events(poet) if event["kind"] == "run.spawned")
    assert (spawned["subagent_id"], spawned["agent"]) == ("run-42", "poet")
    assert "moon.txt" in spawned["task_context"]


@pytest.mark.requirement("CPE-8", "CPE-20", "CPE-21", "CPE-23")
async def test_a_call_without_a_run_id_or_a_prompt_is_rejected(poet: Project) -> None:
    async with connected(poet, "--profile", "poet") as client:
        for wrong, text in (
            ({"prompt": "x"}, "'runId' is required"),
            ({"prompt": "x", "runId": ""}, "'runId' is required"),
            ({"prompt": "x", "runId": "  \n"}, "'runId' is required"),
            ({"prompt": "x", "runId": 7}, "'runId' is required"),
            ({"prompt": "x", "runId": "r" * 300}, "at most 200"),
            ({"prompt": "x", "runId": "a\x1b[1m"}, "printable"),
            ({"runId": "r"}, "'prompt' is required"),
            ({"prompt": " ", "runId": "r"}, "'prompt' is required"),
            ({"prompt": "x", "runId": "r", "inputs": "moon.txt"}, "'inputs' must be a list of strings"),
            ({"prompt": "x", "runId": "r", "inputs": [1]}, "inputs[0] must be a string"),
            ({"prompt": "x", "runId": "r", "inputs": ["nowhere"]}, "inputs[0] does not exist"),
            ({"prompt": "x", "runId": "r", "inputs": ["../../etc"]}, "inputs[0] is outside the project"),
            ({"prompt": "x", "runId": "r", "inputs": ["a\0b"]}, "inputs[0] does not exist"),
        ):
            result = await client.call_tool("poet", wrong)
            assert result.is_error and text in result.content[0].text, wrong
        with pytest.raises(MCPError, match="Unknown tool"):
            await client.call_tool("spawn_subagents", {"tasks": []})
    assert json.loads(poet.retinue("ps", "--all", "--json").stdout) == []


@pytest.mark.parametrize("mode", BOTH)
async def test_with_a_schema_the_answer_is_data_that_fits_it(poet: Project, mode: str) -> None:
    (poet.folder / "schema.json").write_text(json.dumps(SCHEMA))
    answer = {"tools": [{"name": "final_answer", "args": {"files": ["a.py"]}}]}
    arguments = ["--profile", "poet", "--output-schema", str(poet.folder / "schema.json")]
    async with connected(poet, *arguments, mode=mode, agents={"poet": [answer]}) as client:
        [tool] = (await client.list_tools()).tools
        assert tool.output_schema == SCHEMA
        result = await client.call_tool("poet", {"prompt": "which files?", "runId": "r"})
    assert not result.is_error
    assert result.structured_content == {"files": ["a.py"]}
    assert json.loads(result.content[0].text) == {"files": ["a.py"]}


async def test_a_run_that_fails_is_an_error_with_what_it_had(poet: Project) -> None:
    async with connected(poet, "--profile", "poet", agents={"poet": [{"error": "no luck today"}]}) as client:
        result = await client.call_tool("poet", {"prompt": "x", "runId": "r"})
    assert result.is_error and "no luck today" in result.content[0].text


def test_a_schema_that_is_none_is_one_line(poet: Project) -> None:
    for text, said in (
        ("{", "is not JSON"),
        ("[]", "JSON schema of an object"),
        ('{"type": "string"}', "of an object"),
    ):
        (poet.folder / "schema.json").write_text(text)
        model = ["--model", poet.script({})]
        done = poet.retinue("mcp", "serve", "--http", *model, "--profile", "poet", "--output-schema", "schema.json")
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


async def test_each_call_is_a_tree_of_its_own_and_ends_with_its_call(poet: Project) -> None:
    async with piped(poet, "--profile", "poet", agents={"quick": ["verse"], "*": [{"hang": True}]}) as client:
        await client.hello()
        assert not (await client.call("poet", prompt="x", runId="quick"))["isError"]
        name = await client.begin("tools/call", name="poet", arguments={"prompt": "long", "runId": "slow"})
        runs: dict[str, Any] = {}
        while "slow" not in runs:
            listed = json.loads((await asyncio.to_thread(poet.retinue, "ps", "--all", "--json")).stdout)
            runs = {run["subagent_id"]: run for run in listed}
        assert runs["quick"]["tree"] != runs["slow"]["tree"] and runs["slow"]["run"] == 0
        await client.notify("notifications/cancelled", requestId=name, reason="enough")
        while runs["slow"]["state"] != "cancelled":
            listed = json.loads((await asyncio.to_thread(poet.retinue, "ps", "--all", "--json")).stdout)
            runs = {run["subagent_id"]: run for run in listed}
        await client.begin("tools/call", name="poet", arguments={"prompt": "long", "runId": "left"})
        while "left" not in runs:
            listed = json.loads((await asyncio.to_thread(poet.retinue, "ps", "--all", "--json")).stdout)
            runs = {run["subagent_id"]: run for run in listed}
    ended = {run["subagent_id"]: run["state"] for run in json.loads(poet.retinue("ps", "--all", "--json").stdout)}
    assert ended == {"quick": "done", "slow": "cancelled", "left": "cancelled"}
    spawned = [event for event in events(poet) if event["kind"] == "run.spawned"]
    assert [event["timeout_seconds"] for event in spawned] == [1800]


@pytest.mark.parametrize("mode", BOTH)
async def test_what_it_asks_is_asked_of_the_user(poet: Project, mode: str) -> None:
    shown: list[str] = []

    async def answer(context: Any, params: Any) -> types.ElicitResult:
        shown.append(params.message)
        return types.ElicitResult(action="accept", content={"answer": "yes"})

    write = {"tools": [{"name": "write", "args": {"path": "verse.txt", "content": "moon\n"}}]}
    options = {"mode": mode, "elicitation_callback": answer}
    async with connected(poet, "--profile", "poet", agents={"poet": [write, "written"]}, **options) as client:
        result = await client.call_tool("poet", {"prompt": "write", "runId": "r"})
    assert result.content[0].text == "written" and len(shown) == 1 and "+moon" in shown[0]
