"""`retinue diff` and `retinue apply` beside a living process: reading asks only the log, and applying uses the
Control of that process."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import retinue
from retinue.control.client import ControlClient
from retinue.core.events import RunWaiting
from retinue.core.profiles import Task
from retinue.core.results import Result
from retinue.log.listing import load_listing
from retinue.supervisor.stored_control import StoredControl
from retinue.surfaces.cli.control_clients import open_runs_control
from retinue.surfaces.cli.live import UnappliedChanges, find_unapplied
from retinue.surfaces.cli.main import main
from retinue.surfaces.cli.output import ProjectLog
from tests.agent.teams.kit import answer, make_members, vote
from tests.control.loopback.kit import WRITE, ServedSupervisor, serve_supervisor
from tests.control.test_contract import KID, SPAWN_KID, first, write
from tests.supervisor.tree.kit import call
from tests.surfaces.cli.shell import Project
from tests.workspaces.kit import repository

EXPLORER = "explorer"


async def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command in a thread, beside the supervisor. Return its exit code and what it printed."""
    capsys.readouterr()
    code = await asyncio.to_thread(main, list(words))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


async def start_conversation(h: ServedSupervisor) -> str:
    run = await h.supervisor.spawn(EXPLORER, Task("write", conversation=True))
    await first(h.supervisor, run.tree, RunWaiting)
    return run.tree


async def test_a_waiting_conversation_is_applied_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    async with serve_supervisor(tmp_path, script={EXPLORER: [WRITE, "end"]}, workspace="copy", mode="yes") as h:
        tree = await start_conversation(h)
        assert "+x" in (await command(capsys, "diff", tree))[1]
        assert await command(capsys, "apply", "--yes", tree) == (0, f"Applied 1 file from {tree}/0.\n", "")
        assert (tmp_path / "a.txt").read_text() == "x"
        assert await h.supervisor.diff(tree) == ""
        assert await command(capsys, "diff", tree) == (0, "", f"{tree}/0 changed no files so far\n")
        code, out, err = await command(capsys, "apply", "--yes", tree)
        assert (code, out, err) == (0, "", f"all changes of {tree}/0 were already applied\n")


async def test_an_applied_change_that_the_agent_takes_back_is_applied_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    read = {"tools": [{"name": "read", "args": {"path": "a.txt"}}]}
    script = {EXPLORER: [read, write("a.txt", "two\n"), "end", read, write("a.txt", "one\n"), "end"]}
    async with serve_supervisor(tmp_path, script=script, workspace="copy", mode="yes") as h:
        tree = await start_conversation(h)
        assert (await command(capsys, "apply", "--yes", tree))[0] == 0
        assert (tmp_path / "a.txt").read_text() == "two\n"
        receipt = await h.supervisor.send(tree, 0, "take it back")
        await first(h.supervisor, tree, RunWaiting, after=receipt.seq)
        assert "+one" in (await command(capsys, "diff", tree))[1]
        assert await command(capsys, "apply", "--yes", tree) == (0, f"Applied 1 file from {tree}/0.\n", "")
    assert (tmp_path / "a.txt").read_text() == "one\n"


async def end_applied_conversation(
    capsys: pytest.CaptureFixture[str], h: ServedSupervisor, *more: str
) -> tuple[Result[Any], list[UnappliedChanges]]:
    """Apply the changes of a conversation with `retinue apply`, send it `more`, and end it. Return its result and the
    changes that `retinue run` would list."""
    tree = await start_conversation(h)
    assert (await command(capsys, "apply", "--yes", tree))[0] == 0
    for text in more:
        receipt = await h.supervisor.send(tree, 0, text)
        await first(h.supervisor, tree, RunWaiting, after=receipt.seq)
    await h.supervisor.end_conversation(tree)
    result = await h.supervisor.wait(tree)
    return result, await find_unapplied(result, h.supervisor)


async def test_a_change_that_was_taken_back_before_the_end_is_left_to_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever `retinue diff` shows is listed, and kept by `retinue gc`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    read = {"tools": [{"name": "read", "args": {"path": "a.txt"}}]}
    script = {EXPLORER: [read, write("a.txt", "two\n"), "end", read, write("a.txt", "one\n"), "end"]}
    async with serve_supervisor(tmp_path, script=script, workspace="copy", mode="yes") as h:
        result, listed = await end_applied_conversation(capsys, h, "take it back")
        name = f"{result.tree}/0"
        assert (tmp_path / "a.txt").read_text() == "two\n" and result.changed_count == 0
        assert listed == [UnappliedChanges(name, 1)]
        changes = await h.supervisor.changes(result.tree)
        assert ([file.path for file in changes.files], changes.count, changes.applied) == (["a.txt"], 1, "")
        assert "+one" in (await command(capsys, "diff", name))[1]
        shown = (await command(capsys, "show", name))[1]
        assert (
            f"\n  changes     not applied: retinue diff {name}\n              to apply them: retinue apply {name}\n"
            in shown
        )
    assert (
        f"kept, because its changes were not applied: {name}" in (await command(capsys, "gc", "--older-than", "0s"))[2]
    )
    async with retinue.open(h.state) as r:
        assert [file.path for file in await r.control.apply(result.tree)] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "one\n"
    assert "Removed 1 tree" in (await command(capsys, "gc", "--older-than", "0s"))[1]


async def test_an_ended_conversation_whose_changes_were_all_applied_has_none_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    async with serve_supervisor(tmp_path, script={EXPLORER: [WRITE, "end"]}, workspace="copy", mode="yes") as h:
        result, listed = await end_applied_conversation(capsys, h)
        assert (result.changed_count, listed) == (1, [])
        [copy] = await h.supervisor.list_copies(result.tree)
        assert (copy.applied, copy.has_unapplied) == ("applied", False)
        assert (await h.supervisor.changes(result.tree)).count == 0
        assert "changes     applied\n" in (await command(capsys, "show", result.tree))[1]
        assert await h.supervisor.apply(result.tree) == ()
    assert "Removed 1 tree" in (await command(capsys, "gc", "--older-than", "0s"))[1]


async def test_changes_that_the_project_already_has_are_applied_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count as applied from then on."""
    monkeypatch.chdir(tmp_path)
    async with serve_supervisor(tmp_path, script={EXPLORER: [WRITE, "end"]}, workspace="copy", mode="yes") as h:
        result = await (await h.supervisor.spawn(EXPLORER, Task("write"))).result()
        (tmp_path / "a.txt").write_text("x")
        name = f"{result.tree}/0"
        applied = f"The project already has the changes of {name}.\n"
        assert await command(capsys, "apply", name) == (0, applied, "")
        assert await find_unapplied(result, h.supervisor) == []


async def test_a_tree_is_shown_while_its_process_does_not_answer(tmp_path: Path) -> None:
    project = Project(tmp_path)
    async with serve_supervisor(tmp_path, script={EXPLORER: [WRITE, "end"]}, workspace="copy", mode="yes") as h:
        tree = await start_conversation(h)
        shown = project.retinue("diff", tree)  # blocks the event loop, so the control server is as good as stopped
        assert (shown.returncode, shown.stderr) == (0, "") and "+x" in shown.stdout
        counted = project.retinue("diff", "--json", tree)
        assert [file["path"] for file in json.loads(counted.stdout)] == ["a.txt"]


async def test_an_ended_run_is_applied_while_the_process_of_its_tree_does_not_answer(tmp_path: Path) -> None:
    project = Project(tmp_path)
    script = {EXPLORER: [SPAWN_KID, "end"], "kid": [WRITE, "end"]}
    async with serve_supervisor(tmp_path, script=script, mode="yes", profiles=[KID]) as h:
        tree = await start_conversation(h)
        done = project.retinue("apply", "--yes", f"{tree}/1")  # blocks the event loop
        assert (done.returncode, done.stdout) == (0, f"Applied 1 file from {tree}/1.\n")
    assert (tmp_path / "a.txt").read_text() == "x"


async def test_the_process_of_a_tree_is_asked_only_about_runs_that_have_not_ended(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path, script={EXPLORER: [SPAWN_KID, "end"], "kid": ["end"]}, profiles=[KID]) as h:
        project = ProjectLog(h.state, h.supervisor.log)
        tree = await load_listing(project.log, await start_conversation(h))
        assert isinstance(await open_runs_control(project, tree, [1]), StoredControl)
        assert isinstance(await open_runs_control(project, tree, [0, 1]), ControlClient)


async def test_a_conversation_without_a_control_server_is_refused_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    async with serve_supervisor(tmp_path, script={EXPLORER: [WRITE, "end"]}, workspace="copy", mode="yes") as h:
        tree = await start_conversation(h)
        for file in (h.state / "control").iterdir():
            file.rename(tmp_path / file.name)
        code, out, err = await command(capsys, "apply", "--yes", tree)
        assert (code, out) == (2, "") and f"{tree}/0 has not ended yet" in err
        await h.supervisor.end_conversation(tree)
        await h.supervisor.wait(tree)
        assert (await command(capsys, "apply", "--yes", tree))[0] == 0
    assert (tmp_path / "a.txt").read_text() == "x"


async def test_a_copy_of_a_copy_is_applied_to_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\n")
    read = {"tools": [{"name": "read", "args": {"path": "a.txt"}}]}
    script = {EXPLORER: [read, SPAWN_KID, "end"], "kid": [write("a.txt", "two\n"), "end"]}
    async with serve_supervisor(tmp_path, script=script, workspace="copy", mode="yes", profiles=[KID]) as h:
        result = await (await h.supervisor.spawn(EXPLORER, Task("write"))).result()
        name = f"{result.tree}/1"
        assert (await h.supervisor.changes(result.tree, 1)).target == str(tmp_path)
        assert await command(capsys, "apply", "--yes", name) == (0, f"Applied 1 file from {name}.\n", "")
    assert (tmp_path / "a.txt").read_text() == "two\n"
    assert Path(result.workspace, "a.txt").read_text() == "one\n"


async def test_a_team_whose_presenter_changed_nothing_has_nothing_to_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The changes of the other members are not its answer."""
    project = repository(tmp_path / "p")
    monkeypatch.chdir(project)
    members, _ = make_members(
        [call("write", path="a.txt", content="of the loser"), answer("A"), vote("agent2")],
        [answer("B"), vote("agent2"), "B, presented"],
    )
    before = (project / "a.txt").read_text()
    async with retinue.open(project / ".retinue", mode="yes") as r:
        team = retinue.Team("t", members=members, workspace="copy", strategy="winner_present")
        result = await (await r.spawn(team, "go")).result()
        assert result.changed_count == 0
        for words in (["diff", result.tree], ["apply", "--yes", result.tree]):
            code, out, _ = await command(capsys, *words)
            assert (code, out) == (2, ""), words
    assert (project / "a.txt").read_text() == before


async def test_a_damaged_record_of_one_run_hides_nothing_of_the_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = {EXPLORER: [SPAWN_KID, SPAWN_KID, SPAWN_KID, "end"], "kid": [WRITE, "end"]}
    async with serve_supervisor(tmp_path, script=script, mode="yes", profiles=[KID]) as h:
        result = await (await h.supervisor.spawn(EXPLORER, Task("write"))).result()
        names = [f"{result.tree}/{run}" for run in range(4)]
        assert (await command(capsys, "apply", "--yes", names[1]))[0] == 0
        record = h.state / "runs" / result.tree / "3/changes.json"
        record.write_text("{")
        damaged = f"cannot read {record}: "
        assert "changes     applied to" in (await command(capsys, "show", names[1]))[1]
        assert f"changes     not applied: retinue diff {names[2]}" in (await command(capsys, "show", names[2]))[1]
        code, out, _ = await command(capsys, "show", names[3])
        assert code == 0 and f"changes     {damaged}" in out
        code, out, err = await command(capsys, "apply", "--yes", names[0])
        assert (code, out) == (2, "") and damaged in err, "a run is not left out"
        found = await find_unapplied(result, h.supervisor)
        assert found == [UnappliedChanges(name, 1) for name in names[2:]]
        unreadable = msgspec.structs.replace(result.children[1], tree="x" * 300)
        assert await find_unapplied(unreadable, h.supervisor) == [UnappliedChanges(f"{unreadable.tree}/2", 1)]


def test_the_answer_is_printed_also_when_the_log_is_lost(project: Project) -> None:
    lose = {"tools": [{"name": "shell", "args": {"command": f"rm -rf '{project.folder}/.retinue/logs'"}}]}
    agents = {"main": [write("a.txt", "two\n"), lose, {"text": "the answer"}]}
    done = project.run("--yes", "--workspace", "copy", agents=agents)
    assert done.stdout == "the answer\n"
    assert "1 file changed" in done.stderr
