"""Tests of questions on several surfaces: all show a question, one answers, and a surface that closes does not."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from retinue.core.approvals import Allow, Approval
from retinue.core.profiles import Profile, Task
from retinue.core.rules import Rules, parse_rule
from retinue.testing import scripted
from tests.control.loopback.kit import serve_supervisor
from tests.control.loopback.test_second_terminal import GLOB, HELD, first, release, waiting, write
from tests.surfaces.cli.shell import Project, one_line_error, until
from tests.surfaces.cli.test_terminal import Terminal

PROMPT = "[y]es [n]o > "
KEYS = "[y]es [n]o [a]lways"
THREE = {"tools": [write("a.txt"), write("b.txt"), {"name": "shell", "args": {"command": "touch c.txt"}}]}
AGENTS = {"main": [{"tools": [GLOB]}, THREE, "end"]}


@contextmanager
def watching(project: Project, sees: str, **more: str) -> Iterator[Terminal]:
    """A person at `retinue approvals --watch`, who sees these words."""
    terminal = Terminal(project, "approvals", "--watch", **more)
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


def test_an_answer_to_all_says_when_nothing_waits(project: Project) -> None:
    assert one_line_error(project.retinue("approve", "--all", "--yes")) == "nothing waits for an answer"
    assert one_line_error(project.retinue("deny", "--all")) == "nothing waits for an answer"


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
        watching(project, "/0, 2 more wait") as watch,
    ):
        tree = waiting(project, 3)[0]["tree"]
        assert f"◐ write(a.txt)  main · question 1 of {tree}/0, 2 more wait" in watch.text
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


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_watch_names_the_tree_of_each_question(project: Project, term: str) -> None:
    agents = {"main": [{"tools": [GLOB]}, {"tools": [write("a.txt")]}, "end"]}
    options = ("--wait-approvals", "600")
    with first(project, agents, *options) as one, first(project, agents, *options) as two:
        trees = {str(question["tree"]) for question in waiting(project, 2)}
        asked = str(waiting(project, 2)[0]["id"])
        assert f"\nretinue approve {asked} · retinue deny {asked} REASON\n" in project.retinue("approvals").stdout
        with watching(project, "[y]es [n]o", TERM=term) as watch:
            watch.read_until("1 more ")
            [shown] = [tree for tree in trees if f"question 1 of {tree}/0" in watch.text]
            watch.type("1" if term == "xterm" else "1\n")
            watch.read_until(f"question 1 of {(trees - {shown}).pop()}/0")
        assert project.retinue("approve", "--all", "--yes").returncode == 0
        assert (one.wait(), two.wait()) == (0, 0)


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


def test_a_message_has_its_receipts_on_the_screen_of_the_run(project: Project) -> None:
    model = project.script({"main": [{"tools": [HELD]}, {"tools": [GLOB]}, {"hang": True}]})
    terminal = Terminal(project, "run", "x", "--yes", "--model", model)
    terminal.read_until("-e gate")
    assert project.retinue("send", "main", "look at the tests", "--wait", "0").stdout.startswith("queued: ")
    terminal.read_until("queued: the run reads it at its next turn")
    release(project)
    terminal.read_until("delivered at turn 2 · look at the tests")
    until(lambda: [e["turn"] for e in project.events() if e["kind"] == "turn.started"][-1:] == [3])
    assert project.retinue("send", "main", "and then stop", "--wait", "0").returncode == 0
    assert project.retinue("cancel", "main").returncode == 0
    terminal.read_until("too late: the run ended before it read the message · and then stop")
    terminal.read_until(None)
    assert terminal.end() == 130


async def test_a_question_at_depth_3_in_a_sandbox_is_on_every_surface_at_once(tmp_path: Path) -> None:
    command = {"name": "shell", "args": {"command": "touch made"}}
    script: dict[str, Any] = {"c": [{"tools": [command]}, "end"]}
    for name, child in (("main", "a"), ("a", "b"), ("b", "c")):
        order = {"name": "spawn_subagents", "args": {"tasks": [{"task": "go", "subagent_type": child}]}}
        script[name] = [{"tools": [order]}, "end"]
    model = scripted(script)
    profiles = [Profile(name, "You work.", model=model) for name in "abc"]
    rules = Rules(allow=(parse_rule("spawn_subagents"),))
    async with serve_supervisor(tmp_path, profiles=profiles, runtime="isolated", rules=rules) as h:
        async with (
            aclosing(h.supervisor.watch_questions()) as here,
            aclosing(h.client.watch_questions()) as there,
            aclosing(h.client.watch_questions()) as elsewhere,
        ):
            run = await h.supervisor.spawn(Profile("main", "You work.", model=model), Task("go"))
            seen = [await anext(changes) for changes in (here, there, elsewhere)]
            [question] = {change.id: change for change in seen}.values()
            assert isinstance(question, Approval) and seen == [question] * 3
            assert (question.path.count("/"), question.tool) == (4, "shell")
            given = await h.client.answer(question.id, Allow(), by="anna", digest=question.digest, surface="a test")
            assert given == "taken"
            closed = [await anext(changes) for changes in (here, there, elsewhere)]
            assert closed == [closed[0]] * 3 and closed[0].id == question.id
        assert (await run.result()).status == "done"
