"""The keys at a real terminal, and what each of them does."""

import json
import sys
from pathlib import Path

import pytest

from retinue.core.approvals import Allow, Deny
from retinue.surfaces.printer.approver import QuestionAction, parse_answer
from tests.surfaces.cli.shell import Project
from tests.surfaces.cli.test_terminal import Terminal

ASK = "[y]es [n]o > "


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def shells(*commands: str) -> list[dict[str, object]]:
    return [{"tools": [{"name": "shell", "args": {"command": command}}]} for command in commands]


def decisions(project: Project) -> list[tuple[bool, str, str]]:
    found = [event for event in project.events() if event["kind"] == "approval.decided"]
    return [(event["allowed"], event["by"], event.get("scope", "call")) for event in found]


def answer(terminal: Terminal, *lines: str, prompt: str = ASK) -> None:
    """Types each line at its own question."""
    for line in lines:
        terminal.read_until(prompt)
        terminal.text = terminal.text.split(prompt, 1)[1]
        terminal.type(f"{line}\n")


def test_what_the_keys_mean() -> None:
    assert parse_answer("r") == Allow("run") and parse_answer("T") == Allow("tool")
    assert parse_answer("n it is late") == Deny("it is late")
    assert parse_answer("N") == Deny(all_pending_of_run=True) and parse_answer("N enough") == Deny("enough", True)
    assert [parse_answer(word) for word in ("a", "e", "?", "2", "p")] == [
        QuestionAction("always"),
        QuestionAction("edit"),
        QuestionAction("help"),
        QuestionAction("go", 2),
        QuestionAction("pending"),
    ]
    assert [parse_answer(line) for line in ("y 2", "a b", "", "x", "yy")] == [None] * 5


@pytest.mark.parametrize(("key", "where"), [("r", "this run"), ("t", "this tree")])
def test_yes_to_the_run_or_the_tool(project: Project, key: str, where: str) -> None:
    model = project.script({"main": [*shells("echo 1", "echo 2"), "end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    answer(terminal, key)
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    assert f"✓ approved shell(echo 1), and in {where}" in screen
    assert decisions(project)[1] == (True, f"rule: shell in {where}, said by user", "call")


@pytest.mark.requirement("CODEY-40")
def test_always_shows_the_rule_asks_again_and_holds_in_the_next_run(project: Project) -> None:
    config = project.folder / "retinue.yaml"
    config.write_text("# mine\nmax_turns: 9\n")
    model = project.script({"main": [*shells("echo 1"), "end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    answer(terminal, "a")
    terminal.read_until("sure? ")
    assert "shell(echo 1)" in terminal.text
    assert config.read_text() == "# mine\nmax_turns: 9\n"
    answer(terminal, "no", "a", "y")
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    assert config.read_text() == '# mine\nmax_turns: 9\napprovals:\n  allow:\n    - "shell(echo 1)"\n'
    assert decisions(project) == [(True, "user", "project")]
    done = project.retinue("run", "x", "--model", model)
    assert (done.returncode, done.stdout) == (0, "end\n")
    other = project.script({"main": [*shells("echo 2"), "end"]})
    assert project.retinue("run", "x", "--model", other).returncode == 1


@pytest.mark.parametrize("workspace", ["shared", "copy"])
def test_the_help_of_the_keys_has_always_only_where_a_rule_can_be_written(project: Project, workspace: str) -> None:
    write = {"tools": [{"name": "write", "args": {"path": "a.txt", "content": "x"}}]}
    model = project.script({"main": [write, "end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--workspace", workspace, "--model", model)
    answer(terminal, "?")
    told = terminal.read_until(ASK)
    assert "e           change the arguments" in told
    assert ("a           yes, and always in this project" in told) == (workspace == "shared")
    answer(terminal, "y")
    terminal.read_until(None)
    assert terminal.end() == 0


def test_several_wait_numbered_and_one_no_is_for_all_of_a_run(project: Project) -> None:
    three = {"tools": [entry["tools"][0] for entry in shells("echo 1", "echo 2", "echo 3")]}  # type: ignore[index]
    model = project.script({"main": [three, "end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    answer(terminal, "?")
    terminal.read_until("  3. shell(echo 3)")
    answer(terminal, "3")
    terminal.read_until("◐ shell(echo 3)")
    terminal.text = terminal.text.split("◐ shell(echo 3)", 1)[1]
    answer(terminal, "y", "N that will do")
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    assert decisions(project) == [(True, "user", "call"), (False, "user", "call"), (False, "user", "pending")]
    results = {event["call_id"]: event["text"] for event in project.events() if event["kind"] == "tool.result"}
    assert sorted(results.values()) == ["3\n", *["The user denied this call: that will do"] * 2]


def test_arguments_are_edited_as_a_line_of_json(project: Project) -> None:
    model = project.script({"main": [*shells("echo 1"), "{{last_result}}"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    answer(terminal, "e")
    answer(terminal, "{not json", prompt="JSON > ")
    answer(terminal, "e")
    answer(terminal, json.dumps({"command": "echo 1"}), prompt="JSON > ")
    terminal.read_until("nothing was changed: the question waits as before")
    answer(terminal, "e")
    answer(terminal, json.dumps({"command": "echo edited"}), prompt="JSON > ")
    terminal.read_until("◐ shell(echo edited)")
    answer(terminal, "y", prompt="sure? [y]es [n]o > ")
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    assert "✓ approved shell(echo edited), with edited arguments" in screen
    [decided] = [event for event in project.events() if event["kind"] == "approval.decided"]
    assert decided["args"] == {"command": "echo edited"}
    assert "edited\r\n" in screen.rpartition("[The user changed")[2]


def test_arguments_are_edited_in_the_editor(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    script = project.folder / "editor.py"
    script.write_text(
        "import pathlib, sys\nfile = pathlib.Path(sys.argv[1])\nprint('IN THE EDITOR')\n"
        "file.write_text(file.read_text().replace('echo 1', 'echo by editor'))\n"
    )
    monkeypatch.setattr("tests.surfaces.cli.test_terminal.environment", _with_editor(f"{sys.executable} {script}"))
    model = project.script({"main": [*shells("echo 1"), "{{last_result}}"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    answer(terminal, "e")
    terminal.read_until("IN THE EDITOR")
    answer(terminal, "y", prompt="sure? [y]es [n]o > ")
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    assert "✓ approved shell(echo by editor), with edited arguments" in screen


def _with_editor(editor: str):  # type: ignore[no-untyped-def]
    from tests.surfaces.cli.shell import environment

    return lambda **more: environment(EDITOR=editor, **more)


@pytest.mark.requirement("P11")
def test_wait_approvals_waits_and_then_ends_as_without_anybody(project: Project) -> None:
    model = project.script({"main": [*shells("echo 1"), "end"]})
    done = project.retinue("run", "x", "--model", model, "--wait-approvals", "0.2")
    assert done.returncode == 1
    assert "no approver is attached" in done.stderr
    assert decisions(project) == [(False, "expiry", "call")]
    wrong = project.retinue("run", "x", "--model", model, "--wait-approvals", "-1")
    assert wrong.returncode == 2


def test_rules_of_the_file_hold_with_yes_too(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text("approvals:\n  deny: [shell(rm *)]\n")
    (project.folder / "kept").write_text("x")
    model = project.script({"main": [*shells("r''m kept"), "{{last_result}}"]})
    done = project.retinue("run", "x", "--model", model, "--yes")
    assert done.stdout == "The user denied this call: the rule shell(rm *) forbids it\n"
    assert (project.folder / "kept").exists()
