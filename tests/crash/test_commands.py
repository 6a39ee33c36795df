"""`resume` and `continue` as a person meets them: what they say, what they refuse, and through another process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import apsw
import pytest

import retinue
from retinue import Profile
from retinue.build.logs import open_log_reader, take_over_state
from retinue.surfaces.cli.gc import remove_old_trees
from retinue.testing import scripted
from tests.surfaces.cli.shell import Project, environment, one_line_error, read_until

LOOK = {"task": "look", "subagent_id": "x"}
TWO = {
    "main": [
        {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "look", "subagent_id": "x"}]}}]},
        "end",
    ],
    "x": ["x has looked"],
}


def interrupted(project: Project) -> str:
    """Interrupt a run while its child waits for its model."""
    waiting = {**TWO, "x": [{"text": "x has looked", "delay": 3600}]}
    died = project.run("--yes", agents=waiting, RETINUE_FAILPOINT="turn.started:2")
    assert died.returncode == -signal.SIGKILL
    project.script(TWO)
    return str(project.rows()[0]["tree"])


def test_ps_and_show_say_how_to_go_on(project: Project) -> None:
    tree = interrupted(project)
    assert f"\n{tree} was interrupted: retinue resume {tree}\n" in project.retinue("ps").stdout
    assert f"retinue resume {tree}" in project.retinue("show").stdout
    error = one_line_error(project.retinue("continue", "x", "go on"))
    assert error == f"{tree} was interrupted: `retinue resume {tree}` resumes it"
    done = project.retinue("resume", tree[:-1], "--json")
    result = json.loads(done.stdout)
    assert (result["status"], result["final_response"], result["children"][0]["status"]) == ("done", "end", "done")
    assert f"{tree} continues after event " in done.stderr
    assert "○ subagent [x] resumed" in done.stderr
    assert "spawned" not in done.stderr, "what was shown before is not shown again"
    assert "was interrupted" not in project.retinue("ps").stdout


def test_a_run_with_the_name_of_a_client_is_resumed(project: Project) -> None:
    profile = project.folder / ".agent/subagent_types/mcp-client/SUBAGENT.md"
    profile.parent.mkdir(parents=True)
    profile.write_text("---\nname: mcp-client\ndescription: Calls MCP servers\n---\nCall them.\n")
    agents = {"mcp-client": ["called"]}
    died = project.run("--yes", "--profile", "mcp-client", agents=agents, RETINUE_FAILPOINT="before-run.ended")
    assert died.returncode == -signal.SIGKILL
    assert "was interrupted: retinue resume " in project.retinue("ps").stdout
    done = project.retinue("resume")
    assert (done.returncode, done.stdout) == (0, "called\n"), done.stderr


def test_what_cannot_be_resumed_is_said_in_one_line(project: Project) -> None:
    assert "there are no runs" in one_line_error(project.retinue("resume", "nothing"))
    with project.running("run", "go", "--model", project.script({"main": [{"hang": True}]}), quick=False) as process:
        tree = ""
        while not tree:
            tree = next((row["tree"] for row in project.rows()), "")
        error = one_line_error(project.retinue("resume", tree))
        assert error == f"{tree} is not interrupted: process {process.pid} runs it (`retinue tail -f {tree}`)"
        error = one_line_error(project.retinue("continue", tree, "more"))
        assert error == f"{tree}/0 is at work: `retinue send {tree}/0 TEXT` tells it something"
    (project.folder / "script.yaml").unlink()
    assert "script.yaml" in one_line_error(project.retinue("resume", tree))
    assert project.rows()[0]["state"] == "interrupted"


async def test_what_was_made_in_python_is_resumed_in_python(project: Project) -> None:
    code = (
        "import asyncio, retinue\n"
        "from retinue.testing import scripted\n"
        "@retinue.tool\n"
        "def note(text: str) -> str: return text\n"
        "profile = retinue.Profile('clerk', tools=[note], model=scripted({'clerk': [{'text': 'done', 'delay': 9}]}))\n"
        "retinue.run_sync(profile, 'go', path='.retinue', mode='yes')\n"
    )
    died = subprocess.run(
        [sys.executable, "-c", code], cwd=project.folder, env=environment(RETINUE_FAILPOINT="turn.started"), check=False
    )
    assert died.returncode == -signal.SIGKILL
    tree = project.rows()[0]["tree"]
    error = one_line_error(project.retinue("resume"))
    assert error.startswith(f"{tree}/0 cannot be resumed or continued: ") and "r.resume(tree, profiles=[...])" in error

    @retinue.tool
    def note(text: str) -> str:
        """Notes."""
        return text

    profile = Profile("clerk", tools=[note], model=scripted({"clerk": ["done"]}))
    async with retinue.open(project.folder / ".retinue") as other, retinue.open(project.folder / ".retinue") as r:
        with pytest.raises(retinue.RetinueError, match="is being written by process"):
            await r.resume(tree, profiles=[profile])
        run = await other.resume(tree, profiles=[profile])
        assert (await run.result()).final_response == "done"


def test_a_primary_is_continued_in_a_new_tree(project: Project) -> None:
    first = project.run("--yes", agents=TWO)
    assert first.stdout == "end\n"
    tree = project.rows()[0]["tree"]
    done = project.retinue("continue", tree, "and then?", "--yes", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["tree"] != tree) == (0, True)
    rows = {(row["tree"], row["run"]): row["continues"] for row in project.rows("--all")}
    assert rows[result["tree"], 0] == f"{tree}/0"
    assert f"continues   {tree}/0" in project.retinue("show", result["tree"]).stdout


def test_a_subagent_is_continued_in_its_tree_and_its_name_means_the_newest(project: Project) -> None:
    project.run("--yes", agents=TWO)
    tree = project.rows()[0]["tree"]
    for number in (2, 3):
        done = project.retinue("continue", "x", f"again {number}", "--json")
        result = json.loads(done.stdout)
        assert (result["tree"], result["run"], result["status"]) == (tree, number, "done")
        assert result["final_response"] == "x has looked"
    assert project.rows()[-1]["continues"] == f"{tree}/2"
    assert {row["state"] for row in project.rows()} == {"done"}
    seqs = [event["seq"] for event in project.events(tree)]
    assert seqs == list(range(1, len(seqs) + 1))


def test_a_file_that_is_held_is_written_by_its_holder(project: Project) -> None:
    tree = interrupted(project)
    finished = project.run("--yes", agents=TWO)
    assert finished.stdout == "end\n"
    done_tree = project.rows()[0]["tree"]
    slow = {"main": [{"tools": [{"name": "list_agents"}]}, {"hang": True}]}
    with project.running(
        "run", "go", "--model", project.script(slow, name="slow.yaml"), "--yes", quick=False
    ) as process:
        read_until(process.stderr, "list_agents")
        refused = one_line_error(project.retinue("resume", tree))
        assert refused.endswith(
            f"process {process.pid} writes the log of {tree} and asks nobody, since it was started with --yes: "
            "add --yes to continue there all the same, or wait until it has ended"
        )
        done = project.retinue("resume", tree, "--yes")
        assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
        assert f"{tree} runs in process {process.pid}, which writes its log" in done.stderr
        refused = one_line_error(project.retinue("continue", f"{done_tree}/1", "again", "--max-tokens", "5"))
        assert refused.endswith("and runs it: its limits cannot be changed from here")
        assert "asks nobody" in one_line_error(project.retinue("continue", f"{done_tree}/1", "again"))
        done = project.retinue("continue", f"{done_tree}/1", "again", "--yes")
        assert (done.returncode, done.stdout) == (0, "x has looked\n"), done.stderr
        assert process.poll() is None


async def test_gc_keeps_what_can_go_on(tmp_path: Path) -> None:
    state = tmp_path / ".retinue"
    profile = Profile("p", model=scripted({"p": ["one"]}))
    async with retinue.open(state) as r:
        old = await r.run(profile, "go")
        await (await r.continue_run(old, "more", profiles=[profile])).result()
    later = time.time() + 3600
    report = await remove_old_trees(open_log_reader(state), state, before=later, dry_run=True)
    assert len(report.removed) == 2 and report.interrupted == []
    db = apsw.Connection(str(state / "logs/0001.db"))
    db.execute("DELETE FROM batches WHERE id = (SELECT max(id) FROM batches)")  # the second tree never got its ending
    db.close()
    await take_over_state(state)  # makes the index again from what is left
    report = await remove_old_trees(open_log_reader(state), state, before=later)
    assert len(report.interrupted) == 1 and report.removed == []
    report = await remove_old_trees(open_log_reader(state), state, before=later, interrupted=True)
    assert len(report.removed) == 2
