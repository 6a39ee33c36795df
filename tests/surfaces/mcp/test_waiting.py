"""Tests of long calls: progress, handles for clients that do not wait, and clients that give up."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from retinue.surfaces.mcp.host import PROGRESS_SECONDS
from tests.gates import Gate, pass_time
from tests.surfaces.cli.shell import COMMAND, Project, environment
from tests.surfaces.mcp.kit import BOTH, connected, piped

STUCK: dict[str, Any] = {"*": [{"hang": True}]}
WAIT = "custom_tool__wait_for_background_tool"
TASKS = {"tasks": [{"task": "take your time", "subagent_id": "slow"}]}


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def slow(gate: Gate) -> dict[str, Any]:
    """Agents that answer when the gate has been opened."""
    return {"*": [gate.reply, "at last"]}


def runs(project: Project) -> dict[str, str]:
    """Return the state of each subagent by its id."""
    listed = json.loads(project.retinue("ps", "--all", "--json").stdout)
    return {run["subagent_id"]: run["state"] for run in listed if run["parent"] is not None}


@pytest.mark.requirement("MASS-47", "P38")
@pytest.mark.parametrize("mode", BOTH)
async def test_progress_comes_at_least_every_five_seconds(project: Project, mode: str, gate: Gate) -> None:
    told: list[str] = []
    again = asyncio.Event()

    async def progress(value: float, total: float | None, message: str | None) -> None:
        told.append(message or "")
        if told[-1] in told[:-1]:  # nothing has happened since: only the time has passed
            again.set()

    async with connected(project, "--yes", mode=mode, agents=slow(gate)) as client:
        calling = asyncio.create_task(client.call_tool("spawn_subagents", TASKS, progress_callback=progress))
        await again.wait()
        assert not calling.done()
        await gate.let_pass()
        result = await calling
    assert result.structured_content["results"][0]["answer"] == "at last"
    assert "1 subagent running" in told[0] and "slow" in told[0]
    assert PROGRESS_SECONDS < 5


@pytest.mark.requirement("P38")
@pytest.mark.parametrize("mode", BOTH)
async def test_a_call_is_answered_in_time_with_a_handle_to_wait_with(project: Project, mode: str, gate: Gate) -> None:
    async with connected(project, "--yes", "--reply-within", "0.5", mode=mode, agents=slow(gate)) as client:
        said = (await client.call_tool("spawn_subagents", TASKS)).structured_content
        assert (said["success"], said["mode"]) == (True, "background")
        [handle] = said["subagents"]
        assert (handle["subagent_id"], handle["status"], handle["timeout_seconds"]) == ("slow", "running", 1800)
        assert WAIT in said["note"]
        said = (await client.call_tool(WAIT, {"subagent_id": "slow"})).structured_content
        assert said["timed_out"] and [each["subagent_id"] for each in said["running"]] == ["slow"]
        await gate.let_pass()
        while (said := (await client.call_tool(WAIT, {"subagent_id": "slow"})).structured_content)["timed_out"]:
            pass
        assert said["results"][0]["answer"] == "at last"


@pytest.mark.requirement("MASS-47", "P38")
async def test_a_client_that_times_out_loses_nothing(project: Project, gate: Gate) -> None:
    async with connected(project, "--yes", agents=slow(gate)) as client:
        calling = asyncio.create_task(client.call_tool("spawn_subagents", TASKS, read_timeout_seconds=100))
        held = await gate.wait_for_arrival()
        await pass_time(100)
        with pytest.raises(MCPError, match="timed out"):
            await calling
        said = (await client.call_tool("list_subagents", {})).structured_content
        assert [(each["subagent_id"], each["status"]) for each in said["subagents"]] == [("slow", "running")]
        os.close(held)
        said = (await client.call_tool(WAIT, {"subagent_id": "slow"})).structured_content
        assert said["results"][0]["answer"] == "at last"


async def test_a_call_that_is_cancelled_cancels_what_it_made(project: Project) -> None:
    async with piped(project, agents=STUCK) as client:
        await client.hello()
        other = {"task": "stays", "subagent_id": "other"}
        await client.call("spawn_subagents", tasks=[other], background=True)
        name = await client.begin("tools/call", name="spawn_subagents", arguments=TASKS)
        while len((await client.call("list_background_tools"))["structuredContent"]["subagents"]) < 2:
            pass
        await client.notify("notifications/cancelled", requestId=name, reason="the user pressed escape")
        ended = (await client.call(WAIT, subagent_id="slow"))["structuredContent"]["results"][0]
        assert ended["status"] == "cancelled"
        assert runs(project) == {"slow": "cancelled", "other": "running"}
        await client.notify("notifications/cancelled", requestId=name, reason="twice")
        await client.notify("notifications/cancelled", requestId="never asked")
        await client.notify("notifications/cancelled")
        assert (await client.ask("ping"))["result"] == {}
    assert runs(project) == {"slow": "cancelled", "other": "cancelled"}


async def test_cancelling_a_call_that_was_answered_does_nothing(project: Project) -> None:
    async with piped(project) as client:
        await client.hello()
        name = await client.begin("tools/call", name="spawn_subagents", arguments={**TASKS, "background": True})
        await client.answer(name)
        await client.notify("notifications/cancelled", requestId=name, reason="late")
        assert (await client.call(WAIT, subagent_id="slow"))["structuredContent"]["results"][0]["success"]


async def test_the_tree_ends_with_its_client(project: Project) -> None:
    async with piped(project, agents=STUCK) as client:
        await client.hello()
        await client.call("spawn_subagents", **TASKS, background=True)
        await client.begin(
            "tools/call", name="spawn_subagents", arguments={"tasks": [{"task": "b", "subagent_id": "b"}]}
        )
        while len((await client.call("list_background_tools"))["structuredContent"]["subagents"]) < 2:
            pass
    assert client.process.returncode == 0
    assert runs(project) == {"slow": "cancelled", "b": "cancelled"}
    [primary] = [run for run in json.loads(project.retinue("ps", "--all", "--json").stdout) if run["run"] == 0]
    assert (primary["agent"], primary["status"], primary["task"]) == ("mcp-client", "done", "pipe 1 (stdio)")


async def test_a_session_goes_on_after_its_tree_was_cancelled_from_elsewhere(project: Project) -> None:
    async with piped(project, agents=STUCK) as client:
        await client.hello()
        first = (await client.call("spawn_subagents", **TASKS, background=True))["structuredContent"]
        tree = first["watch"].split()[-1]
        assert project.retinue("cancel", tree).returncode == 0
        while runs(project)["slow"] != "cancelled":
            pass
        second = (await client.call("spawn_subagents", **TASKS, background=True))["structuredContent"]
        assert second["success"] and second["watch"].split()[-1] != tree


async def leave_killed(project: Project, *tasks: str, agents: dict[str, Any]) -> str:
    """Starts subagents, kills the server as soon as those that hang are at work, and gives their tree."""
    async with piped(project, agents=agents, quick=False) as client:
        await client.hello()
        wanted = [{"task": name, "subagent_id": name} for name in tasks]
        first = (await client.call("spawn_subagents", tasks=wanted, background=True))["structuredContent"]
        while (await asyncio.to_thread(runs, project)) != {
            name: "done" if name.startswith("quick") else "running" for name in tasks
        }:
            pass
        client.process.kill()
        await client.process.wait()
    tree: str = first["watch"].split()[-1]
    return tree


HALF: dict[str, Any] = {"/main/subagent-1": [{"hang": True}], "/main/subagent-2": ["quick answer"]}
GO_ON: dict[str, Any] = {"*": ["gone on"]}


@pytest.mark.finding("M6")
async def test_the_next_session_continues_what_a_killed_server_interrupted(project: Project) -> None:
    await leave_killed(project, "slow", "quick", agents=HALF)
    async with piped(project, agents=GO_ON) as client:
        await client.hello()
        listed = (await client.call("list_subagents"))["structuredContent"]["subagents"]
        found = {each["subagent_id"]: (each["status"], each["continuable"]) for each in listed}
        assert found == {"slow": ("interrupted", True), "quick": ("completed", True)}
        said = (await client.call("continue_subagent", subagent_id="slow", message="finish"))["structuredContent"]
        assert said["results"][0]["status"] == "completed" and "gone on" in said["results"][0]["answer"], said
        again = (await client.call("continue_subagent", subagent_id="quick", message="more"))["structuredContent"]
        assert "gone on" in again["results"][0]["answer"], again
    assert runs(project) == {"slow": "done", "quick": "done"}


@pytest.mark.finding("M6")
async def test_a_subagent_that_had_ended_before_the_kill_is_continued_too(project: Project) -> None:
    """Only the client's own run has no ending then."""
    await leave_killed(project, "quick", agents={"*": ["quick answer"]})
    async with piped(project, agents=GO_ON) as client:
        await client.hello()
        said = (await client.call("continue_subagent", subagent_id="quick", message="more"))["structuredContent"]
        assert said["results"][0]["status"] == "completed", said


@pytest.mark.finding("R7", "M6")
async def test_resume_goes_on_with_what_was_at_work_when_a_server_was_killed(project: Project) -> None:
    tree = await leave_killed(project, "slow", "quick", agents=HALF)
    resumed = project.retinue("resume", "--model", project.script(GO_ON))  # the latest tree
    assert resumed.returncode == 0, resumed.stderr
    assert "slow: gone on" in resumed.stdout and "quick" not in resumed.stdout  # its answer was there before
    assert runs(project) == {"slow": "done", "quick": "done"}
    done = project.retinue("continue", f"{tree}/1", "more", "--model", project.script(GO_ON))
    assert done.returncode == 0 and "gone on" in done.stdout, done.stderr


async def test_a_primary_with_the_name_of_a_client_is_a_subagent(project: Project) -> None:
    profile = project.folder / ".agent/subagent_types/mcp-client/SUBAGENT.md"
    profile.parent.mkdir(parents=True)
    profile.write_text("---\nname: mcp-client\ndescription: Calls MCP servers\n---\nCall them.\n")
    assert project.run("--profile", "mcp-client", agents=GO_ON).returncode == 0
    [row] = project.rows()
    async with piped(project, agents=GO_ON) as client:
        await client.hello()
        watch = (await client.call("spawn_subagents", **TASKS))["structuredContent"]["watch"]
        listed = (await client.call("list_subagents"))["structuredContent"]["subagents"]
        assert row["subagent_id"] in {each["subagent_id"] for each in listed}, listed
        said = await client.call("continue_subagent", subagent_id=row["subagent_id"], message="more")
        assert said["structuredContent"]["results"][0]["answer"] == "gone on", said
    async with piped(project, agents=GO_ON) as client:
        await client.hello()
        said = await client.call("continue_subagent", subagent_id=f"{watch.split()[-1]}/0", message="more")
        assert "is a client, no subagent" in said["content"][0]["text"], said


@pytest.mark.finding("R7")
async def test_a_killed_server_without_work_does_not_stand_before_an_interrupted_tree(project: Project) -> None:
    hang = {"main": [{"hang": True}]}
    running = await asyncio.create_subprocess_exec(
        *COMMAND, "run", "t", "--runtime", "inherited", "--model", project.script(hang, name="first.yaml"),
        cwd=project.folder, env=environment(), stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    while '"running"' not in project.retinue("ps", "--json").stdout:
        pass
    running.kill()
    await running.wait()
    await leave_killed(project, "quick", agents={"*": ["quick answer"]})
    project.script({"main": ["the first tree"]}, name="first.yaml")
    resumed = project.retinue("resume")
    assert (resumed.returncode, resumed.stdout) == (0, "the first tree\n"), resumed.stderr
    nothing = project.retinue("resume")
    assert nothing.returncode == 2 and "no tree here is interrupted" in nothing.stderr
