"""A tree that another process shows is not shown a second time; a run elsewhere is a run in every list."""

import asyncio
import json
from pathlib import Path

import pytest

from retinue import build
from retinue.config.settings import parse_settings
from retinue.config.trust import held
from retinue.core.errors import NotFound
from retinue.core.profiles import Profile, Task
from retinue.door.publisher import publisher_of
from retinue.log.archive import Archive
from retinue.log.listing import listings
from retinue.log.lookup import find
from retinue.testing import scripted
from retinue.wire.collected import ADDRESS
from tests.cli.shell import Project
from tests.collector.kit import hall

TALK = {"reviewer": [{"text": "fine", "usage": {"input_tokens": 5, "output_tokens": 5}}]}


async def report(folder: Path, address: str, run_id: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tree of a server in that folder, reported to the address; its name."""
    monkeypatch.setenv(ADDRESS, address)
    supervisor = build.supervisor(build.Parts(project=folder, state=folder / ".retinue", mode="yes"))
    monkeypatch.delenv(ADDRESS)
    publisher = publisher_of(supervisor.log)
    assert publisher is not None
    with publisher.calling(run_id):
        node = supervisor.spawn(Profile("reviewer", "x", model=scripted(TALK)), Task("look"))
    await node.join()
    await supervisor.close()
    assert node.result().status == "done"
    return node.ref.tree


async def test_a_reported_tree_is_hidden_unless_all_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root and server work in the same project, so both trees are in the same folder of logs."""
    project = Project(tmp_path)
    async with hall(tmp_path, durable=True) as h:
        server = h.server()
        run_id = server.call()
        hidden = await report(tmp_path, server.address, run_id, monkeypatch)
        await h.until("run.ended")
        shown = h.tree

    def said(*words: str) -> str:
        done = project.retinue(*words)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    rows = json.loads(await asyncio.to_thread(said, "ps", "--json"))
    assert [(row["tree"], row["label"], row["agent"], row["status"]) for row in rows] == [
        (shown, "main", "main", "cancelled"), (shown, run_id, "reviewer", "done"),
    ]  # fmt: skip
    assert rows[1]["usage"]["input_tokens"] == 5
    rows = json.loads(await asyncio.to_thread(said, "ps", "--json", "--all"))
    assert {row["tree"] for row in rows} == {shown, hidden}
    latest = await asyncio.to_thread(said, "show", "--json")
    assert json.loads(latest)["tree"] == shown
    assert json.loads(await asyncio.to_thread(said, "show", "--json", "--all"))["tree"] == hidden
    assert json.loads(await asyncio.to_thread(said, "show", "--json", hidden))["tree"] == hidden
    page = await asyncio.to_thread(said, "show", run_id)
    assert f"{shown}/1  /main/reviewer-1  [{run_id}]" in page and "server      reviewers" in page
    assert json.loads(await asyncio.to_thread(said, "show", "--json", run_id))["runtime"] == "foreign"
    assert "reviewer [" in await asyncio.to_thread(said, "tail")
    assert "reviewer [" not in await asyncio.to_thread(said, "tail", "--all")
    spent = json.loads(await asyncio.to_thread(said, "usage", "--json", "--by", "model"))
    assert [row["model"] for row in spent["rows"]] == ["mcp:reviewers"]  # once, although two logs have it
    assert spent["total"]["total_tokens"] == 10


async def test_where_only_reported_trees_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hall(tmp_path / "root") as h:
        server = h.server()
        tree = await report(tmp_path, server.address, server.call(), monkeypatch)
    archive = Archive(tmp_path / ".retinue")
    with pytest.raises(NotFound, match="only runs that another process shows: --all"):
        find(archive, None)
    assert find(archive, None, everything=True).stored.tree == tree
    assert find(archive, tree[:8]).stored.tree == tree
    assert listings(archive) == ([], 0)
    assert len(listings(archive, everything=True)[0]) == 1


@pytest.mark.requirement("CPE-47")
def test_best_effort_is_a_setting_that_a_project_cannot_choose_by_itself(tmp_path: Path) -> None:
    text = "orchestrator: {coordination: {subagent_reports: best_effort}}\n"
    settings = parse_settings(text, tmp_path / "retinue.yaml")
    assert settings.subagent_reports == "best_effort"
    narrow, words = held(settings)
    assert (narrow.subagent_reports, words) == ("strict", ["subagent_reports: best_effort"])
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    assert build.project_parts(tmp_path, config=config)[0].best_effort
    assert not build.project_parts(tmp_path)[0].best_effort
