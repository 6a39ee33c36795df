"""The root's command line, an MCP server of ours, its program, another MCP server of ours: seen live at the root."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gates import Gate
from tests.surfaces.cli.shell import SOURCE, Project, read_until, until

CODE = 'from tools import below\nprint(await below.deep(prompt="look there"))'
LOOK = {"thinking": "deep in thought", "tools": [{"name": "glob", "args": {"pattern": "*.txt"}}]}
PROGRAM = {"name": "execute_python_code", "args": {"code": CODE, "executionTimeout": 300}}
NEST = {"thinking": "mid in thought", "tools": [PROGRAM]}
ASK = {"tools": [{"name": "mcp__next__mid", "args": {"prompt": "ask"}}]}
SAY = {"text": "{{last_result}}"}
CPE_SERVER = str(Path(__file__).parents[2] / "tools/code_mode/agent_server.py")


def server(project: Project, agents: dict[str, Any], *arguments: str) -> dict[str, Any]:
    """`retinue mcp serve` in a project of its own, as mcp_servers names it."""
    model = project.script(agents)
    words = ["mcp", "serve", "--project", str(project.folder), "--config", "retinue.yaml"]
    return {
        "command": sys.executable,
        "args": ["-m", "retinue", *words, "--model", model, "--runtime", "inherited", "--yes", *arguments],
        "env": {"PYTHONPATH": SOURCE, "PYTHONUTF8": "1"},
        "cwd": str(project.folder),
    }


def configured(folder: Path, servers: dict[str, Any], **more: Any) -> Project:
    project = Project(folder)
    (folder / "found.txt").write_text("x\n")
    (folder / "retinue.yaml").write_text(json.dumps({"mcp_servers": servers, **more}))
    return project


def tower(tmp_path: Path, *last: dict[str, Any]) -> tuple[Project, Project, Project]:
    """Three projects, each the client of a server in the next."""
    looker = {"description": "Looks.", "instructions": "Look."}
    deep = configured(tmp_path / "deep", {}, profiles={"deep": looker})
    below = server(deep, {"deep": [LOOK, *last]}, "--profile", "deep")
    asker = {"description": "Asks.", "instructions": "Ask.", "tools": ["execute_python_code", "mcp__below"]}
    mid = configured(tmp_path / "mid", {"below": below}, profiles={"mid": asker})
    root = configured(tmp_path / "root", {"next": server(mid, {"mid": [NEST, SAY]}, "--profile", "mid")})
    root.script({"main": [ASK, SAY]})
    return root, mid, deep


RUN = ("run", "go", "--model", "scripted:script.yaml", "--config", "retinue.yaml", "--yes")


@pytest.mark.requirement("CPE-1", "CPE-6", "CPE-29", "CPE-30", "CPE-42", "CPE-54", "CPE-56", "CPE-60")
def test_the_deepest_is_seen_at_the_root_before_it_ends(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    root, mid, deep = tower(tmp_path, gate.reply, {"text": "one file"})
    with root.running(*RUN) as process:
        seen = read_until(process.stderr, '#### deep Tool "glob" result:')
        assert process.poll() is None and "deep done" not in seen
        gate.open()
        assert process.stderr is not None and process.stdout is not None
        seen += process.stderr.read()
        assert (process.stdout.read(), process.wait()) == ("one file\n\n", 0), seen
    places = [
        seen.index(text)
        for text in (
            "#### [tool call]",
            "#### mid thought trace\nmid in thought",
            "#### mid [tool call] (timeout: 300s)\nexecute_python_code\n" + CODE,
            "#### deep thought trace\ndeep in thought",
            '#### deep [tool call]\nglob\n{\n  "pattern": "*.txt"\n}',
            '#### deep Tool "glob" result:\nfound.txt',
            "#### mid Code execution output:\none file",
            '#### Tool "mcp__next__mid" result:',
        )
    ]
    assert places == sorted(places)
    assert seen.count("deep in thought") == seen.count("mid in thought") == 1
    rows = root.rows()
    assert [(row["path"], row["state"]) for row in rows] == [
        ("/main", "done"),
        ("/main/mid-1", "done"),
        ("/main/mid-1/deep-2", "done"),
    ]
    for project, name in ((mid, "mid"), (deep, "deep")):  # reported elsewhere, so shown only when asked for
        assert project.rows() == []
        assert [row["agent"] for row in project.rows("--all")] == [name]


@pytest.mark.finding("M8")
@pytest.mark.requirement("CPE-38")
def test_a_plain_cpe_process_below_a_server_of_ours_stands_below_the_run_that_called_it(tmp_path: Path) -> None:
    """Three callers at once. The leaf knows nothing of parents, and posts to the address that the server got."""
    leaf = {"command": sys.executable, "args": [CPE_SERVER], "env": {"PYTHONUTF8": "1"}}
    asker = {"description": "Asks.", "instructions": "Ask.", "tools": ["mcp__leaf"]}
    mid = configured(tmp_path / "mid", {"leaf": leaf}, profiles={"asker": asker})
    ask = {"tools": [{"name": "mcp__leaf__ask", "args": {"prompt": "go"}}]}
    spawn = {"tasks": [{"task": f"q{number}", "subagent_type": "asker"} for number in range(3)]}
    root = configured(tmp_path / "root", {"next": server(mid, {"asker": [ask, SAY]})})
    root.script({"main": [{"tools": [{"name": "mcp__next__spawn_subagents", "args": spawn}]}, {"text": "done"}]})
    done = root.retinue(*RUN)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    paths = [row["path"].split("/")[2:] for row in root.rows() if row["state"] == "done"]
    below = sorted([place.rpartition("-")[0] for place in path] for path in paths)
    assert below == [[], *[["asker"]] * 3, *[["asker", "helper"]] * 3]
    assert len({path[0] for path in paths if len(path) == 2}) == 3  # each below the run that called it


def test_depth_ends_where_it_would_in_one_process(tmp_path: Path) -> None:
    root, _, deep = tower(tmp_path, {"text": "one file"})
    done = root.retinue(*RUN, "--max-depth", "1")
    assert done.returncode == 0, done.stderr
    assert "Subagent depth limit exceeded" in done.stdout and deep.rows("--all") == []
    assert [row["path"] for row in root.rows()] == ["/main", "/main/mid-1"]


def test_a_root_that_is_killed_leaves_no_subagent_at_work(tmp_path: Path) -> None:
    """Nobody is left to end them but themselves: nothing can be reported, and their servers' input is closed."""
    root, mid, deep = tower(tmp_path, {"hang": True})
    with root.running(*RUN, quick=False) as process:
        read_until(process.stderr, '#### deep Tool "glob" result:')
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for project in (deep, mid):
            until(lambda: {row["state"] for row in project.rows("--all")} <= {"failed", "cancelled", "interrupted"})  # noqa: B023


def test_cancelling_a_subagent_in_a_server_ends_its_call_at_once(tmp_path: Path) -> None:
    """It may be silent for long: it is not left to its next report."""
    looker = {"description": "Looks.", "instructions": "Look."}
    mid = configured(tmp_path / "mid", {}, profiles={"mid": looker})
    agents = {"mid": [{"thinking": "for long", "tools": [LOOK["tools"][0]]}, {"hang": True}]}
    root = configured(tmp_path / "root", {"next": server(mid, agents, "--profile", "mid")})
    root.script({"main": [ASK, SAY]})
    with root.running(*RUN) as process:
        read_until(process.stderr, '#### mid Tool "glob" result:')
        tree = root.rows()[0]["tree"]
        assert root.retinue("cancel", f"{tree}/1").returncode == 0
        assert process.stdout is not None
        assert (process.stdout.read(), process.wait()) == ("mcp__next__mid: the subagent was stopped\n", 0)
    assert [row["state"] for row in root.rows()] == ["done", "cancelled"]
    assert [row["state"] for row in mid.rows("--all")] == ["cancelled"]
