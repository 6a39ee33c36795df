"""The command that notifies a person of a question, for example on the desktop.

The command comes from the settings, which the user trusts. It runs without a shell, and no text of an agent becomes an
argument. It gets the question as JSON on stdin and the main facts as environment variables. It cannot answer.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Approval, QuestionChange, QuestionClosed
from retinue.log.blocks import make_question_spans
from retinue.processes.group import ProcessGroup, start_group
from retinue.protocol.strict_json import encode_body
from retinue.tools.command_process import build_environment

NOTIFY_SECONDS = 30.0
MAX_RUNNING = 4
LINE_CHARACTERS = 200
FAILED = "notify_command cannot be run: {why}"
_DESKTOP_VARIABLES = (
    "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS", "XDG_RUNTIME_DIR", "TMUX",
)  # fmt: skip


class Notifier:
    """A watcher of questions that runs the command for each new question, and ends it when the question is closed.

    At most `MAX_RUNNING` commands run at once, `NOTIFY_SECONDS` each. A question that arrives while so many run gets
    no command. `warn` is called only for the first question whose command cannot be started."""

    def __init__(self, command: Sequence[str], folder: Path, warn: Callable[[Approval, str], object]) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._warn: Callable[[Approval, str], object] | None = warn
        self._running: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskOwner()

    def follow_questions(self, changes: AsyncGenerator[QuestionChange]) -> None:
        """Follow the questions until `close`."""
        self._tasks.start(self._follow(changes))

    async def close(self) -> None:
        """End all commands."""
        await self._tasks.close(None)

    async def _follow(self, changes: AsyncGenerator[QuestionChange]) -> None:
        async with aclosing(changes):
            async for change in changes:
                if isinstance(change, QuestionClosed):
                    running = self._running.pop(change.id, None)
                    if running is not None:
                        running.cancel()
                elif len(self._running) < MAX_RUNNING:
                    task = self._running[change.id] = self._tasks.start(self._notify(change))
                    task.add_done_callback(partial(self._forget, change.id))

    def _forget(self, question_id: str, _: object) -> None:
        self._running.pop(question_id, None)

    async def _notify(self, question: Approval) -> None:
        try:
            group = self._start(question)
        except (OSError, ValueError) as error:
            if self._warn is not None:
                self._warn(question, FAILED.format(why=getattr(error, "strerror", None) or error))
                self._warn = None
            return
        try:
            await group.wait_for_exit(NOTIFY_SECONDS)
        finally:
            await group.end(term=0.0)

    def _start(self, question: Approval) -> ProcessGroup:
        facts = os.memfd_create("question")
        try:
            os.write(facts, encode_body(question))
            os.lseek(facts, 0, os.SEEK_SET)
            return start_group(
                self._command,
                cwd=self._folder,
                env=make_notice_environment(question),
                stdin=facts,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        finally:
            os.close(facts)


def make_notice_environment(question: Approval) -> dict[str, str]:
    """Return the environment of the command: an allowlist of our own, the desktop variables, and the facts."""
    given = os.environ
    spans = make_question_spans(question.label, question.tool, question.args)[1:]
    facts = {
        "RETINUE_QUESTION": "".join(text for _, text in spans),
        "RETINUE_QUESTION_ID": question.id,
        "RETINUE_QUESTION_NUMBER": str(question.number),
        "RETINUE_TREE": question.tree,
        "RETINUE_AGENT": question.agent,
        "RETINUE_TOOL": question.tool,
    }
    desktop = {name: given[name] for name in _DESKTOP_VARIABLES if name in given}
    lines = {name: _make_line(text) for name, text in facts.items()}
    return {**build_environment(given, run=question.path), **desktop, **lines}


def _make_line(text: str) -> str:
    """Return a short line without control characters, for programs that show it unchanged."""
    line = "".join(char if char.isprintable() else " " for char in text[:LINE_CHARACTERS])
    return line.encode("utf-8", "replace").decode()
