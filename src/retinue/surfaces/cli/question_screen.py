"""Ways to ask a person at `retinue approvals --watch`: pinned, with one key, or by the line where nothing can be drawn.

Both take the keys of a run's terminal: the panel of its live view, and the approver of `--plain`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Protocol

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Approval, Decision
from retinue.core.errors import ApproverLeft
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.approver import TerminalApprover
from retinue.surfaces.printer.edit_call import edit_in_editor, find_editor
from retinue.surfaces.printer.keys import Key, Paste
from retinue.surfaces.printer.live_view import ARM_SECONDS
from retinue.surfaces.printer.printer import Printer
from retinue.surfaces.printer.question_panel import QuestionPanel
from retinue.surfaces.printer.screen import Bottom, Line, Screen
from retinue.surfaces.printer.terminal import Terminal

EMPTY = "No question waits. New ones appear here; Ctrl-C leaves, and answers nothing."
WAITING = "Ctrl-C leaves, and answers nothing."


class Asker(Protocol):
    """Asks a person, one question or several at once."""

    async def ask(self, question: Approval) -> Decision:
        """Return the answer. Cancelled when the question is closed elsewhere; raises ApproverLeft when the person is
        gone."""
        ...

    def show_note(self, text: str) -> None: ...

    async def close(self) -> None:
        """Leave. Answers nothing."""


class LineAsker:
    """Asks by the line, on the terminal of a printer."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._approver = TerminalApprover(printer)
        printer.show_note(WAITING)

    async def ask(self, question: Approval) -> Decision:
        async with TaskOwner() as owner:
            asking = owner.start(self._approver(question))
            await asyncio.sleep(0)
            if self._printer.on_asked is not None:
                self._printer.on_asked(question.id)
            return await asking

    def show_note(self, text: str) -> None:
        self._printer.show_note(text)

    async def close(self) -> None:
        self._approver.leave()


class PanelAsker:
    """Asks with the panel of the live view: all of a question is pinned, and one key answers it. `on_left` is called
    when the person leaves."""

    def __init__(self, on_left: Callable[[], object]) -> None:
        self._on_left = on_left
        self._screen = Screen(Terminal(input_fd=0, output_fd=1), color=colors.wants_color(sys.stdout))
        edit = self._open_editor if find_editor() else None
        self._panel = QuestionPanel(self._take_answer, edit, self._screen.request_redraw)
        self._questions: dict[str, Approval] = {}
        self._answers: dict[str, asyncio.Future[Decision]] = {}
        self._tasks = TaskOwner()
        self._screen.compose = self._compose
        self._screen.on_drawn = self._arm_question
        self._screen.terminal.on_key = self._press_key
        self._screen.terminal.on_closed = self._leave
        self._screen.open()

    async def ask(self, question: Approval) -> Decision:
        answer: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self._answers[question.id] = answer
        self._questions[question.id] = question
        self._show_questions()
        try:
            return await answer
        finally:
            del self._questions[question.id], self._answers[question.id]
            self._show_questions()

    def show_note(self, text: str) -> None:
        self._screen.print_text(colors.paint_faint(safe.escape_text(text), color=self._screen.color))

    async def close(self) -> None:
        await self._tasks.close()
        await self._screen.close()

    def _show_questions(self) -> None:
        self._panel.show_questions(self._questions)
        self._screen.request_redraw(at_once=True)

    def _take_answer(self, question: Approval, decision: Decision) -> None:
        answer = self._answers.get(question.id)
        if answer is not None and not answer.done():
            answer.set_result(decision)

    def _leave(self) -> None:
        self._on_left()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(ApproverLeft())

    def _open_editor(self, question: Approval) -> None:
        self._tasks.start(self._edit(question))

    async def _edit(self, question: Approval) -> None:
        with self._screen.lend_terminal() as fd:
            args = await edit_in_editor(find_editor(), question.args, fd=fd)
        self._panel.offer_edit(question, args)

    def _press_key(self, key: Key | Paste) -> None:
        if isinstance(key, Key) and key.name == "ctrl-d":
            self._leave()
        else:
            self._panel.press_key(key)

    def _arm_question(self, mark: object) -> None:
        """Take keys for a question once it was on screen for a moment. Those typed before that are dropped."""

        def arm() -> None:
            current = self._panel.current
            if current is not None and current.id == mark and not self._panel.is_armed:
                self._screen.terminal.discard_typed()
                self._panel.arm(current.id)

        if not self._panel.is_armed:
            self._screen.call_later(ARM_SECONDS, arm)

    def _compose(self, columns: int, rows: int) -> Bottom:
        lines, cursor = self._panel.layout_lines(columns, max(3, rows - 2))
        current = self._panel.current
        status: Line = (("faint", EMPTY if current is None else WAITING),)
        return Bottom(lines=[*lines, status], cursor=cursor, mark=None if current is None else current.id)
