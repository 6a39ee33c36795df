"""`retinue replay` as a person uses it."""

import json
from pathlib import Path

import pytest

import retinue
from retinue import Limits, Task
from retinue.core.events import TurnStarted
from retinue.testing import ManualClock
from tests.remote.test_a2a import make_profile, supervise
from tests.remote.test_a2a_retinue import make_deep
from tests.supervisor.tree.kit import call, main, spawn
from tests.surfaces.a2a.kit import serve
from tests.surfaces.cli.shell import Project, one_line_error
from tests.surfaces.cli.trees import AGENTS, ANSWER

SUBAGENT = """---
name: looker
description: Looks.
---
You look at things.
{more}"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_a_recorded_tree_plays_again_without_its_model(project: Project) -> None:
    assert project.run("--yes", agents=AGENTS).returncode == 0
    (project.folder / "script.yaml").unlink()
    before = sorted(path for path in project.folder.rglob("*"))
    done = project.retinue("replay")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")
    assert done.stderr.splitlines()[-1].startswith("replayed: 8 runs, ")
    assert done.stderr.endswith("events, no difference\n")
    assert 'explorer [leaf-a] Tool "glob" result:' in done.stderr
    assert sorted(path for path in project.folder.rglob("*")) == before
    said = json.loads(project.retinue("replay", "--json", "--quiet").stdout)
    assert (said["same"], said["runs"], said["differences"], said["ends"]) == (True, 8, [], [])


def test_an_edited_profile_shows_what_it_changes_in_the_request(project: Project) -> None:
    file = project.folder / ".agent/subagent_types/looker/SUBAGENT.md"
    file.parent.mkdir(parents=True)
    file.write_text(SUBAGENT.format(more="Be quick."))
    agents = {
        "main": [spawn({"task": "look", "subagent_type": "looker"}), {"text": "ok"}],
        "looker": [{"text": "seen"}],
    }
    assert project.run("--yes", agents=agents).returncode == 0
    assert project.retinue("replay", "--from-disk").returncode == 0
    file.write_text(SUBAGENT.format(more="Be thorough."))
    assert project.retinue("replay").returncode == 0
    done = project.retinue("replay", "--from-disk", "--quiet")
    assert (done.returncode, done.stdout) == (1, "ok\n")
    shown = done.stderr.splitlines()
    assert "/main/looker-1, turn 1: the request differs from the record" in shown
    assert "-  Be quick." in shown and "+  Be thorough." in shown
    assert shown[-1].endswith("1 of them differs")
    said = json.loads(project.retinue("replay", "--from-disk", "--json", "--quiet").stdout)
    [difference] = said["differences"]
    assert (said["same"], difference["path"], difference["turn"], difference["what"]) == (
        False,
        "/main/looker-1",
        1,
        "request",
    )
    file.unlink()
    gone = project.retinue("replay", "--from-disk", "--quiet")
    assert "looker is played as recorded: unknown profile 'looker'" in gone.stderr


async def test_where_the_record_ends_is_said(project: Project) -> None:
    clock = ManualClock()
    async with retinue.open(project.folder / ".retinue", project=project.folder, clock=clock) as r:
        agents = {"main": [call("glob", pattern="*"), {"hang": True}]}
        run = await r.spawn(main(agents), "go", limits=Limits(seconds=60))
        async for event in run.events():
            if event.body == TurnStarted(2):
                break
        await clock.advance(60)
        assert (await run.result()).status == "timed_out"
    done = project.retinue("replay", "--quiet")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[-2] == "the record of /main ends in turn 2: it timed out"
    said = json.loads(project.retinue("replay", "--json", "--quiet").stdout)
    assert said["ends"] == [{"run": 0, "path": "/main", "turn": 2, "why": "it timed out"}]


def test_what_is_not_there_cannot_be_played(project: Project) -> None:
    assert "there are no runs" in one_line_error(project.retinue("replay", "nothing"))


@pytest.mark.parametrize("is_primary", [False, True])
async def test_runs_at_a_remote_agent_are_played_and_not_compared(project: Project, is_primary: bool) -> None:
    """Also the run below a remote one, whose turns and calls the peer reports."""
    here = supervise(project.folder, state=project.folder / ".retinue", mode="yes")
    async with serve(project.folder.parent / "there", make_deep()) as server, here as supervisor:
        remote = make_profile(server.url)
        local = main({"main": [call("subagent_argocd", task="look"), "It says: {{last_result}}"]}, tools=[remote])
        result = await (await supervisor.spawn(remote if is_primary else local, Task("go"))).result()
    assert result.status == "done", result.error_details
    done = project.retinue("replay", "--quiet")
    assert (done.returncode, done.stdout) == (0, f"{result.final_response}\n"), done.stderr
    assert f"not compared: {'/main' if is_primary else '/main/argocd-1'} ran at a remote agent\n" in done.stderr
    assert f"replayed: {'0 runs' if is_primary else '1 run'}, " in done.stderr
    said = json.loads(project.retinue("replay", "--json", "--quiet").stdout)
    assert said["same"] is True and said["remote"][0]["run"] == (0 if is_primary else 1)
