"""`retinue approvals --watch`: every question of the project as it is asked, to be answered here or elsewhere.

At a terminal the questions are asked as the terminal of a run asks them, with the same keys. Being there counts: while
it is open, runs without a terminal wait for an answer. Leaving answers nothing.

A person is asked with the panel of the live view, pinned and with one key, or by the line where nothing can be drawn.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, aclosing
from typing import Protocol

from retinue.concurrency import TaskOwner
from retinue.control.client import ControlClient
from retinue.core.approvals import Allow, Approval, Decision, QuestionChange, QuestionClosed, describe_closing
from retinue.core.errors import ApproverLeft, RetinueError
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.control_clients import find_clients
from retinue.surfaces.cli.questions import (
    KEPT,
    NOT_KEPT,
    Waiting,
    describe_outcome,
    format_question,
    format_rules,
    is_rule_kept,
    send_answer,
    spread_rule,
)
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.approver import TerminalApprover
from retinue.surfaces.printer.edit_call import edit_in_editor, find_editor
from retinue.surfaces.printer.keys import Key, Paste
from retinue.surfaces.printer.live_view import ARM_SECONDS
from retinue.surfaces.printer.printer import Printer
from retinue.surfaces.printer.question_panel import QuestionPanel
from retinue.surfaces.printer.screen import Bottom, Line, Screen
from retinue.surfaces.printer.terminal import Terminal, can_draw

EMPTY = "No question waits. New ones appear here; Ctrl-C leaves, and answers nothing."
WAITING = "Ctrl-C leaves, and answers nothing."
SURFACE = "retinue approvals --watch"
POLL_SECONDS = 0.1


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


class QuestionWatch:
    """Shows the questions of all processes of a project. `asks` lets the person answer them."""

    def __init__(self, project: screen.ProjectLog, *, as_json: bool, asks: bool) -> None:
        self._project = project
        self._as_json = as_json
        self._printer = Printer(sys.stdout)
        self._asks = asks
        self._asker: Asker | None = None
        self._open: dict[str, Waiting] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._closed: dict[str, QuestionClosed] = {}  # of questions that are being answered here
        self._left = asyncio.Event()
        self._tasks = TaskOwner()

    async def run(self) -> None:
        """Watch until the person leaves."""
        if self._asks:
            self._asker = PanelAsker(self._left.set) if can_draw(0, 1) else LineAsker(self._printer)
        followed: dict[int, asyncio.Task[None]] = {}
        async with self._tasks:
            try:
                while not self._left.is_set():
                    for client in find_clients(self._project):
                        pid = client.address.pid
                        if pid not in followed or followed[pid].done():
                            followed[pid] = self._tasks.start(self._follow(client))
                    self._printer.check_output()
                    await asyncio.sleep(POLL_SECONDS)
            finally:
                if self._asker is not None:
                    await self._asker.close()

    async def _follow(self, client: ControlClient) -> None:
        """Follow the questions of one process until it is gone."""
        try:
            async with AsyncExitStack() as stack:
                if self._asker is not None:
                    await stack.enter_async_context(client.attend())
                changes = await stack.enter_async_context(aclosing(client.watch_questions()))
                async for change in changes:
                    self._apply(client, change)
        except RetinueError:  # it is gone, or going
            pass
        for name in [name for name, each in self._open.items() if each.client is client]:
            self._close(name, await describe_outcome(self._project.log, self._open[name].approval))

    def _apply(self, client: ControlClient, change: QuestionChange) -> None:
        if isinstance(change, QuestionClosed):
            if change.id in self._open:
                self._closed[change.id] = change
                self._close(change.id, describe_closing(change))
            return
        waiting = self._open[change.id] = Waiting(change, client)
        if self._as_json:
            screen.print_json(waiting.to_json())
            sys.stdout.flush()
        elif self._asker is not None:
            self._asking[change.id] = self._tasks.start(self._ask(self._asker, waiting))
        else:
            self._printer.show_question(change)
            number, name = change.number, f"{change.tree}/{change.run}"
            self._printer.show_note(f"{number}  {name}: retinue approve {number} · retinue deny {number} REASON")

    def _close(self, name: str, outcome: str) -> None:
        """Take back a question that was closed elsewhere, and say how."""
        waiting, asking = self._open.pop(name), self._asking.pop(name, None)
        if asking is not None:
            asking.cancel()
        elif self._asker is not None:
            return  # it is being answered here, which tells what became of it
        if not self._as_json:
            asyncio.get_running_loop().call_soon(self._say, waiting.approval, outcome)  # after the prompt is gone

    async def _ask(self, asker: Asker, waiting: Waiting) -> None:
        """Ask the person, and give the answer to the process that asks."""
        about = waiting.approval
        try:
            decision = await asker.ask(about)
        except ApproverLeft:
            self._left.set()
            return
        self._asking.pop(about.id, None)
        try:
            outcome = await send_answer(self._project, waiting, decision, surface=SURFACE)
        except RetinueError as error:
            self._say(about, f"was not answered: {error}")
            return
        self._open.pop(about.id, None)
        closed = self._closed.pop(about.id, None)
        if outcome != "taken":
            late = await describe_outcome(self._project.log, about) if closed is None else describe_closing(closed)
            self._say(about, f"too late, somebody else was first: {late}")
            return
        self._say(about, "approved" if isinstance(decision, Allow) else "denied")
        if isinstance(decision, Allow) and decision.scope == "project":
            await self._tell_rule(waiting)

    async def _tell_rule(self, waiting: Waiting) -> None:
        is_kept = await is_rule_kept(self._project.log, waiting.approval)
        self._show_note((KEPT if is_kept else NOT_KEPT).format(rules=format_rules(waiting.approval)))
        if is_kept:
            async for other in spread_rule(self._project, waiting, surface=SURFACE):
                self._say(other, "approved by the same rule")

    def _say(self, about: Approval, text: str) -> None:
        self._show_note(f"{about.number}  {format_question(about)} of {about.tree}/{about.run}: {text}")

    def _show_note(self, text: str) -> None:
        if self._asker is None:
            self._printer.show_note(text)
        else:
            self._asker.show_note(text)
