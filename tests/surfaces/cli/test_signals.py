"""Ctrl-C once, twice and three times, with real signals and real processes: everything ends, and the log says how."""

import os
import signal
from pathlib import Path

import pytest

from tests.gates import Gate
from tests.surfaces.cli.shell import Project, interrupt, read_until, until
from tests.surfaces.cli.test_terminal import Terminal

SHELL = "trap '' TERM INT; echo $$ > pid.new; mv pid.new pid; echo started; while :; do sleep 0.1; done"
STUBBORN = {
    "main": [{"tools": [{"name": "subagent_evaluator", "args": {"task": "hold on"}}]}],
    "evaluator": [{"tools": [{"name": "shell", "args": {"command": SHELL}}]}],
}
GLOB = {"name": "glob", "args": {"pattern": "*"}}


def processes_of(group: int) -> list[str]:
    """The living members of a process group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_once_cancels_the_tree(project: Project, number: signal.Signals) -> None:
    model = project.script(
        {
            "main": [{"text": "I wait.", "tools": [{"name": "subagent_explorer", "args": {"task": "hang"}}]}],
            "explorer": [{"tools": [GLOB], "usage": {"input_tokens": 7}}, {"hang": True}],
        }
    )
    with project.running("run", "x", "--yes", "--json", "--model", model) as process:
        assert process.stderr is not None
        read_until(process.stderr, 'Tool "glob" result')
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 130
    assert "cancelling; press Ctrl-C again to kill\n" in err
    assert "retinue: cancelled: Run 'main' was cancelled\n" in err
    assert '"status": "cancelled"' in out
    events = project.events()
    assert [(e["run"], e["status"]) for e in events if e["kind"] == "run.ended"] == [(1, "cancelled"), (0, "cancelled")]
    assert events[-1]["partial"] == "I wait."
    child = project.rows()[1]
    assert (child["state"], child["usage"]["input_tokens"], child["tool_count"]) == ("cancelled", 7, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["run", "serve"])
def test_once_is_enough_when_the_terminal_is_gone(project: Project, command: str, number: signal.Signals) -> None:
    """Nothing can be said on a stderr that nobody reads any more, and the work is cancelled all the same."""
    model = project.script({"main": [{"tools": [GLOB]}, {"hang": True}]})
    words = ("run", "x", "--yes") if command == "run" else ("mcp", "serve", "--http")
    with project.running(*words, "--model", model) as process:
        assert process.stderr is not None
        read_until(process.stderr, 'Tool "glob" result' if command == "run" else "the header to send")
        process.stderr.close()
        process.send_signal(number)
        assert process.wait() == (130 if command == "run" else 0)
    if command == "run":
        assert [row["state"] for row in project.rows()] == ["cancelled"]


def test_twice_kills_what_does_not_want_to_end(project: Project) -> None:
    with project.running("run", "x", "--yes", "--model", project.script(STUBBORN)) as process:
        assert process.stderr is not None
        read_until(process.stderr, "#### evaluator [tool call]")
        [folder] = _workspaces(project)
        group = int((folder / "pid").read_text())
        assert processes_of(group)
        interrupt(process)
        read_until(process.stderr, "cancelling; press Ctrl-C again to kill")
        interrupt(process)
        assert process.wait() == 130
        rest = process.stderr.read()
    assert "killing" in rest
    assert processes_of(group) == []
    endings = [(e["run"], e["status"]) for e in project.events() if e["kind"] == "run.ended"]
    assert endings == [(1, "cancelled"), (0, "cancelled")]
    assert {row["state"] for row in project.rows()} == {"cancelled"}


def test_in_the_live_view_the_third_kills(project: Project) -> None:
    """The first asks what to cancel, the second cancels."""
    terminal = Terminal(project, "run", "x", "--yes", "--model", project.script(STUBBORN))
    terminal.read_until("started")
    [folder] = _workspaces(project)
    group = int((folder / "pid").read_text())
    for told in ("Cancel what?", "cancelling; press Ctrl-C again to kill", "killing"):
        os.killpg(terminal.process.pid, signal.SIGINT)
        terminal.read_until(told)
    screen = terminal.read_until(None)
    assert terminal.end() == 130, screen
    assert processes_of(group) == []
    endings = [(e["run"], e["status"]) for e in project.events() if e["kind"] == "run.ended"]
    assert endings == [(1, "cancelled"), (0, "cancelled")]


def test_a_stubborn_command_is_gone_after_one_too(project: Project) -> None:
    with project.running("run", "x", "--yes", "--model", project.script(STUBBORN)) as process:
        assert process.stderr is not None
        read_until(process.stderr, "#### evaluator [tool call]")
        [folder] = _workspaces(project)
        group = int((folder / "pid").read_text())
        interrupt(process)
        assert process.wait() == 130
    assert processes_of(group) == []


def test_closing_the_terminal_of_a_run_cancels_its_question(project: Project) -> None:
    """docs/approvals.md says so; a surface of another process that is closed answers nothing."""
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": "true"}}]}]})
    terminal = Terminal(project, "run", "x", "--model", model)
    terminal.read_until("shell(true)")
    os.killpg(terminal.process.pid, signal.SIGHUP)  # what the system sends when the terminal is gone
    terminal.read_until(None)
    assert terminal.end() == 130
    assert [(row["state"], row["pid"]) for row in project.rows()] == [("cancelled", None)]
    assert not [event for event in project.events() if event["kind"] == "approval.decided"]


def test_a_signal_that_was_ignored_stays_ignored(project: Project) -> None:
    """With nohup, the run outlives its terminal."""
    gate = Gate(project.folder / "gate")
    model = project.script({"main": [gate.reply, "ok"]})
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with project.running("run", "x", "--yes", "--model", model, quick=False) as process:
            held = gate.hold()
            process.send_signal(signal.SIGHUP)
            os.close(held)
            out, _ = process.communicate()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (process.returncode, out) == (0, "ok\n")


def _workspaces(project: Project) -> list[Path]:
    """The folder in which the command has left its number; it is there when the command has begun."""

    def found() -> list[Path]:
        return [path.parent for path in project.folder.glob(".retinue/runs/*/*/workspace/pid")]

    until(lambda: bool(found()))
    return found()
