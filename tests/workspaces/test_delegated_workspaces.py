"""The workspace of a delegated run is the copy of the requested folder, or the requester's folder stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retinue import Team
from retinue.control.delegation_request import WatcherSettings
from retinue.control.outbox_watcher import OutboxWatcher
from retinue.core.control import Control, RunHandle, SpawnBelow
from retinue.core.errors import ConfigError
from retinue.core.events import RunEnded
from retinue.core.limits import Limits, Timeouts
from retinue.core.profiles import Task
from retinue.workspaces.delegated import UNUSED
from retinue.workspaces.run_folders import RunFolders
from tests.gates import until
from tests.remote.adapters import SCRIPTED, ScriptedAgents
from tests.remote.outbox.kit import answer, ask, explorer, hashes
from tests.remote.scripted_peer import PeerRun, ScriptedPeer
from tests.sandbox.hosts import host
from tests.supervisor.tree.kit import call


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "deep").mkdir(parents=True)
    (folder / "notes.txt").write_text("one\n")
    (folder / "deep" / "old").write_text("old")
    return folder


async def test_a_request_for_a_team_is_refused_and_the_hosts_project_stays(work: Path) -> None:
    before = hashes(work)
    team = Team("reviewers", members=[explorer(), explorer()])
    async with host(work, profiles=[team], runtime="inherited") as there:  # the project has no file in it
        ask(there.outbox, "a", workspace=str(work), profile="reviewers")
        said = await answer(there.outbox, "a")
        assert said["status"] == "failed" and "'reviewers' has no scratch workspace" in said["error_details"]
        assert there.trees == [] and (there.folder / "project").is_dir()
    assert hashes(work) == before


def _plant_nothing(folders: RunFolders) -> None:
    """Leave the workspace to the run."""


def _plant_empty_folder(folders: RunFolders) -> None:
    Path(folders.path).mkdir(parents=True)


def _plant_file(folders: RunFolders) -> None:
    _plant_empty_folder(folders)
    Path(folders.path, "notes.txt").write_text("planted")


async def test_files_that_could_not_be_moved_to_the_workspace_are_not_removed(work: Path) -> None:
    before = hashes(work)
    profile = explorer([call("shell", command="rm -rf *; echo made > made"), {"text": "over"}])
    async with host(work, profiles=[profile], runtime="inherited", begun=_plant_file) as there:
        ask(there.outbox, "a", workspace=str(work))
        said = await answer(there.outbox, "a")
        assert (said["status"], said["warning"]) == ("failed", UNUSED)
    assert hashes(work) == before


@pytest.mark.parametrize("plant", [_plant_nothing, _plant_empty_folder])
async def test_a_run_killed_before_its_first_step_removes_no_files(
    work: Path, plant: Callable[[RunFolders], None]
) -> None:
    before = hashes(work)

    def kill(folders: RunFolders) -> None:
        plant(folders)
        there.supervisor.trees[Path(folders.own).parent.name].kill()

    async with host(work, profiles=[explorer([{"hang": True}])], runtime="inherited", begun=kill) as there:
        ask(there.outbox, "a", workspace=str(work))
        said = await answer(there.outbox, "a")
        assert (said["status"], said["warning"]) == ("cancelled", UNUSED)
    assert hashes(work) == before


async def test_a_run_cancelled_before_its_first_call_removes_no_files(work: Path) -> None:
    before = hashes(work)
    async with host(work, profiles=[explorer([{"hang": True}])], runtime="inherited") as there:
        ask(there.outbox, "a", workspace=str(work))
        await until(lambda: bool(there.trees))
        await there.supervisor.cancel(there.trees[0])
        assert (await answer(there.outbox, "a"))["status"] == "cancelled"
    assert hashes(work) == before


async def test_a_run_has_its_files_before_its_first_reply(work: Path) -> None:
    """A child can be given them by the first call, and a process that resumes the run finds them."""
    async with host(work, profiles=[explorer([{"hang": True}])], runtime="inherited") as there:
        ask(there.outbox, "a", workspace=str(work))
        await until(lambda: bool(there.trees))
        tree = there.trees[0]
        await until(lambda: there.supervisor.trees[tree].view.runs[0].turns == 1)
        workspace = Path((await there.supervisor.describe_run(tree)).workspace)
        assert ((workspace / "notes.txt").read_text(), (workspace / "deep" / "old").read_text()) == ("one\n", "old")
        await there.supervisor.cancel(tree)
        await answer(there.outbox, "a")


@pytest.mark.parametrize("has_files", [True, False])
async def test_a_run_that_needs_no_workspace_changes_nothing(work: Path, has_files: bool) -> None:
    folder = work if has_files else work / "empty"
    folder.mkdir(exist_ok=True)
    before = hashes(work)
    async with host(work, profiles=[explorer([{"text": "nothing to do"}])], runtime="inherited") as there:
        ask(there.outbox, "a", workspace=str(folder))
        said = await answer(there.outbox, "a")
        assert (said["final_response"], said.get("warning", "")) == ("nothing to do", "")
    assert hashes(work) == before


async def test_a_request_for_an_agent_that_is_elsewhere_changes_no_files(work: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(RunEnded("done", "from elsewhere", 0))

    before = hashes(work)
    agents = ScriptedAgents(ScriptedPeer(script))
    async with host(work, profiles=[SCRIPTED], runtime="inherited", agents=agents) as there:
        ask(there.outbox, "a", workspace=str(work))
        said = await answer(there.outbox, "a")
        assert (said["final_response"], said["warning"]) == ("from elsewhere", UNUSED)
    assert hashes(work) == before


class LateControl:
    """A Control whose `spawn` returns when the run has ended, as over a slow connection."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def __getattr__(self, name: str) -> Any:
        return getattr(self._control, name)

    async def spawn(self, *args: Any, **options: Any) -> RunHandle:
        run = await self._control.spawn(*args, **options)
        await run.result()
        return run


async def test_a_run_finds_the_copied_files_however_late_its_spawn_is_answered(work: Path, tmp_path: Path) -> None:
    profile = explorer(
        [call("shell", command="cat notes.txt; rm -r deep; echo two > added"), {"text": "{{last_result}}"}]
    )
    outbox = tmp_path / "box"
    outbox.mkdir()
    async with host(work, profiles=[profile], runtime="inherited") as there:
        hosting = WatcherSettings(
            outbox=outbox,
            roots=[work],
            project=tmp_path / "other",
            state=tmp_path / "other",
            find=lambda _: profile,
            limits=Limits(),
            timeouts=Timeouts(),
        )
        watcher: Any = OutboxWatcher(LateControl(there.supervisor), hosting)  # type: ignore[arg-type]
        watching = asyncio.create_task(watcher.watch())
        ask(outbox, "a", workspace=str(work))
        said = await answer(outbox, "a")
        watching.cancel()
        await asyncio.wait([watching])
        await watcher.close()
    assert (said["status"], said.get("warning", ""), said["final_response"].strip()) == ("done", "", "one")
    assert {path.name for path in work.iterdir()} == {"notes.txt", "added"}


@pytest.mark.parametrize("kind", ["shared", "copy"])
async def test_only_a_scratch_workspace_of_a_primary_starts_from_a_folder(work: Path, kind: Any) -> None:
    profile = explorer([{"hang": True}])
    async with host(work, profiles=[profile], runtime="inherited") as there:
        with pytest.raises(ConfigError, match="no scratch workspace"):
            await there.supervisor.spawn(replace(profile, workspace=kind), Task("go"), starts_from=str(work))
        assert list(there.supervisor.trees) == []
        run = await there.supervisor.spawn(profile, Task("go"))
        with pytest.raises(ConfigError, match="only the workspace of a primary"):
            await there.supervisor.spawn(profile, Task("go"), below=SpawnBelow(tree=run.tree), starts_from=str(work))
    assert (work / "notes.txt").exists()
