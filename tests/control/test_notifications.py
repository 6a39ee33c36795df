"""Tests of the command that runs for each question: its input, its limits, and its end."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from retinue.config.settings import load_settings, restrict
from retinue.control.notifications import MAX_RUNNING, Notifier, make_notice_environment
from retinue.core.approvals import Approval, QuestionChange, QuestionClosed
from tests.control.loopback.test_second_terminal import GLOB, first, waiting, write
from tests.gates import until as wait_until
from tests.surfaces.cli.shell import Project, until

KEPT = "cat > question.json; printf '%s' \"$RETINUE_QUESTION\" > line.txt; mv question.json told.json"


def ask(number: int, **args: str) -> Approval:
    return Approval(f"t/0/{number}", "t", 0, "/main", "main", "shell", {"command": "true", **args}, "c1", number=number)


class NotifierSetup:
    """A notifier with the questions that it gets and its warnings."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.changes: asyncio.Queue[QuestionChange] = asyncio.Queue()
        self.warned: list[str] = []
        self.notifier = Notifier(command, folder, lambda question, text: self.warned.append(f"{question.id}: {text}"))
        self.notifier.follow_questions(self._read())

    async def _read(self) -> AsyncGenerator[QuestionChange]:
        while True:
            yield await self.changes.get()


async def wait_for(folder: Path, count: int) -> list[str]:
    await wait_until(lambda: len(os.listdir(folder)) >= count)
    return sorted(os.listdir(folder))


async def test_a_command_ends_with_its_question_and_only_a_few_run_at_once(tmp_path: Path) -> None:
    setup = NotifierSetup(tmp_path, "sh", "-c", 'echo $$ > "$RETINUE_QUESTION_NUMBER"; exec sleep 1000')
    try:
        for number in range(MAX_RUNNING + 2):
            setup.changes.put_nowait(ask(number))
        assert await wait_for(tmp_path, MAX_RUNNING) == [str(number) for number in range(MAX_RUNNING)]
        first_pid = int((tmp_path / "0").read_text())
        setup.changes.put_nowait(QuestionClosed("t/0/0", allowed=True))
        await wait_until(lambda: not os.path.exists(f"/proc/{first_pid}"))
        setup.changes.put_nowait(ask(99))
        assert "99" in await wait_for(tmp_path, MAX_RUNNING + 1)
    finally:
        await setup.notifier.close()
    assert not any(os.path.exists(f"/proc/{(tmp_path / name).read_text().strip()}") for name in os.listdir(tmp_path))


async def test_a_question_with_half_of_a_character_is_notified(tmp_path: Path) -> None:
    setup = NotifierSetup(tmp_path, "sh", "-c", "cat > part; mv part whole")
    try:
        setup.changes.put_nowait(ask(1, note="so\ud83d"))
        await wait_until(lambda: (tmp_path / "whole").exists() or setup.warned)
    finally:
        await setup.notifier.close()
    assert setup.warned == []
    assert json.loads((tmp_path / "whole").read_text())["args"]["note"] == "so?"


async def test_a_command_that_cannot_be_started_is_told_once(tmp_path: Path) -> None:
    setup = NotifierSetup(tmp_path, str(tmp_path / "nothing"))
    setup.changes.put_nowait(ask(1))
    setup.changes.put_nowait(ask(2))
    await wait_until(lambda: setup.warned)
    await asyncio.sleep(0)
    await setup.notifier.close()
    assert setup.warned == ["t/0/1: notify_command cannot be run: No such file or directory"]


def test_the_environment_has_the_facts_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-planted-0123456789")
    monkeypatch.setenv("DISPLAY", ":7")
    seen = make_notice_environment(ask(3, command="echo \x1b[31m\0\nrm -rf \ud83d"))
    assert "sk-planted" not in repr(seen) and seen["DISPLAY"] == ":7"
    assert (seen["RETINUE_QUESTION_NUMBER"], seen["RETINUE_TOOL"], seen["RETINUE_TREE"]) == ("3", "shell", "t")
    assert seen["RETINUE_QUESTION"].isprintable() and "echo" in seen["RETINUE_QUESTION"]


def test_the_question_reaches_the_command_of_a_trusted_file_only(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text(f"notify_command: [sh, -c, {json.dumps(KEPT)}]\n")
    [loosened] = restrict(load_settings(project.folder / "retinue.yaml"))[1]
    assert loosened.key == "notify_command"
    agents = {"main": [{"tools": [GLOB]}, {"tools": [write("$(touch pwned).txt")]}, "end"]}
    told = project.folder / "told.json"
    for trusted in (False, True):
        named = ("--config", "retinue.yaml") if trusted else ()
        with first(project, agents, "--wait-approvals", "600", *named) as process:
            [question] = waiting(project)
            if trusted:
                until(told.exists)
                assert json.loads(told.read_text())["id"] == question["id"]
                assert (project.folder / "line.txt").read_text() == "write($(touch pwned).txt)"
            assert project.retinue("deny", str(question["number"])).returncode == 0
            assert process.wait() == 0
        assert told.exists() is trusted
    assert not (project.folder / "pwned").exists()
