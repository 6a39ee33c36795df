"""On a real terminal: questions are asked and answered there, and no text of others reaches it unescaped."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from tests.surfaces.cli.shell import SECONDS, Project, environment, find_python, until

HOSTILE = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202eevil\u2069 \x9b2J [bold]markup[/bold] \r\x08"
UNSEEN = {"\x1b", "\x07", "\u202e", "\u2069", "\x9b", "\x08"}


class Terminal:
    """One process with a terminal as stdin, stdout and stderr. `typed` are keys pressed before it starts."""

    def __init__(self, project: Project, *arguments: str, typed: str = "", **more: str) -> None:
        self._master, slave = pty.openpty()
        self.type(typed)
        env = environment(**{"TERM": "xterm", **more})
        python = [*project.prefix, sys.executable] if project.prefix else find_python(env)
        self.process = subprocess.Popen(
            [*python, "-m", "retinue", *project.said(arguments)],
            cwd=project.folder,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        self._name = os.ttyname(slave)
        os.close(slave)
        self._watchdog = threading.Timer(SECONDS, self.process.kill)
        self._watchdog.start()
        self._data = b""

    @property
    def text(self) -> str:
        """The text on the screen so far, without an incomplete character at its end."""
        return self._data.decode(errors="ignore")

    @text.setter
    def text(self, text: str) -> None:
        self._data = text.encode()

    def read_until(self, text: str | None) -> str:
        """Read until the screen shows the text, or with None until the end. Return everything shown so far."""
        while text is None or text.encode() not in self._data:
            try:
                chunk = os.read(self._master, 65536)
            except OSError:
                chunk = b""
            if not chunk:
                break
            self._data += chunk
        assert text is None or text in self.text, self.text
        return self.text

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def stop_output(self) -> None:
        """Let the terminal take no more text, as after Ctrl-S or when its connection hangs."""
        slave = os.open(self._name, os.O_RDWR | os.O_NOCTTY)
        termios.tcflow(slave, termios.TCOOFF)
        os.close(slave)

    def end(self) -> int:
        code = self.process.wait(SECONDS)
        self._watchdog.cancel()
        os.close(self._master)
        return code


def test_hostile_text_is_escaped_wherever_it_comes_from(project: Project) -> None:
    (project.folder / "evil.txt").write_text(HOSTILE)
    spawn = {"name": "spawn_subagents", "args": {"tasks": [{"task": f"do {HOSTILE}", "subagent_type": "explorer"}]}}
    agents = {
        "main": [
            {"thinking": HOSTILE, "text": HOSTILE, "tools": [spawn]},
            {"tools": [{"name": "read", "args": {"path": "evil.txt"}}]},
            {"text": f"answer {HOSTILE}"},
        ],
        "explorer": [{"text": f"child {HOSTILE}"}],
    }
    model = project.script(agents)
    commands = (
        ["run", f"task {HOSTILE}", "--yes", "--plain", "--model", model],
        ["ps"],
        ["show"],
        ["tail"],
        ["show", "--json"],
    )
    for command in commands:
        terminal = Terminal(project, *command)
        screen = terminal.read_until(None)
        assert terminal.end() == 0, screen
        assert not UNSEEN & set(screen), command
        assert "\\x1b[31mred" in screen or "\\u001b[31mred" in screen
        assert "[bold]markup[/bold]" in screen or command == ["ps"]


@pytest.mark.parametrize(("answer", "content"), [("y", "new\n"), ("n not now", "old\n")])
def test_a_question_is_answered_at_the_terminal(project: Project, answer: str, content: str) -> None:
    file: Path = project.folder / "file.txt"
    file.write_text("old\n")
    edit = {"name": "edit", "args": {"path": "file.txt", "old_string": "old", "new_string": "new"}}
    model = project.script({"main": [{"tools": [edit]}, "{{last_result}}"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    asked = terminal.read_until("[y]es [n]o > ")
    assert "edit(file.txt)" in asked
    assert "-old" in asked
    assert "+new" in asked
    assert file.read_text() == "old\n"
    terminal.type(f"{answer}\n")
    screen = terminal.read_until(None)
    assert terminal.end() == 0, screen
    assert file.read_text() == content
    [decided] = [event for event in project.events() if event["kind"] == "approval.decided"]
    assert decided["allowed"] is (answer == "y")
    assert decided.get("reason", "") == ("" if answer == "y" else "not now")


def test_ctrl_c_at_a_question_cancels(project: Project) -> None:
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": "true"}}]}, "end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    terminal.read_until("[y]es [n]o > ")
    os.killpg(terminal.process.pid, 2)
    screen = terminal.read_until(None)
    assert terminal.end() == 130, screen
    assert "retinue: cancelled:" in screen


def test_ctrl_c_at_the_question_of_approve_leaves_at_once(project: Project) -> None:
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": "true"}}]}, "end"]})
    with project.running("run", "x", "--model", model, "--wait-approvals", "600"):
        until(lambda: bool(json.loads(project.retinue("approvals", "--json").stdout)))
        terminal = Terminal(project, "approve", "1")
        terminal.read_until("approve this? [y/N]")
        os.killpg(terminal.process.pid, 2)
        screen = terminal.read_until(None)
        assert terminal.end() == 130, screen
        assert json.loads(project.retinue("approvals", "--json").stdout)


def test_a_terminal_that_takes_no_more_text_does_not_keep_the_process(project: Project) -> None:
    terminal = Terminal(project, "approvals", "--watch")
    terminal.read_until("No question waits")
    terminal.stop_output()
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 1


def test_a_run_whose_terminal_takes_no_more_text_ends_with_its_exit_code(project: Project) -> None:
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": "true"}}]}, "the end"]})
    terminal = Terminal(project, "run", "x", "--model", model)
    until(lambda: bool(json.loads(project.retinue("approvals", "--json").stdout)))
    terminal.stop_output()
    assert project.retinue("approve", "1", "--yes").returncode == 0
    assert terminal.end() == 0
    assert project.events()[-1]["status"] == "done"


def test_a_conversation_whose_terminal_takes_no_more_text_ends(project: Project) -> None:
    model = project.script({"main": ["I am here."]})
    terminal = Terminal(project, "--model", model, "--runtime", "inherited")
    terminal.read_until("Type a message.")
    terminal.type("hello\r")
    terminal.read_until("I am here.")
    until(lambda: project.events()[-1]["kind"] == "run.waiting")
    terminal.stop_output()
    terminal.type("\x04")
    assert terminal.end() == 0
    assert project.events()[-1]["status"] == "done"


def test_an_exception_ends_the_process_of_a_live_view_whose_terminal_takes_no_more_text() -> None:
    program = (
        "import asyncio, termios\n"
        "from retinue.surfaces.cli.live_screen import open_live_screen\n"
        "async def fail():\n"
        "    async with open_live_screen(level='normal'):\n"
        "        termios.tcflow(2, termios.TCOOFF)\n"
        "        raise ValueError('x' * 100_000)\n"
        "asyncio.run(fail())\n"
    )
    master, slave = pty.openpty()
    command = [sys.executable, "-c", program]
    code = subprocess.call(command, env=environment(), stdin=slave, stdout=slave, stderr=slave, timeout=SECONDS)
    os.close(slave)
    os.close(master)
    assert code == 1
