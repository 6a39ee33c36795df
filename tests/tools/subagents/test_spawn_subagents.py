"""`spawn_subagents`: its exact replies and errors, its workspaces, and the files its runs leave."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import ConfigError, Profile, Task
from retinue.core.events import RunSpawned, RunStarted, ToolCall, ToolResult, TurnStarted
from retinue.testing import ManualClock, scripted
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree, until
from tests.workspaces.kit import repository, seen


async def reply(*tasks: Any, options: dict[str, Any] | None = None, **opened: Any) -> dict[str, Any]:
    script = {"main": [spawn(*tasks, **(options or {})), {"text": "end"}], "*": [{"text": "did it"}]}
    _, events = await tree(script, **opened)
    answer: dict[str, Any] = json.loads(bodies(events, ToolResult, run=0)[0].text)
    return answer


async def test_all_calls_of_a_reply_are_written_before_one_of_them_begins() -> None:
    tools = [{"name": "spawn_subagents", "args": {"tasks": [{"task": name}]}} for name in ("one", "two")]
    tools.append({"name": "nothing", "args": {}})
    _, events = await tree({"main": [{"tools": tools}, {"text": "end"}], "*": [{"text": "did it"}]})
    kinds = [type(event.body) for event in events if isinstance(event.body, ToolCall | ToolResult | RunSpawned)]
    assert kinds[:4] == [RunSpawned, ToolCall, ToolCall, ToolCall]


@pytest.mark.requirement("MASS-1", "MASS-23", "MASS-53", "MASS-54")
async def test_a_blocking_reply_has_every_result_and_a_summary(tmp_path: Path) -> None:
    script = {
        "main": [spawn(*({"task": name, "subagent_id": name} for name in ("good", "bad", "half"))), {"text": "end"}],
        "good": [call("write", path="out/report.md", content="findings"), {"text": "done well"}],
        "bad": [{"error": "no luck"}],
        "half": [{"text": "so far", **call("list_agents")}, {"cut": "and th"}],
    }
    _, events = await tree(script, path=tmp_path / ".retinue")
    answer = json.loads(bodies(events, ToolResult, run=0)[0].text)
    good, bad, half = answer["results"]
    assert {k: answer[k] for k in ("success", "operation", "mode")} == {
        "success": False, "operation": "spawn_subagents", "mode": "blocking",
    }  # fmt: skip
    assert answer["summary"] == {"total": 3, "completed": 1, "failed": 2, "timeout": 0, "cancelled": 0}
    assert set(answer) == {"success", "operation", "mode", "results", "summary"}
    assert set(good) == {
        "subagent_id", "status", "success", "answer", "workspace", "execution_time_seconds", "error", "token_usage",
        "log_path", "warning", "timeout_seconds",
    }  # fmt: skip
    assert good["timeout_seconds"] == 1800
    assert (good["status"], good["success"], good["answer"], good["error"]) == ("completed", True, "done well", None)
    assert (bad["status"], bad["success"], bad["error"]) == ("error", False, "no luck")
    assert (half["status"], half["answer"]) == ("partial", "and th")
    folders = [Path(result["workspace"]) for result in answer["results"]]
    assert len(set(folders)) == 3
    assert all(folder.is_absolute() and folder.is_dir() for folder in folders)
    assert (folders[0] / "out" / "report.md").read_text() == "findings"


@pytest.mark.finding("S13")
@pytest.mark.requirement("MASS-53")
async def test_a_timeout_with_and_without_text_and_a_cancel_are_told_apart_and_counted_once() -> None:
    clock = ManualClock()
    script = {
        "main": [spawn(*({"task": name, "subagent_id": name} for name in ("late", "silent", "dropped"))), "end"],
        "late": [{"text": "so far", **call("list_agents")}, {"hang": True}],
        "*": [{"hang": True}],
    }
    async with retinue.open(mode="yes", clock=clock) as r:
        run = await r.spawn(Profile("main", model=scripted(script, clock=clock)), "go")
        await until(run, TurnStarted, number=3)
        await until(run, ToolResult, number=1)
        assert await r.control.cancel(run.tree, 3)
        await clock.advance(1801)
        await run.result()
        [result] = bodies(await r.control.log.read(run.tree), ToolResult, run=0)
    answer = json.loads(result.text)
    assert [(each["status"], each["success"], each["answer"]) for each in answer["results"]] == [
        ("completed_but_timeout", False, "so far"),
        ("timeout", False, "Subagent timed out"),
        ("cancelled", False, "Subagent cancelled"),
    ]
    assert answer["summary"] == {"total": 3, "completed": 0, "failed": 0, "timeout": 2, "cancelled": 1}


@pytest.mark.requirement("MASS-23", "MASS-53")
async def test_a_background_reply_names_what_was_made(tmp_path: Path) -> None:
    script = {"main": [spawn({"task": "x", "subagent_id": "x"}, background=True), {"text": "a"}, {"text": "end"}]}
    result, events = await tree({**script, "*": [{"text": "did it"}]}, path=tmp_path / ".retinue")
    answer = json.loads(bodies(events, ToolResult, run=0)[0].text)
    [made] = answer["subagents"]
    assert (answer["success"], answer["operation"], answer["mode"]) == (True, "spawn_subagents", "background")
    assert set(answer) == {"success", "operation", "mode", "subagents", "note"}
    assert set(made) == {"subagent_id", "status", "workspace", "status_file", "timeout_seconds", "agent"}
    assert (made["subagent_id"], made["status"], made["agent"], made["timeout_seconds"]) == (
        "x",
        "running",
        "agent:1",
        1800,
    )
    assert Path(made["workspace"]).is_dir()
    assert json.loads(Path(made["status_file"]).read_text())["status"] == "done"
    assert result.final_response in ("a", "a\n\nend")  # the child may end before its parent speaks


@pytest.mark.parametrize(
    ("tasks", "error"),
    [
        ([], "No tasks provided. Must provide at least one task."),
        ([{"task": "x"}] * 33, "Too many tasks: 33 requested but maximum is 32"),
        ([{"task": "x"}, {"what": 1}], "Task at index 1 missing required 'task' field"),
        (
            [{"task": "x", "context_paths": "a"}],
            "Task at index 0 has invalid 'context_paths' type: expected list, got str",
        ),
        (
            [{"task": "x", "context_paths": ["a", 3]}],
            "Task at index 0 has invalid context_paths[1]: expected string, got int",
        ),
        ([{"task": "x", "context_paths": ["nope"]}], "Task at index 0 has non-existent context_path: 'nope'"),
        ([{"task": "a", "subagent_id": "s"}, {"task": "b", "subagent_id": "s"}], "Duplicate subagent_id values: s"),
        (
            [{"task": "x", "subagent_type": "wizard"}],
            "Unknown subagent_type 'wizard' for task 'x'. Available subagent types: explorer",
        ),
    ],
)  # fmt: skip
@pytest.mark.requirement("MASS-21", "MASS-45", "MASS-48", "MASS-53")
async def test_errors_have_their_exact_words_and_spawn_nothing(tasks: list[Any], error: str, tmp_path: Path) -> None:
    script = {"main": [spawn(*tasks), {"text": "end"}]}
    _, events = await tree(script, profiles=[Profile("explorer")], project=tmp_path)
    given = bodies(events, ToolResult, run=0)[0]
    assert json.loads(given.text) == {"success": False, "operation": "spawn_subagents", "error": error}
    assert not given.success
    assert len(bodies(events, RunSpawned)) == 1


@pytest.mark.parametrize(
    ("refine", "error"),
    [
        (
            True,
            "refine needs a team, and 'subagent' is one agent: set subagent_orchestrator in retinue.yaml, "
            "or leave refine out",
        ),
        ("yes", "Invalid 'refine' type: expected boolean, got str"),
    ],
)
@pytest.mark.requirement("MASS-48", "MASS-53")
async def test_refine_is_refused_where_the_subagent_is_no_team(refine: Any, error: str) -> None:
    assert await reply({"task": "x"}, options={"background": True, "refine": False}) != {}
    _, events = await tree({"main": [spawn({"task": "x"}, refine=refine), {"text": "end"}]})
    given = json.loads(bodies(events, ToolResult, run=0)[0].text)
    assert given == {"success": False, "operation": "spawn_subagents", "error": error}
    assert len(bodies(events, RunSpawned)) == 1


async def test_a_subagent_id_that_still_runs_is_refused() -> None:
    script = {
        "main": [
            spawn({"task": "x", "subagent_id": "x"}, background=True),
            spawn({"task": "x", "subagent_id": "x"}),
            {"error": "enough"},
        ],
        "x": [{"hang": True}],
    }
    _, events = await tree(script)
    answer = json.loads(bodies(events, ToolResult, run=0)[1].text)
    expected = "Cannot spawn subagent_id already running: x"
    assert answer == {"success": False, "operation": "spawn_subagents", "error": expected}


@pytest.mark.requirement("MASS-45")
async def test_a_known_type_brings_its_instructions_and_its_skills(tmp_path: Path) -> None:
    asked = []

    class Listening:
        async def complete(self, request, on_delta):  # type: ignore[no-untyped-def]
            asked.append(request)
            from retinue.testing import scripted

            script = {"main": [spawn({"task": "x", "subagent_type": "EXPLORER"}), {"text": "end"}]}
            return await scripted(script).complete(request, on_delta)

    folder = tmp_path / ".agent" / "subagent_types" / "explorer"
    folder.mkdir(parents=True)
    head = "---\nname: explorer\ndescription: It finds.\nskills: [report-writing]\n---\n"
    (folder / "SUBAGENT.md").write_text(f"{head}You find things.\n")
    (tmp_path / "retinue.yaml").write_text("{}\n")
    async with retinue.open(mode="yes", project=tmp_path, config=tmp_path / "retinue.yaml") as r:
        await r.run(Profile("main", model=Listening()), "go")
    assert asked[1].ref.agent == "explorer"
    assert asked[1].system.startswith("You find things.")
    assert "\n- report-writing: " in asked[1].system


PARENT_FILE = "notes/plan.txt"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "notes").mkdir(parents=True)
    (folder / PARENT_FILE).write_text("the plan")
    return folder


async def attempts(project: Path, order: dict[str, Any], *calls: dict[str, Any]) -> list[ToolResult]:
    """Return the results of these calls made by a scratch child."""
    script = {
        "main": [spawn({"task": "x", "subagent_id": "x", **order}), {"text": "end"}],
        "x": [*calls, {"text": "k"}],
    }
    _, events = await tree(script, path=project / ".retinue")
    return bodies(events, ToolResult, run=1)


@pytest.mark.requirement("MASS-19", "MASS-22")
async def test_the_parent_s_workspace_is_readable_unless_told_and_never_writable(project: Path) -> None:
    target = str(project / PARENT_FILE)
    tries = [call("read", path=target), call("write", path=target, content="mine"), call("read", path=PARENT_FILE)]
    read, wrote, relative = await attempts(project, {}, *tries)
    assert (read.success, read.text) == (True, "the plan")
    assert (wrote.success, (project / PARENT_FILE).read_text()) == (False, "the plan")
    assert "outside this run's workspace" in wrote.text
    assert relative.text == "the plan"
    hidden, _, unseen = await attempts(project, {"include_parent_workspace": False}, *tries)
    assert not hidden.success and "outside this run's folders" in hidden.text
    assert not unseen.success


@pytest.mark.requirement("MASS-20")
@pytest.mark.parametrize(("order", "found"), [({}, "peer.md"), ({"include_temp_workspace": False}, "")])
async def test_the_shared_reference_folder_is_readable_unless_told(
    project: Path, order: dict[str, Any], found: str
) -> None:
    script = {
        "main": [spawn({"task": "x", "subagent_id": "x", **order}), {"text": "end"}],
        "x": [
            call("glob", pattern="peer.md"),
            call("write", path="../../snapshots/peer.md", content="x"),
            {"text": "k"},
        ],
    }
    async with retinue.open(project / ".retinue", mode="yes") as r:
        run = await r.spawn(main(script), "go")
        snapshots = project / ".retinue" / "runs" / run.tree / "snapshots"
        snapshots.mkdir(parents=True)
        (snapshots / "peer.md").write_text("peer")
        await run.result()
        looked, wrote = bodies(await r.control.log.read(run.tree), ToolResult, run=1)
    assert looked.text == found
    assert (wrote.success, (snapshots / "peer.md").read_text()) == (False, "peer")


@pytest.mark.requirement("MASS-21")
async def test_context_paths_are_readable_only_and_must_be_the_parent_s_to_give(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("not yours")
    order = {"context_paths": ["notes"], "include_parent_workspace": False}
    path = str(project / PARENT_FILE)
    read, wrote = await attempts(project, order, call("read", path=path), call("write", path=path, content="x"))
    assert (read.text, wrote.success) == ("the plan", False)
    _, events = await tree(
        {"main": [spawn({"task": "x", "context_paths": [str(outside)]}), {"text": "end"}]}, path=project / ".retinue"
    )
    refused = bodies(events, ToolResult, run=0)[0]
    assert not refused.success and "outside this run's folders" in refused.text


@pytest.mark.requirement("MASS-21")
@pytest.mark.parametrize("kind", ["copy", "worktree"])
@pytest.mark.parametrize("runtime", ["inherited", pytest.param("isolated", marks=needs_bubblewrap)])
async def test_a_first_call_that_names_paths_makes_the_workspace(tmp_path: Path, kind: str, runtime: Any) -> None:
    """At depth 1 too, where the child works in a copy of the copy or beside it."""
    project = repository(tmp_path / "p", **{PARENT_FILE: "the plan"})
    task = {"task": "x", "context_paths": [PARENT_FILE]}
    agents = {
        "main": [spawn({**task, "subagent_type": "middle"}), "end"],
        "middle": [spawn(task), "end"],
        "subagent": ["end"],
    }
    for below in ("scratch", kind):
        middle = Profile("middle", workspace=below)  # type: ignore[arg-type]
        _, events = await seen(project, agents, kind=kind, profiles=[middle], runtime=runtime)
        assert len(bodies(events, RunSpawned)) == 3, [result.text for result in bodies(events, ToolResult)]
        [given] = bodies(events, RunSpawned, run=2)[0].context_paths
        assert Path(given).read_text() == "the plan" and not Path(given).is_relative_to(project / "notes")


@pytest.mark.parametrize("tasks", [[{"task": "x"}], [{"task": "x", "context_paths": []}], [{"task": 1}], "x"])
async def test_a_spawn_without_paths_makes_no_workspace(tmp_path: Path, tasks: Any) -> None:
    agents = {"main": [call("spawn_subagents", tasks=tasks), "end"], "*": ["did it"]}
    result, _ = await seen(repository(tmp_path / "p"), agents, kind="copy")
    assert result.status == "done" and not Path(result.workspace).exists()


@pytest.mark.requirement("MASS-21")
async def test_from_python_a_wrong_context_path_names_its_index(project: Path) -> None:
    async with retinue.open(project / ".retinue", mode="yes") as r:
        with pytest.raises(ConfigError, match=r"context_paths\[1\] does not exist: 'nope'"):
            await r.spawn(main({}), Task("x", context_paths=["notes", "nope"]))
        with pytest.raises(ConfigError, match="context_paths must be a list, got str"):
            await r.spawn(main({}), "x", context_paths="notes")
        assert [each.tree for each in await r.control.log.list_trees()] == []


@pytest.mark.requirement("MASS-55")
async def test_a_run_leaves_its_logs_as_files_and_keeps_its_status_current(project: Path) -> None:
    script = {
        "main": [spawn({"task": "look", "subagent_id": "x"}), {"text": "end"}],
        "x": [
            {"thinking": "hm", **call("list_agents"), "usage": {"input_tokens": 3, "output_tokens": 4}},
            {"text": "seen"},
        ],
    }
    async with retinue.open(project / ".retinue", mode="yes") as r:
        run = await r.spawn(main(script), "go")
        await until(run, RunStarted, number=1)
        result = await run.result()
        events = await r.control.log.read(run.tree)
    folder = Path(result.children[0].workspace).parent
    lines = (folder / "live_logs" / "events.ndjson").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [event.seq for event in events if event.run == 1]
    assert (folder / "full_logs" / "events.ndjson").read_text().splitlines() == lines
    status = json.loads((folder / "full_logs" / "status.json").read_text())
    assert (status["state"], status["turns"], status["usage"]["input_tokens"]) == ("done", 2, 3)
    transcript = (folder / "full_logs" / "transcript.md").read_text()
    assert all(
        part in transcript for part in ("# subagent [x]", "> hm", "## Tool call: list_agents", "## Ended: done", "seen")
    )
    metrics = json.loads((folder.parent / "metrics_summary.json").read_text())
    assert (metrics["runs"], metrics["usage"]["output_tokens"]) == (2, 4)
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


async def test_a_long_answer_is_cut_with_a_mark_and_the_whole_is_in_a_file(project: Path) -> None:
    words = "long answer " * 20_000
    script = {"main": [call("subagent_kid", task="x"), {"text": "end"}], "kid": [{"text": words}]}
    result, events = await tree(script, profiles=[Profile("kid")], path=project / ".retinue")
    given = bodies(events, ToolResult, run=0)[0]
    assert len(given.text.encode()) <= 50 * 1024
    assert f"whole text in {given.file}" in given.text
    assert Path(given.file).read_text() == words
    assert result.children[0].final_response == words


async def test_files_that_cannot_be_written_hurt_no_run(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = {"main": [spawn({"task": "x"}), {"text": "got it"}], "*": [{"text": "k"}]}
    async with retinue.open(project / ".retinue", mode="yes") as r:
        (project / ".retinue" / "runs").write_text("in the way")
        result = await r.run(main(script), "go")
    assert (result.status, len(result.children)) == ("done", 1)
    assert "cannot be written any more" in caplog.text
