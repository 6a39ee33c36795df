"""A tree that another process shows is not shown a second time; a run elsewhere is a run in every list."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from retinue.build.logs import open_log_reader
from retinue.build.parts import Parts
from retinue.build.project import load_project_parts
from retinue.build.supervisor import make_supervisor
from retinue.config.settings import parse_settings, restrict
from retinue.core.caller import Caller
from retinue.core.errors import NotFound
from retinue.core.profiles import Profile, Task
from retinue.log.listing import load_listings
from retinue.log.lookup import find_run
from retinue.protocol.reports import ADDRESS
from retinue.supervisor.caller_limits import serve_caller
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.tree import Run
from retinue.surfaces.cli.main import main
from retinue.testing import scripted
from tests.remote.collector.kit import open_collector
from tests.surfaces.cli.shell import Project

TALK = {"reviewer": [{"text": "fine", "usage": {"input_tokens": 5, "output_tokens": 5}}]}


def begin(
    folder: Path, address: str, run_id: str, monkeypatch: pytest.MonkeyPatch, script: dict[str, Any]
) -> tuple[Supervisor, Run]:
    """A run of a server in that folder, reported to the address."""
    monkeypatch.setenv(ADDRESS, address)
    supervisor = make_supervisor(Parts(project=folder, state=folder / ".retinue", mode="yes"))
    monkeypatch.delenv(ADDRESS)
    with serve_caller(Caller(run_id=run_id)):
        return supervisor, supervisor.spawner.spawn_primary(
            Profile("reviewer", "x", model=scripted(script)), Task("look")
        )


async def report(folder: Path, address: str, run_id: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tree of one that has ended; its name."""
    supervisor, run = begin(folder, address, run_id, monkeypatch, TALK)
    await run.join()
    await supervisor.close()
    assert run.result().status == "done"
    return run.ref.tree


async def test_a_reported_tree_is_hidden_unless_all_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root and server work in the same project, so both trees are in the same folder of logs."""
    project = Project(tmp_path)
    async with open_collector(tmp_path, durable=True) as h:
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
    async with open_collector(tmp_path / "root") as h:
        server = h.server()
        tree = await report(tmp_path, server.address, server.call(), monkeypatch)
    log = open_log_reader(tmp_path / ".retinue")
    with pytest.raises(NotFound, match="only runs that were reported to another process; --all"):
        await find_run(log, None)
    assert (await find_run(log, None, everything=True)).tree == tree
    assert (await find_run(log, tree[:8])).tree == tree
    assert await load_listings(log) == ([], 0)
    assert len((await load_listings(log, everything=True))[0]) == 1


@pytest.mark.requirement("CPE-47")
def test_best_effort_is_a_setting_that_a_project_cannot_choose_by_itself(tmp_path: Path) -> None:
    text = "orchestrator: {coordination: {subagent_reports: best_effort}}\n"
    settings = parse_settings(text, tmp_path / "retinue.yaml")
    assert settings.coordination.subagent_reports == "best_effort"
    narrow, words = restrict(settings)
    assert narrow.coordination.subagent_reports == "strict"
    assert list(map(str, words)) == ["orchestrator.coordination.subagent_reports: best_effort"]
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    assert load_project_parts(tmp_path, config=config)[0].best_effort
    assert not load_project_parts(tmp_path)[0].best_effort


async def test_of_a_run_elsewhere_it_is_said_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run is of a server in the same project, whose log is known; the other is of a server somewhere else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "retinue.yaml").touch()

    async def said(*words: str) -> str:
        code = await asyncio.to_thread(main, list(words))
        printed = capsys.readouterr()
        assert (code, printed.out) == (1 if words[0] == "send" else 2, "")
        return printed.err.removeprefix("retinue: ")

    async with open_collector(tmp_path, durable=True) as h:
        server = h.server()
        known, other = server.call(), server.call()
        supervisor, run = begin(tmp_path, server.address, known, monkeypatch, {"reviewer": [{"hang": True}]})
        await h.until("run.started", 2)
        await server.post(other, "subagent_start", name="reviewer")
        await h.until("run.started", 3)
        watched = "is only watched here: it runs in the MCP server 'reviewers', which cannot receive messages from here"
        home = f"{run.ref.tree}/0"
        assert await said("send", known, "x") == f"{h.tree}/1 {watched}; `retinue send {home} TEXT` does\n"
        assert await said("send", other, "x") == f"{h.tree}/2 {watched}\n"
        told = await h.supervisor.send(h.tree, 2, "x")
        assert (told.state, told.why) == ("elsewhere", f"{h.tree}/2 {watched}")
        for command in ("diff", "apply"):
            assert await said(command, known) == (
                f"{h.tree}/1 ran in the MCP server 'reviewers': it worked there, so there is nothing of it here to "
                f"apply; `retinue diff {home}` shows what it changed there\n"
            )
        assert (await said("diff", other)).endswith("nothing of it here to apply\n")
        assert await said("continue", known, "x") == (
            f"{h.tree}/1 ran in the MCP server 'reviewers': it cannot be continued from here; "
            f"`retinue continue {home} TEXT` does\n"
        )
        await supervisor.close()
