"""Workspaces and sandboxes are made by the first call that needs them, from the source as it is then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import retinue
from retinue import Profile
from retinue.core.events import RunEnded, ToolResult
from retinue.core.messages import Call, Reply
from retinue.testing import scripted
from tests.supervisor.tree.kit import bodies, call, main, spawn
from tests.workspaces.kit import repository, shell


async def test_a_run_that_only_talks_makes_no_copy(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    profile = Profile("main", model=scripted({"main": [call("list_agents"), {"text": "x"}]}), workspace="worktree")
    async with retinue.open(project / ".retinue", project=project, mode="yes") as r:
        result = await r.run(profile, "go")
    assert (result.status, result.changed_files) == ("done", ())
    assert not (project / ".retinue" / "runs").exists()


async def test_a_copy_is_of_the_project_as_it_is_at_the_first_call(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")

    class Busy:
        """Changes the project while it thinks."""

        name = "busy"

        async def complete(self, request: Any, on_delta: Any) -> Reply:
            if request.turn == 1:
                (project / "late.txt").write_text("in time")
                return Reply("", (Call("c1", "read", {"path": "late.txt"}),))
            (project / "late.txt").write_text("too late")
            return Reply("", (Call("c2", "read", {"path": "late.txt"}),)) if request.turn == 2 else Reply("done")

    async with retinue.open(project / ".retinue", project=project, mode="yes") as r:
        run = await r.spawn(Profile("main", model=Busy(), workspace="copy"), "go")
        events = [event async for event in run.events()]
    assert [body.text for body in bodies(events, ToolResult)] == ["in time", "in time"]


async def test_a_child_finds_the_copy_of_a_parent_that_has_made_no_call(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    (project / "note.txt").write_text("from the project")
    agents = {"main": [spawn({"task": "look"}), {"text": "x"}], "subagent": [shell("cat ../../0/workspace/note.txt")]}
    async with retinue.open(project / ".retinue", project=project, mode="yes") as r:
        run = await r.spawn(main(agents, workspace="copy"), "go")
        events = [event async for event in run.events()]
    [looked] = [body for body in bodies(events, ToolResult) if body.name == "shell"]
    assert looked.text == "from the project"
    assert bodies(events, RunEnded)[-1].status == "done"
