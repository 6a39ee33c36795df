"""MCP servers as somebody at a terminal meets them: run, doctor, approvals from another terminal, resume."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.surfaces.cli.shell import Project, interrupt, read_until, until
from tests.surfaces.cli.test_terminal import Terminal
from tests.tools.mcp.kit import alive, call, program, turns


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def servers(project: Project, **named: dict[str, Any]) -> None:
    (project.folder / "retinue.yaml").write_text(yaml.safe_dump({"mcp_servers": named}, sort_keys=False))


def test_run_says_what_it_waits_for_and_what_failed(project: Project, tmp_path: Path) -> None:
    servers(
        project,
        good=program("bad", "lame", str(tmp_path)),
        slow=program("bad", "hangs", str(tmp_path), startup_timeout=5),
    )
    model = project.script({"main": turns(call("mcp__good__one"))})
    held = project.retinue("run", "go", "--model", model, "--yes")
    assert held.returncode == 0 and "Unknown tool 'mcp__good__one'" in held.stderr
    assert "is not trusted, so this part of it is ignored: mcp_servers.good: " in held.stderr
    assert list(tmp_path.glob("*.lives")) == []
    assert project.retinue("trust", "--yes").returncode == 0
    done = project.retinue("run", "go", "--model", model, "--yes")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "life 1" in done.stderr
    [waiting] = [line for line in done.stderr.splitlines() if "waiting for the MCP server" in line]
    assert f" slow ({sys.executable} " in waiting
    assert done.stderr.count("the MCP server 'slow' is not available: it did not answer within 5 s") == 1
    assert "its tool 'broken' is left out" in done.stderr


def test_doctor_lists_the_servers(project: Project, tmp_path: Path) -> None:
    servers(project, good=program("bad", "lame", str(tmp_path)), bad=program("bad", "exits", str(tmp_path)))
    assert project.retinue("trust", "--yes").returncode == 0
    done = project.doctor("--json")
    found = [check for check in json.loads(done.stdout) if check["section"] == "servers"]
    assert done.returncode == 1
    assert [check["state"] for check in found] == ["ok", "warn", "fail"]
    assert found[0]["text"].startswith("good: 2 tools, MCP 2025-11-25 (")
    assert found[2]["text"].startswith("bad: it ended with exit code 1; it said: cannot find my configuration")
    assert not (project.folder / ".retinue" / "mcp").exists()


def test_a_form_is_filled_in_from_another_terminal(project: Project, tmp_path: Path) -> None:
    servers(project, bad=program("bad", "asks", str(tmp_path)))
    assert project.retinue("trust", "--yes").returncode == 0
    model = project.script({"main": turns(call("mcp__bad__one"))})
    away = project.retinue("run", "go", "--model", model, "--detach", "--wait-approvals", "200")
    assert away.returncode == 0, away.stderr
    numbers = []
    for answer in (["approve", "--yes", "1"], ["approve", "--yes", "2", "--set", "ok=true"]):
        listed = project.retinue("approvals", "--json")
        while not json.loads(listed.stdout):
            listed = project.retinue("approvals", "--json")
        [question] = json.loads(listed.stdout)
        numbers.append((question["tool"], question["args"]))
        done = project.retinue(*answer)
        assert done.returncode == 0, done.stderr
    assert numbers == [("mcp__bad__one", {}), ("mcp__bad", {"ok": None})]
    seen = project.retinue("tail", "-f", away.stdout.strip())
    assert '"action":"accept","content":{"ok":true}' in "".join(seen.stdout.split())


def test_ctrl_c_while_a_server_is_waited_for(project: Project, tmp_path: Path) -> None:
    servers(project, slow=program("bad", "hangs", str(tmp_path), startup_timeout=50))
    assert project.retinue("trust", "--yes").returncode == 0
    model = project.script({"main": turns()})
    with project.running("run", "go", "--model", model, "--yes", quick=False) as running:
        read_until(running.stderr, "waiting for the MCP server slow")
        until(lambda: bool(_children(running.pid)))
        children = _children(running.pid)
        interrupt(running)
        assert running.wait(150) == 130
    assert not any(alive(pid) for pid in children)


def test_a_server_that_does_not_notice_that_we_were_killed_is_ended(project: Project, tmp_path: Path) -> None:
    servers(project, slow=program("bad", "hangs", str(tmp_path), startup_timeout=50))
    assert project.retinue("trust", "--yes").returncode == 0
    model = project.script({"main": turns()})
    with project.running("run", "go", "--model", model, "--yes", quick=False) as running:
        read_until(running.stderr, "waiting for the MCP server slow")
        until(lambda: len(_children(running.pid)) == 2)  # the server and its guard
        children = _children(running.pid)
        running.kill()
        running.wait(150)
        until(lambda: not any(alive(pid) for pid in children))


def test_the_worker_and_the_help_do_not_load_the_library() -> None:
    for module in ("retinue.sandbox.tool_server", "retinue.surfaces.cli.main", "retinue.build", "retinue.agent.plans"):
        code = f"import {module}, sys; print([m for m in sys.modules if m.split('.')[0] in ('mcp', 'mcp_types')])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "[]\n", module


def _children(pid: int) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == pid]


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def test_a_killed_run_leaves_no_server_and_goes_on_with_it(project: Project, tmp_path: Path) -> None:
    servers(project, bad=program("bad", "lame", str(tmp_path)))
    assert project.retinue("trust", "--yes").returncode == 0
    model = project.script({"main": turns(call("mcp__bad__one"))})
    with project.running("run", "go", "--model", model, "--wait-approvals", "200", quick=False) as running:
        until(lambda: json.loads(project.retinue("approvals", "--json").stdout) != [])
        children = _children(running.pid)
        assert children
        running.kill()
        running.wait(150)
    until(lambda: not any(alive(pid) for pid in children))
    resumed = project.retinue("resume", "--yes", "--model", model)
    assert (resumed.returncode, resumed.stdout) == (0, "done\n"), resumed.stderr
    assert "life 2" in resumed.stderr
    # What was recorded is played without any server.
    assert project.retinue("replay").returncode == 0
    assert (tmp_path / "lame.lives").read_text() == "xx"
    # A tree whose server is gone goes on without it, and says so.
    (tmp_path / "lame.lives").unlink()
    servers(project, bad=program("bad", "exits", str(tmp_path)))
    assert project.retinue("trust", "--yes").returncode == 0
    more = project.script({"main": turns(call("mcp__bad__one"))})
    done = project.retinue("continue", project.events()[0]["tree"], "again", "--yes", "--model", more)
    assert done.returncode == 0 and "the MCP server 'bad' is not available" in done.stderr


def test_a_server_asks_at_the_terminal_and_its_words_move_no_cursor(project: Project, tmp_path: Path) -> None:
    servers(project, bad=program("bad", "asks", str(tmp_path), env={"ASKS": "Really\x1b[2J?"}))
    assert project.retinue("trust", "--yes").returncode == 0
    model = project.script({"main": turns(call("mcp__bad__one"))})
    terminal = Terminal(project, "run", "go", "--plain", "--model", model)
    terminal.read_until("[y]es [n]o > ")
    terminal.type("y\n")
    terminal.text = ""
    terminal.read_until("Really[2J?")
    terminal.read_until("ok (boolean, required)")
    terminal.read_until("[y]es [n]o > ")
    terminal.type("e\n")
    terminal.read_until("arguments as a line of JSON > ")
    terminal.type('{"ok": true}\n')
    terminal.read_until("sure? [y]es [n]o > ")
    terminal.type("y\n")
    shown = terminal.read_until(None)
    assert terminal.end() == 0
    assert "\x1b[2J" not in shown and "The MCP server 'bad' asks:" in shown
    assert '"action":"accept","content":{"ok":true}' in "".join(shown.split())


def test_a_yes_for_the_tool_outlives_the_process(project: Project, tmp_path: Path) -> None:
    """Written with the tool's seal, so that it holds after a crash for just this tool."""
    servers(project, bad=program("bad", "lame", str(tmp_path)))
    assert project.retinue("trust", "--yes").returncode == 0
    write = call("write", path="a.txt", content="x")
    model = project.script({"main": turns(call("mcp__bad__one"), write, call("mcp__bad__one"))})
    options = ("--model", model, "--wait-approvals", "200")

    def asked() -> list[str]:
        return [question["tool"] for question in json.loads(project.retinue("approvals", "--json").stdout)]

    with project.running("run", "go", *options, quick=False) as running:
        until(lambda: asked() == ["mcp__bad__one"])
        assert project.retinue("approve", "--yes", "1", "--tool").returncode == 0
        until(lambda: asked() == ["write"])
        running.kill()
        running.wait(150)
    with project.running("resume", *options) as running:
        until(lambda: asked() == ["write"])
        assert project.retinue("approve", "--yes", "3").returncode == 0
        assert running.wait(150) == 0
    decided = [event for event in project.events() if event["kind"] == "approval.decided"]
    assert [event["tool"] for event in decided] == ["mcp__bad__one", "write", "mcp__bad__one"]
    assert decided[2]["by"].startswith("rule: mcp__bad__one in this tree") and decided[2]["seal"] == decided[0]["seal"]
