"""The tools of seed 004 as an MCP client meets them, through the SDK's own client on stdio."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from tests.sandbox.places import needs_bubblewrap
from tests.surfaces.cli.shell import Project
from tests.surfaces.mcp.kit import BOTH, connected

NAMES = [
    "spawn_subagents",
    "list_subagents",
    "continue_subagent",
    "send_message_to_subagent",
    "custom_tool__get_background_tool_status",
    "custom_tool__get_background_tool_result",
    "custom_tool__wait_for_background_tool",
    "custom_tool__cancel_background_tool",
    "custom_tool__list_background_tools",
]
TASK_FIELDS = [
    "task", "task_context", "subagent_type", "subagent_id", "context_paths", "include_parent_workspace",
    "include_temp_workspace", "model", "timeout_seconds",
]  # fmt: skip
STUCK: dict[str, Any] = {"subagent": [{"hang": True}]}
WAIT = "custom_tool__wait_for_background_tool"


async def reply(client: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """The structured reply, which the SDK has held against the output schema."""
    result = await client.call_tool(tool, arguments)
    assert isinstance(result.structured_content, dict)
    assert result.content[0].text
    assert result.is_error == ("error" in result.structured_content)
    return result.structured_content


@pytest.mark.requirement("MASS-48", "MASS-49")
@pytest.mark.parametrize("mode", BOTH)
async def test_exactly_nine_tools_are_listed_and_the_removed_ones_do_not_exist(project: Project, mode: str) -> None:
    async with connected(project, mode=mode) as client:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == NAMES
        assert all(tool.output_schema and tool.description for tool in tools)
        spawns, lists, continues = (tool.input_schema for tool in tools[:3])
        assert (list(spawns["properties"]), spawns["required"]) == (["tasks", "background", "refine"], ["tasks"])
        task = spawns["properties"]["tasks"]["items"]
        assert (list(task["properties"]), task["required"]) == (TASK_FIELDS, ["task"])
        assert "required" not in lists
        assert list(continues["properties"]) == ["subagent_id", "message", "timeout_seconds"]
        assert continues["required"] == ["subagent_id", "message"]
        words = tools[0].description.lower()
        assert all(word in words for word in ("subagent", "delegate", "parallel task"))
        for removed in ("check_subagent_status", "get_subagent_result", "get_subagent_costs"):
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool(removed, {"subagent_id": "x"})


@pytest.mark.requirement("CODEY-29", "CODEY-30", "MASS-50")
async def test_other_spellings_are_taken_and_never_listed(project: Project) -> None:
    async with connected(project) as client:
        spawned = await reply(client, "mcp_spawn_subagents", tasks=[{"task": "one"}], background=True)
        name = spawned["subagents"][0]["subagent_id"]
        for tool in ("wait_for_background_tool", "mcp_wait_for_background_tool", f"mcp_{WAIT}", WAIT):
            assert (await reply(client, tool, subagent_id=name))["results"][0]["answer"] == "hello from the subagent"
        for tool in ("get_background_tool_result", "mcp_get_agent", "get_agent"):
            assert (await reply(client, tool, job_id=name))["result"]["status"] == "completed"
        assert (await reply(client, "get_agent", agent_id=1))["result"]["subagent_id"] == name
        assert (await reply(client, "get_background_tool_status", subagent_id="agent:1"))["subagent"]["state"] == "done"
        for tool in ("list_agents", "mcp_list_agents", "mcp_list_subagents"):
            assert [each["subagent_id"] for each in (await reply(client, tool))["subagents"]] == [name]
        assert (await reply(client, "cancel_background_tool", subagent_id=name))["cancelled"] is False
        assert [tool.name for tool in (await client.list_tools()).tools] == NAMES


@pytest.mark.requirement("MASS-53", "MASS-54")
@pytest.mark.parametrize("mode", BOTH)
async def test_a_blocking_spawn_gives_every_answer_with_its_timeout_and_commands(project: Project, mode: str) -> None:
    agents = {"good": [{"text": "fine"}], "bad": [{"error": "no luck"}]}
    async with connected(project, mode=mode, agents=agents) as client:
        tasks = [
            {"task": "first", "subagent_id": "good", "timeout_seconds": 5},
            {"task": "second", "subagent_id": "bad"},
        ]
        said = await reply(client, "spawn_subagents", tasks=tasks)
    assert (said["success"], said["operation"], said["mode"]) == (False, "spawn_subagents", "blocking")
    assert said["summary"] == {"total": 2, "completed": 1, "failed": 1, "timeout": 0, "cancelled": 0}
    good, bad = said["results"]
    assert {"subagent_id", "status", "success", "answer", "workspace", "execution_time_seconds", "error", "token_usage",
            "log_path", "warning", "timeout_seconds", "watch", "agent"} <= set(good)  # fmt: skip
    assert (good["status"], good["answer"], good["timeout_seconds"]) == ("completed", "fine", 60)  # at least a minute
    assert (bad["status"], bad["success"], bad["timeout_seconds"]) == ("error", False, 1800)
    assert "no luck" in bad["error"]
    assert Path(good["workspace"]).is_dir()
    assert good["watch"].startswith(f"cd {project.folder} && ") and good["watch"].endswith(good["session_id"])


@pytest.mark.requirement("MASS-48")
async def test_what_is_wrong_with_a_call_is_said_in_the_words_of_the_seed(project: Project) -> None:
    async with connected(project) as client:

        async def wrong(**arguments: Any) -> str:
            said = await reply(client, "spawn_subagents", **arguments)
            assert (said["success"], said["operation"]) == (False, "spawn_subagents")
            return str(said["error"])

        assert await wrong() == "No tasks provided. Must provide at least one task."
        assert await wrong(tasks=[]) == "No tasks provided. Must provide at least one task."
        assert await wrong(tasks=[{"task": "x"}] * 33) == "Too many tasks: 33 requested but maximum is 32"
        assert await wrong(tasks=[{}]) == "Task at index 0 missing required 'task' field"
        paths = {"task": "x", "context_paths": "a"}
        assert await wrong(tasks=[paths]) == (
            "Task at index 0 has invalid 'context_paths' type: expected list, got str"
        )
        paths = {"task": "x", "context_paths": ["a", 1]}
        assert await wrong(tasks=[paths]) == "Task at index 0 has invalid context_paths[1]: expected string, got int"
        paths = {"task": "x", "context_paths": ["nowhere"]}
        assert await wrong(tasks=[paths]) == "Task at index 0 has non-existent context_path: 'nowhere'"
        twice = [{"task": "x", "subagent_id": "a"}] * 2
        assert await wrong(tasks=twice) == "Duplicate subagent_id values: a"
        unknown = await wrong(tasks=[{"task": "x", "subagent_type": "wizard"}])
        assert unknown.startswith("Unknown subagent_type 'wizard' for task 'x'. Available subagent types: ")
        outside = await wrong(tasks=[{"task": "x", "context_paths": ["/etc/passwd"]}])
        assert outside.startswith("Task at index 0 has a context_path it may not have")
        assert (await reply(client, "continue_subagent", message="x"))["error"] == (
            "Missing required 'subagent_id' field"
        )
        missing = await reply(client, "continue_subagent", subagent_id="nobody", message="x")
        assert "nobody" in missing["error"]


@pytest.mark.requirement("MASS-48", "MASS-50", "MASS-51", "MASS-53", "MASS-54")
async def test_a_background_subagent_from_its_handle_to_its_end(project: Project) -> None:
    async with connected(project, agents=STUCK) as client:
        task = {"task": "long " * 50, "subagent_id": "slow", "timeout_seconds": 90}
        said = await reply(client, "spawn_subagents", tasks=[task], background=True)
        assert (said["success"], said["mode"]) == (True, "background")
        [handle] = said["subagents"]
        assert (handle["status"], handle["timeout_seconds"], handle["agent"]) == ("running", 90, "agent:1")
        assert json.loads(Path(handle["status_file"]).read_text())["subagent_id"] == "slow"
        again = await reply(client, "spawn_subagents", tasks=[task])
        assert again["error"] == "Cannot spawn subagent_id already running: slow"
        [listed] = (await reply(client, "list_subagents"))["subagents"]
        assert (listed["subagent_id"], listed["status"], listed["continuable"]) == ("slow", "running", False)
        assert len(listed["task"]) == 100
        assert listed["session_id"] == handle["session_id"]
        assert listed["workspace"] == handle["workspace"]
        assert listed["elapsed_seconds"] + listed["seconds_remaining"] == pytest.approx(90, abs=1)
        waited = await reply(client, WAIT, subagent_id="slow", timeout_seconds=0.2)
        assert (waited["timed_out"], waited["results"]) == (True, [])
        assert waited["running"][0]["subagent_id"] == "slow"
        unready = await reply(client, "get_agent", subagent_id="slow")
        assert unready["status"] == "running" and "has not ended" in unready["error"]
        going = await reply(client, "continue_subagent", subagent_id="slow", message="go on")
        assert "still running" in going["error"]
        assert (await reply(client, "cancel_background_tool", subagent_id="slow"))["cancelled"] is True
        ended = await reply(client, WAIT, subagent_id="slow")
        assert ended["results"][0]["status"] == "cancelled"
        assert (await reply(client, "list_background_tools"))["subagents"] == []
        [kept] = (await reply(client, "list_background_tools", include_all=True))["subagents"]
        assert kept["status"] == "cancelled"
        assert (await reply(client, WAIT))["note"] == "No subagent is running."


@pytest.mark.finding("S1")
@pytest.mark.requirement("MASS-48", "MASS-54")
async def test_a_cancelled_subagent_is_continued_with_what_it_knew(project: Project) -> None:
    agents = {"/main/subagent-1": [{"hang": True}], "/main/subagent-2": ["gone on"]}
    async with connected(project, agents=agents) as client:
        await reply(client, "spawn_subagents", tasks=[{"task": "t", "subagent_id": "s"}], background=True)
        assert (await reply(client, "cancel_background_tool", subagent_id="s"))["status"] == "cancelled"
        said = await reply(client, "continue_subagent", subagent_id="s", message="go on", timeout_seconds=100)
        assert (said["operation"], said.get("timeout_seconds")) == ("continue_subagent", 100), said
        [result] = said["results"]
        assert (result["subagent_id"], result["timeout_seconds"], result["answer"]) == ("s", 100, "gone on")
        tree = result["session_id"].split("/")[0]
        runs = json.loads(project.retinue("ps", "--all", "--json").stdout)
        assert [run["continues"] for run in runs if run["tree"] == tree and run["run"] == 2] == [f"{tree}/1"]


@pytest.mark.finding("S1")
async def test_a_message_to_a_subagent_gets_the_receipt_of_retinue_send(project: Project) -> None:
    async with connected(project, agents=STUCK) as client:
        await reply(client, "spawn_subagents", tasks=[{"task": "t", "subagent_id": "s"}], background=True)
        asked = {"subagent_id": "s", "message": "hurry"}
        sent = await reply(client, "send_message_to_subagent", **asked, timeout_seconds=0)
        assert (sent["success"], sent["note"]) == (True, "queued: the run reads it at its next turn")
        await reply(client, "cancel_background_tool", subagent_id="s")
        late = await reply(client, "mcp_send_message_to_subagent", **asked)
        assert (late["state"], late["error"]) == ("too_late", "too late: the run has ended: cancelled")


@pytest.mark.requirement("MASS-51")
async def test_earlier_runs_of_the_project_are_known_and_go_on(project: Project) -> None:
    agents = {"old": ["remembered"], "*": ["other"]}
    async with connected(project, agents=agents) as client:
        await reply(client, "spawn_subagents", tasks=[{"task": "long ago", "subagent_id": "old"}])
    async with connected(project, agents=agents) as client:
        [listed] = (await reply(client, "list_subagents"))["subagents"]
        assert (listed["subagent_id"], listed["status"], listed["continuable"]) == ("old", "completed", True)
        got = await reply(client, "get_agent", subagent_id="old")
        assert got["result"]["answer"] == "remembered"
        said = await reply(client, "continue_subagent", subagent_id="old", message="and now?")
        assert said["success"], said
        assert said["results"][0]["session_id"].split("/")[0] == listed["session_id"].split("/")[0]
        assert said["results"][0]["answer"] == "remembered"


async def test_changes_are_named_with_the_command_that_takes_them_over(project: Project) -> None:
    (project.folder / "a.txt").write_text("old\n")
    write = {"tools": [{"name": "write", "args": {"path": "b.txt", "content": "new\n"}}]}
    (project.folder / "retinue.yaml").write_text("profiles:\n  maker:\n    description: makes\n    workspace: copy\n")
    async with connected(project, "--yes", agents={"maker": [write, "made"]}) as client:
        tasks = [{"task": "make", "subagent_type": "maker"}]
        said = await reply(client, "spawn_subagents", tasks=tasks)
    [result] = said["results"]
    assert (result["changed_files"], result["changed_count"]) == (["added b.txt"], 1)
    assert result["apply"] == f"cd {project.folder} && {result['apply'].split('&& ')[1]}"
    assert not (project.folder / "b.txt").exists()
    assert project.retinue("apply", result["session_id"], "--yes").returncode == 0
    assert (project.folder / "b.txt").read_text() == "new\n"


@pytest.mark.requirement("P36")
async def test_nothing_of_the_client_or_of_a_sibling_reaches_a_subagent(project: Project) -> None:
    agents = {"one": ["the word is swordfish"], "two": ["nothing known"]}
    async with connected(project, agents=agents) as client:
        tasks = [{"task": "first task", "subagent_id": "one"}, {"task": "second task", "subagent_id": "two"}]
        said = await reply(client, "spawn_subagents", tasks=tasks)
    tree = said["results"][0]["session_id"].split("/")[0]
    events = [json.loads(line) for line in project.retinue("tail", tree, "--json").stdout.splitlines()]
    second = json.dumps([event for event in events if event["run"] == 2])
    assert "second task" in second
    assert "swordfish" not in second and "first task" not in second


@pytest.mark.finding("S2", "S10")
async def test_a_client_reads_what_profiles_are_for_and_unknown_arguments_are_refused(project: Project) -> None:
    folder = project.folder / ".agent" / "subagent_types" / "finder"
    folder.mkdir(parents=True)
    words = "---\nname: finder\ndescription: Finds things.\nexpected_input: [the name]\n---\nYou find.\n"
    (folder / "SUBAGENT.md").write_text(words)
    async with connected(project) as client:
        task = (await client.list_tools()).tools[0].input_schema["properties"]["tasks"]["items"]["properties"]
        assert "- finder: Finds things. Expected input: the name." in task["subagent_type"]["description"].splitlines()
        said = await reply(client, "list_subagents", colour="red")
        assert said["error"] == "list_subagents: unknown argument 'colour'. Known arguments: offset"
        said = await reply(client, "spawn_subagents", tasks=[{"task": "x"}], colour="red")
        known = "tasks, background, refine"
        assert said["error"] == f"spawn_subagents: unknown argument 'colour'. Known arguments: {known}"
    async with connected(project, "--profile", "finder") as client:
        [tool] = (await client.list_tools()).tools
        assert tool.description.endswith("Finds things. Expected input: the name.")


async def test_rules_that_deny_hold_for_the_client_and_nobody_is_asked_again(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text("approvals:\n  mode: strict\n")
    async with connected(project, "--wait-approvals", "0") as client:
        assert (await reply(client, "spawn_subagents", tasks=[{"task": "x"}]))["success"]
    (project.folder / "retinue.yaml").write_text("approvals:\n  deny: [spawn_subagents]\n")
    async with connected(project) as client:
        said = await reply(client, "spawn_subagents", tasks=[{"task": "x"}])
        assert said["error"] == "the rule spawn_subagents forbids spawn_subagents"


@needs_bubblewrap
async def test_as_shipped_a_subagent_works_in_a_sandboxed_worktree(project: Project) -> None:
    """The default runtime, which is what a user gets."""
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(project.folder)]
    (project.folder / "a.txt").write_text("old\n")
    for words in (["init", "-q"], ["add", "a.txt"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    write = {"tools": [{"name": "write", "args": {"path": "b.txt", "content": "new\n"}}]}
    async with connected(project, "--yes", "--runtime", "isolated", agents={"*": [write, "made"]}) as client:
        said = await reply(client, "spawn_subagents", tasks=[{"task": "make"}])
    [result] = said["results"]
    assert (result["status"], result["changed_files"]) == ("completed", ["added b.txt"]), result
    assert not (project.folder / "b.txt").exists()
    applied = project.retinue("apply", result["session_id"], "--yes")
    assert applied.returncode == 0 and (project.folder / "b.txt").read_text() == "new\n", applied.stderr


async def test_what_subagents_spawn_is_listed_and_waiting_is_for_ones_own(project: Project) -> None:
    spawn = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "deep", "subagent_id": "deep"}]}}]}
    agents = {"top": [spawn, {"hang": True}], "deep": ["found"]}
    async with connected(project, "--yes", agents=agents) as client:
        await reply(client, "spawn_subagents", tasks=[{"task": "t", "subagent_id": "top"}], background=True)
        found: dict[str, Any] = {}
        while found.get("deep") != "completed":
            found = {
                each["subagent_id"]: each["status"] for each in (await reply(client, "list_subagents"))["subagents"]
            }
        assert found == {"top": "running", "deep": "completed"}
        waited = await reply(client, WAIT, timeout_seconds=0.2)
        assert waited["timed_out"] and [each["subagent_id"] for each in waited["running"]] == ["top"]
        assert (await reply(client, "get_agent", subagent_id="deep"))["result"]["answer"] == "found"


async def test_a_depth_of_zero_is_no_subagents(project: Project) -> None:
    async with connected(project, "--max-depth", "0") as client:
        said = await reply(client, "spawn_subagents", tasks=[{"task": "t"}])
        assert "depth limit exceeded (0/0)" in said["error"]


async def test_a_timeout_on_the_command_line_is_that_of_each_subagent(project: Project) -> None:
    async with connected(project, "--timeout", "1", agents=STUCK) as client:
        tasks = [{"task": "a"}, {"task": "b", "timeout_seconds": 3600}]
        said = await reply(client, "spawn_subagents", tasks=tasks)
        assert [(each["status"], each["timeout_seconds"]) for each in said["results"]] == [("timeout", 1)] * 2
        assert (await reply(client, "spawn_subagents", tasks=[{"task": "c"}]))["summary"]["timeout"] == 1


async def test_the_bounds_of_a_timeout_that_a_model_reads_are_those_of_the_project(project: Project) -> None:
    times = "{subagent_default_timeout: 300, subagent_min_timeout: 5, subagent_max_timeout: 900}"
    (project.folder / "retinue.yaml").write_text(f"orchestrator: {{coordination: {times}}}\n")
    async with connected(project) as client:
        spawn = (await client.list_tools()).tools[0]
    task = spawn.input_schema["properties"]["tasks"]["items"]["properties"]
    assert "default 300; between 5 and 900" in task["timeout_seconds"]["description"]


@pytest.mark.finding("M8")
async def test_a_long_list_comes_in_pages(project: Project) -> None:
    names = [f"s{number}" for number in range(110)]
    async with connected(project, agents={"*": ["done"]}) as client:
        for start in range(0, len(names), 30):
            tasks = [{"task": "t", "subagent_id": name} for name in names[start : start + 30]]
            assert (await reply(client, "spawn_subagents", tasks=tasks))["success"]
        first = await reply(client, "list_subagents")
        second = await reply(client, "list_subagents", offset=first["next_offset"])
        wrong = await reply(client, "list_subagents", offset=-1)
        started = await reply(client, "list_background_tools", include_all=True)
    assert [each["subagent_id"] for each in first["subagents"]] == names[10:]  # the newest
    assert (first["left_out"], first["next_offset"]) == (10, 100)
    assert [each["subagent_id"] for each in second["subagents"]] == names[:10]
    assert second["left_out"] == 0 and "next_offset" not in second
    assert "'offset' must be" in wrong["error"]
    assert [each["subagent_id"] for each in started["subagents"]] == names[10:] and started["left_out"] == 10
