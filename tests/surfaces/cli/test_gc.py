"""Removal: old trees go, their lines and their folders; what lives, or is held, stays; a crash loses nothing."""

import asyncio
import json
import os
import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apsw
import pytest

import retinue
from retinue import Profile
from retinue.core.changes import RunCopy
from retinue.core.events import Event, Gap, TurnStarted
from retinue.log import schema
from retinue.log.sqlite_reader import SqliteReader, open_log_file
from retinue.supervisor.stored_control import StoredControl
from retinue.surfaces.cli.gc import remove_old_trees
from retinue.testing import ManualClock, scripted
from tests.log.kit import write_files
from tests.supervisor.tree.kit import until
from tests.surfaces.cli.shell import BOUND_BY_MODES, Project, read_until
from tests.surfaces.cli.test_usage import DAY, spend

HANGING = {"main": [{"tools": [{"name": "list_agents", "args": {}}]}, {"hang": True}]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def gc(project: Project, *arguments: str) -> dict[str, Any]:
    done = project.retinue("gc", "--json", *arguments)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def trees(project: Project) -> set[str]:
    return {row["tree"] for row in project.rows("--all")}


def folder(project: Project, tree: str) -> Path:
    made = project.folder / ".retinue/runs" / tree / "1/workspace"
    made.mkdir(parents=True, exist_ok=True)
    (made / "result.txt").write_text("x" * 5000)
    return made


async def test_old_trees_go_and_new_ones_stay(project: Project) -> None:
    old, new = await spend(project, age=40 * DAY), await spend(project, age=20 * DAY)
    folders = folder(project, old), folder(project, new)
    before = project.events(new)
    assert gc(project, "--dry-run")["removed"] == [old]
    assert "Would remove 1 tree older than 30 days:\n" + old in project.retinue("gc", "--dry-run").stdout
    assert trees(project) == {old, new} and folders[0].exists()
    report = gc(project)
    assert (report["removed"], report["held"], report["problems"]) == ([old], [], [])
    assert report["freed_bytes"] >= 5000
    assert trees(project) == {new}
    assert not (project.folder / ".retinue/runs" / old).exists() and folders[1].exists()
    assert project.events(new) == before
    assert project.retinue("gc").stdout == "Nothing here is older than 30 days.\n"
    unrelated = "orchestrator: {coordination: {subagent_types: [nobody]}}\n"  # a warning that is not for `gc`
    (project.folder / "retinue.yaml").write_text(f"retention_days: 10\n{unrelated}")
    assert gc(project, "--older-than", "25d")["removed"] == []
    untrusted = project.retinue("gc")
    assert untrusted.stdout == "Nothing here is older than 30 days.\n" and "retention_days: 10" in untrusted.stderr
    assert "nobody" not in untrusted.stderr
    assert project.retinue("trust", "--yes").returncode == 0
    assert project.retinue("gc").stdout.startswith("Removed 1 tree older than 10 days; ")
    assert trees(project) == set()


async def test_trees_of_one_commit_are_taken_apart(project: Project) -> None:
    """Rows of the log hold lines of many trees; the log file is one, and is used again afterwards."""
    state, clock = project.folder / ".retinue", ManualClock(wall=1e9)
    model = scripted({"quick": [{"text": "end"}], "slow": [{"text": "slow", "delay": 50}]}, clock=clock)
    async with retinue.open(state, clock=clock) as r:
        runs = [await r.spawn(Profile(name, model=model), "go") for name in ("quick", "slow", "quick")]
        await until(runs[1], TurnStarted)
        for run in (runs[0], runs[2]):
            await run.result()
        await clock.advance(60)
        await runs[1].result()
    log = SqliteReader(state / "logs")
    events = await log.read(runs[1].tree)
    report = await remove_old_trees(log, state, before=1e9 + 30)
    assert sorted(report.removed) == sorted([runs[0].tree, runs[2].tree])
    assert [stored.tree for stored in await log.list_trees()] == [runs[1].tree]
    assert await log.read(runs[1].tree) == events
    async with retinue.open(state) as r:
        again = await r.run(Profile("main", model=model), "go")
    assert {stored.tree for stored in await log.list_trees()} == {runs[1].tree, again.tree}
    assert [file.name for file in log.list_files()] == ["0001.db"]


async def test_what_lives_is_never_touched_and_a_held_file_is_told_of(project: Project) -> None:
    old = await spend(project, age=40 * DAY)
    with project.running("run", "wait", "--model", project.script(HANGING)) as process:
        assert process.stderr is not None
        read_until(process.stderr, 'Tool "list_agents" result')
        live = trees(project)
        done = project.retinue("gc", "--older-than", "1d", "--json")
        assert json.loads(done.stdout)["removed"] == []
        assert "0001.db holds old trees and is being written by another process: left for later" in done.stderr
        assert done.returncode == 0
        assert trees(project) == live
        done = project.retinue("gc", "--older-than", "0s")
        assert trees(project) == live
    report = gc(project, "--older-than", "1d")
    assert report["removed"] == [old]


async def test_space_is_given_back(project: Project) -> None:
    state = project.folder / ".retinue"
    clock = ManualClock(wall=1e9)
    text = random.Random(1).randbytes(1_000_000).hex()  # which the log cannot make much smaller
    model = scripted({"main": [{"text": text}]})
    async with retinue.open(state, clock=clock) as r:
        await r.run(Profile("main", model=model), "go")
    await spend(project)
    log = SqliteReader(state / "logs")
    [file] = log.list_files()
    assert file.stat().st_size > 2_000_000
    with open_log_file(file) as db:
        packed: bytes = db.execute("SELECT lines FROM batches ORDER BY length(lines) DESC LIMIT 1").get
    assert packed[-20:] in file.read_bytes()
    report = await remove_old_trees(log, state, before=1e9 + 1)
    assert len(report.removed) == 1
    assert file.stat().st_size < 200_000
    assert packed[-20:] not in file.read_bytes()
    assert report.freed_bytes > 1_800_000


class CancellingControl(StoredControl):
    """The Control of stored trees, which cancels its task once the removal of a folder has begun."""

    asked = 0

    async def list_copies(self, tree: str, run: int | None = None) -> list[RunCopy]:
        self.asked += 1
        task = asyncio.current_task()
        if self.asked == 2 and task is not None:  # the last step before the removal
            asyncio.get_running_loop().call_soon(task.cancel)
        return []


async def test_a_cancelled_removal_holds_the_log_until_the_folder_is_gone(project: Project) -> None:
    state = project.folder / ".retinue"
    old = await spend(project, age=40 * DAY)
    made = folder(project, old)
    for number in range(2000):  # without the wait, their removal ends long after the cancellation
        (made / str(number)).touch()
    log = SqliteReader(state / "logs")
    control = CancellingControl(log, str(state), project=str(project.folder))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(remove_old_trees(log, state, before=1.7e9 * 10, changes=control))
    assert control.asked == 2 and not (state / "runs" / old).exists()
    assert [stored.tree for stored in await log.list_trees()] == [old]
    assert gc(project)["removed"] == [old]


async def test_a_crash_in_the_middle_leaves_a_whole_log(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders go first; until the transaction ends every tree is still there, and the next gc goes on."""
    state = project.folder / ".retinue"
    old, new = await spend(project, age=40 * DAY), await spend(project)
    gone = folder(project, old)
    delete_trees = schema.delete_trees

    class Crash(BaseException):
        pass

    def crash(db: apsw.Connection, trees: Iterable[str]) -> None:
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM batches")
        raise Crash

    monkeypatch.setattr(schema, "delete_trees", crash)
    with pytest.raises(Crash):
        await remove_old_trees(SqliteReader(state / "logs"), state, before=1.7e9 * 10)
    assert trees(project) == {old, new} and not gone.exists()
    monkeypatch.setattr(schema, "delete_trees", delete_trees)
    assert gc(project)["removed"] == [old]
    assert trees(project) == {new}


async def test_a_reader_that_looks_meanwhile_is_not_disturbed(project: Project) -> None:
    state = project.folder / ".retinue"
    old, new = await spend(project, age=40 * DAY), await spend(project)
    with open_log_file(state / "logs/0001.db") as db:
        reading = schema.read_tree(db, old, after=0)
        first = next(reading)
        assert gc(project)["removed"] == [old]
        assert len([first, *reading]) > 10
    assert trees(project) == {new}
    assert gc(project, "--older-than", "0s")["removed"] == [new]


def age_folder(project: Project, tree: str, *, days: float) -> Path:
    """Set the time of the last change of a tree's folder and of everything in it, and return the folder."""
    top, then = project.folder / ".retinue/runs" / tree, time.time() - days * DAY
    for path in (*top.rglob("*"), top):
        os.utime(path, (then, then), follow_symlinks=False)
    return top


async def test_folders_whose_events_are_lost_go_when_they_are_as_old_as_a_tree_that_goes(project: Project) -> None:
    known = await spend(project, age=20 * DAY)
    folder(project, known)
    for name in ("lost1", "lost2", "lost3"):
        folder(project, name)
    kept, old = age_folder(project, known, days=99), age_folder(project, "lost1", days=31)
    new, changed = age_folder(project, "lost2", days=29), age_folder(project, "lost3", days=99)
    (changed / "1/workspace/result.txt").write_text("changed today")
    dry = project.retinue("gc", "--dry-run").stdout
    assert dry == f"Would remove 1 folder without events, unchanged for 30 days:\n{old}\n"
    assert old.exists()
    report = gc(project)
    assert (report["leftovers"], report["removed"], report["problems"]) == ([str(old)], [], [])
    assert report["freed_bytes"] >= 5000 and not old.exists()
    assert kept.exists() and new.exists() and changed.exists()
    assert project.retinue("gc").stdout == "Nothing here is older than 30 days.\n"
    said = project.retinue("gc", "--older-than", "10d").stdout
    assert said.startswith("Removed 1 tree older than 10 days and 1 folder without events, unchanged for 10 days; ")
    assert not kept.exists() and not new.exists() and changed.exists()


async def test_a_folder_of_the_last_hour_may_be_that_of_a_run_that_starts(project: Project) -> None:
    await spend(project)
    for name, hours in (("starts", 0.9), ("lost", 1.1)):
        folder(project, name)
        age_folder(project, name, days=hours / 24)
    lost = project.folder / ".retinue/runs/lost"
    assert gc(project, "--older-than", "0s")["leftovers"] == [str(lost)]
    assert (project.folder / ".retinue/runs/starts").exists() and not lost.exists()


@pytest.mark.parametrize("header", ["not a database", "of another version"])
async def test_no_folder_counts_as_lost_while_a_log_cannot_be_read(project: Project, header: str) -> None:
    await spend(project)
    folder(project, "lost")
    made, other = age_folder(project, "lost", days=99), project.folder / ".retinue/logs/0009.db"
    if header == "not a database":
        other.write_text(header)
    else:
        db = apsw.Connection(str(other))
        db.execute(f"CREATE TABLE x (y); PRAGMA application_id = {schema.APPLICATION_ID}; PRAGMA user_version = 99")
        db.close()
    assert gc(project)["leftovers"] == [] and made.exists()
    other.unlink()
    assert gc(project)["leftovers"] == [str(made)]


async def test_changes_that_nobody_applied_keep_a_folder_whose_events_are_lost(project: Project) -> None:
    write = {"tools": [{"name": "write", "args": {"path": "a.txt", "content": "x"}}]}
    assert project.run("--yes", "--workspace", "copy", agents={"main": [write, "end"]}).returncode == 0
    [tree] = trees(project)
    shutil.rmtree(project.folder / ".retinue/logs")
    made = age_folder(project, tree, days=99)
    done = project.retinue("gc")
    assert done.stdout == "Nothing more here is older than 30 days.\n" and made.exists()
    assert f"kept, because changes in it were not applied, though its events are lost: {made} (take" in done.stderr
    assert gc(project)["kept_leftovers"] == [str(made)]
    assert gc(project, "--force")["leftovers"] == [str(made)] and not made.exists()


async def test_a_link_or_a_file_among_the_folders_is_left(project: Project) -> None:
    known = await spend(project)
    folder(project, "real")
    runs = project.folder / ".retinue/runs"
    (runs / "link").symlink_to("real")
    (runs / "file").touch()
    (runs / "Not-Ours").mkdir()
    age_folder(project, ".", days=99)
    assert gc(project)["leftovers"] == [str(runs / "real")]
    assert {path.name for path in runs.iterdir()} == {known, "link", "file", "Not-Ours"}


async def test_a_tree_whose_name_is_a_path_leads_nowhere(project: Project) -> None:
    state = project.folder / ".retinue"
    await spend(project, age=40 * DAY)
    precious = state / "precious"
    precious.mkdir()
    await write_files(state, Event(1, "../precious", 0, "/main", "main", 1.0, Gap(1, "")))
    report = await remove_old_trees(SqliteReader(state / "logs"), state, before=1e9, interrupted=True)
    assert report.removed == ["../precious"]
    assert precious.exists()


async def test_what_cannot_be_removed_is_said_and_kept(project: Project) -> None:
    old = await spend(project, age=40 * DAY)
    made = folder(project, old)
    project.prefix = BOUND_BY_MODES
    if BOUND_BY_MODES and shutil.which(BOUND_BY_MODES[0]) is None:
        pytest.skip("setpriv is not there")
    made.chmod(0o500)
    try:
        done = project.retinue("gc")
        assert done.returncode == 1
        assert f"cannot remove {project.folder}/.retinue/runs/{old}" in done.stderr
        assert trees(project) == {old}
    finally:
        made.chmod(0o700)
    foreign = project.folder / ".retinue/logs/0009.db"
    foreign.write_bytes(b"not a database")
    done = project.retinue("gc")
    assert done.returncode == 1 and "0009.db" in done.stderr
    assert trees(project) == set()
    assert foreign.read_bytes() == b"not a database"


@pytest.mark.parametrize("version", [1, 99])
async def test_a_log_of_another_version_is_left_in_one_line_and_is_no_failure(project: Project, version: int) -> None:
    old = await spend(project, age=40 * DAY)
    other = project.folder / ".retinue/logs/0009.db"
    db = apsw.Connection(str(other))
    db.execute(f"CREATE TABLE x (y); PRAGMA application_id = {schema.APPLICATION_ID}; PRAGMA user_version = {version}")
    db.close()
    before = other.read_bytes()
    done = project.retinue("gc")
    assert done.returncode == 0 and done.stdout.startswith("Removed 1 tree")
    [said] = done.stderr.splitlines()
    assert f"0009.db was written by {'an older' if version == 1 else 'a newer'} retinue" in said and "left" in said
    assert other.read_bytes() == before and old not in trees(project)
    assert [str(other) in line for line in gc(project)["skipped"]] == [True]
