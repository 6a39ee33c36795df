"""The files of a team: each member works in its own copy, and what is handed over is the presented work."""

from __future__ import annotations

from pathlib import Path

import pytest

import retinue
from retinue import Team
from retinue.core.events import AnswerGiven, ToolResult
from tests.agent.teams.kit import answer, make_members, vote
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call
from tests.workspaces.kit import repository


async def test_the_changes_of_a_team_are_those_of_its_presenter(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    members, _ = make_members(
        [call("write", path="a.txt", content="bad\n"), answer("A"), vote("agent2")],
        [call("write", path="b.txt", content="good\n"), answer("B"), vote("agent2"), "B, presented"],
    )
    async with retinue.open(mode="yes", project=project) as r:
        run = await r.spawn(Team("t", members=members, workspace="copy", strategy="winner_present"), "go")
        result = await run.result()
        events = [event async for event in run.events()]
        assert [(file.status, file.path) for file in result.changed_files] == [("added", "b.txt")]
        assert result.workspace == result.children[1].workspace
        assert "+good" in await run.diff()
        await run.apply()
        snapshots = {each.label: each.snapshot for each in bodies(events, AnswerGiven)}
        assert [path.name for path in Path(snapshots["agent2.1"]).iterdir()] == ["b.txt"]
    assert (project / "b.txt").read_text() == "good\n"
    assert not (project / "a.txt").exists() or "bad" not in (project / "a.txt").read_text()


@needs_bubblewrap
@pytest.mark.requirement("MASS-42")
async def test_a_team_of_ten_in_sandboxes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    read = call("shell", command="cat ../../snapshots/0-agent*/mine.txt | sort")
    scripts = [
        [
            call("shell", command=f"echo {number} > mine.txt"),
            answer(f"A{number}"),
            *([read, "all"] if not number else []),
        ]
        for number in range(10)
    ]
    members, _ = make_members(*scripts)
    async with retinue.open(mode="yes", project=tmp_path, runtime="isolated") as r:
        run = await r.spawn(Team("ten", members=members), "go")
        result = await run.result()
        events = [event async for event in run.events()]
    assert (result.status, result.final_response) == ("done", "all")
    assert len(bodies(events, AnswerGiven)) == 10
    seen = [body for body in bodies(events, ToolResult, run=1) if body.name == "shell"][-1]
    assert seen.text.split() == [str(number) for number in range(10)]


async def test_a_copy_that_cannot_be_made_costs_no_answer(tmp_path: Path) -> None:
    """The disk may be full: the other members do not see the files, and everybody learns why."""

    @retinue.tool(tier="observe")
    async def spoil(ctx: retinue.Context) -> str:
        """Put a file where the copies go."""
        (Path(ctx.workspace).parents[1] / "snapshots").write_text("in the way")
        return "spoilt"

    members, _ = make_members(
        [call("write", path="a.txt", content="a\n"), call("spoil"), answer("A"), "final"], [answer("B")]
    )
    async with retinue.open(mode="yes", project=tmp_path) as r:
        run = await r.spawn(Team("t", members=members, tools=["write", spoil]), "go")
        result = await run.result()
        events = [event async for event in run.events()]
    assert (result.status, result.final_response) == ("done", "final")
    assert [given.snapshot for given in bodies(events, AnswerGiven)] == ["", ""]
    assert "no snapshot of the workspace for other runs" in str(result.children[0].warning)
