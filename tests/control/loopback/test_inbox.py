"""One inbox: a question is on all open surfaces, is answered once, and no surface that goes away answers it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.control.loopback.test_second_terminal import GLOB, first, waiting, write
from tests.surfaces.cli.shell import Project, one_line_error
from tests.surfaces.cli.test_terminal import Terminal

PROMPT = "[y]es [n]o > "
KEYS = "[y]es [n]o [a]lways"
THREE = {"tools": [write("a.txt"), write("b.txt"), {"name": "shell", "args": {"command": "touch c.txt"}}]}
AGENTS = {"main": [{"tools": [GLOB]}, THREE, "end"]}


@contextmanager
def watching(project: Project, sees: str) -> Iterator[Terminal]:
    """A person at `retinue approvals --watch`, who sees these words."""
    terminal = Terminal(project, "approvals", "--watch")
    try:
        terminal.read_until(sees)
        yield terminal
    finally:
        terminal.process.kill()
        terminal.read_until(None)
        terminal.end()


def decisions(project: Project) -> list[tuple[bool, str]]:
    return [(e.get("allowed"), e["surface"]) for e in project.events() if e["kind"] == "approval.decided"]


def files(project: Project) -> list[bool]:
    return [(project.folder / name).exists() for name in ("a.txt", "b.txt", "c.txt")]


def test_several_questions_are_answered_with_one_command(project: Project) -> None:
    with first(project, AGENTS, "--wait-approvals", "600") as process:
        tree = waiting(project, 3)[0]["tree"]
        assert "say which" in one_line_error(project.retinue("approve", "--yes"))
        assert "not both" in one_line_error(project.retinue("approve", "--yes", "--all", "1"))
        assert "--run is about one question" in one_line_error(project.retinue("approve", "--all", "--run", "--yes"))
        assert "no such question" in one_line_error(project.retinue("deny", "--for", "edit"))
        denied = project.retinue("deny", "--for", "shell", "no commands")
        assert denied.stdout == f"denied shell(touch c.txt) of {tree}/0\n"
        late = one_line_error(project.retinue("approve", "--yes", "3"))
        assert "too late: shell(touch c.txt)" in late and "was denied by user in process" in late
        assert "(retinue deny) at " in late and ": no commands" in late
        approved = project.retinue("approve", "--yes", "1", "2")
        assert approved.stdout == f"approved write(a.txt) of {tree}/0\napproved write(b.txt) of {tree}/0\n"
        assert process.wait() == 0
    assert decisions(project) == [(False, "retinue deny"), (True, "retinue approve"), (True, "retinue approve")]
    assert files(project) == [True, True, False]


@pytest.mark.parametrize("selection", [["--all"], ["--from", "main"]])
def test_all_that_waits_is_answered_at_once(project: Project, selection: list[str]) -> None:
    with first(project, AGENTS, "--wait-approvals", "600") as process:
        waiting(project, 3)
        assert len(project.retinue("approve", "--yes", *selection).stdout.splitlines()) == 3
        assert process.wait() == 0
    assert files(project) == [True, True, True]


def test_a_watch_answers_and_is_told_what_others_answered(project: Project) -> None:
    with (
        first(project, AGENTS, "--wait-approvals", "600") as process,
        watching(project, "question 1, 2 more wait") as watch,
    ):
        tree = waiting(project, 3)[0]["tree"]
        watch.read_until(KEYS)
        watch.type("Nnot this\r")
        watch.read_until(f"1  write(a.txt) of {tree}/0: denied")
        assert project.retinue("approve", "--yes", "2").returncode == 0
        watch.read_until(f"2  write(b.txt) of {tree}/0: approved by user in process")
        assert "(retinue approve) at " in watch.text
        watch.text = ""
        watch.read_until("│ touch c.txt")
        watch.read_until(KEYS)
        watch.type("y")
        watch.read_until(f"3  shell(touch c.txt) of {tree}/0: approved")
        assert process.wait() == 0
    assert files(project) == [False, True, True]
    surface = "retinue approvals --watch"
    assert decisions(project) == [(False, surface), (True, "retinue approve"), (True, surface)]


def test_a_surface_that_is_killed_or_left_answers_nothing(project: Project) -> None:
    """Two watch; one is killed with a half typed answer, the other one's input ends; a third answers."""
    agents = {"main": [{"tools": [GLOB]}, {"tools": [write("a.txt")]}, "end"]}
    with (
        watching(project, "No question waits") as one,
        watching(project, "No question waits") as two,
        first(project, agents, "--wait-approvals", "600") as process,
    ):
        one.read_until(KEYS)
        two.read_until(KEYS)
        one.type("Nhalf a rea")
        os.kill(one.process.pid, signal.SIGKILL)
        two.type("\x04")
        two.read_until(None)
        assert two.process.wait() == 0
        [question] = json.loads(project.retinue("approvals", "--json").stdout)
        assert (question["number"], process.poll(), decisions(project)) == (1, None, [])
        assert project.retinue("approve", "--yes", "1").returncode == 0
        assert process.wait() == 0
    assert decisions(project) == [(True, "retinue approve")]


def test_the_terminal_of_the_run_is_left_and_another_one_answers(project: Project) -> None:
    model = project.script({"main": [{"tools": [write("a.txt")]}, "end"]})
    terminal = Terminal(project, "run", "x", "--plain", "--model", model)
    terminal.read_until(PROMPT)
    terminal.type("\x04")
    terminal.read_until("answer with `retinue approve 1` in another terminal")
    waiting(project)
    assert project.retinue("approve", "--yes", "1").returncode == 0
    terminal.read_until("✓ approved write(a.txt) by user in process")
    terminal.read_until(None)
    assert terminal.end() == 0
    assert (project.folder / "a.txt").exists()


def test_a_rule_for_the_project_answers_what_waits_in_other_processes(project: Project) -> None:
    agents = {"main": [{"tools": [GLOB]}, {"tools": [{"name": "shell", "args": {"command": "touch c.txt"}}]}, "end"]}
    with (
        first(project, agents, "--wait-approvals", "600") as one,
        first(project, agents, "--wait-approvals", "600") as two,
    ):
        questions = waiting(project, 2)
        done = project.retinue("approve", "--yes", "--project", str(questions[0]["id"]))
        assert done.returncode == 0, done.stderr
        assert "by the rule in retinue.yaml: shell(touch c.txt)\n" in done.stdout
        assert f"approved shell(touch c.txt) of {questions[1]['tree']}/0, by the same rule\n" in done.stdout
        assert (one.wait(), two.wait()) == (0, 0)
    assert (project.folder / "retinue.yaml").read_text().count("shell(touch c.txt)") == 1
