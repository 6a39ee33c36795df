"""The approver at a terminal. It asks questions one at a time, in order of arrival, and reads each answer as a line.

It reads the terminal only while a question is open. A line typed before a question was shown does not answer it. The
other waiting questions are numbered, and typing a number goes to that question. The end of the input answers nothing:
the question stays open for other terminals.
"""

from __future__ import annotations

import asyncio
import os
import termios
from contextlib import suppress
from typing import Any, Literal

import msgspec

from retinue.core.approvals import INPUT_REQUIRED, Allow, Approval, Deny, is_edit
from retinue.core.errors import ApproverLeft
from retinue.core.ports import AttachedApprover
from retinue.files.content import read_available
from retinue.surfaces.printer.edit_call import UNCHANGED, edit_in_editor, find_editor, parse_args
from retinue.surfaces.printer.printer import Printer, describe_rule, format_question

PROMPT = "(? for more) [y]es [n]o > "
ANSWER = "your answer > "
SURE = "sure? [y]es [n]o > "
JSON = "arguments as a line of JSON > "
SHOWN_SECONDS = 1.0
LISTED = 20
LEFT = "(the input has ended: answer with `retinue approve {name}` in another terminal)"
ALWAYS_HELP = "a           yes, and always in this project: shows the rule, then asks again\n"
HELP = """\
y           yes, this call
u           yes, and to this tool for the rest of this run
t           yes, and to this tool in the whole tree
p           yes, to all that this agent asks now: shows it, then asks again
{always}e           change the arguments ($EDITOR, or JSON): shows it, then asks again
n [reason]  no; the agent reads the reason
N [reason]  no, to everything this agent has asked
v           show the question again, all of it
2           look at question 2 first
?           this, and the questions that wait"""


class QuestionAction(msgspec.Struct, frozen=True, gc=False):
    """An action to perform before the question is answered. `number` is the question to go to."""

    what: Literal["always", "edit", "help", "go", "pending", "view"]
    number: int = 0


_ANSWERS: dict[str, Allow | QuestionAction] = {
    **dict.fromkeys(("y", "yes"), Allow()),
    **dict.fromkeys(("r", "u", "run"), Allow("run")),
    **dict.fromkeys(("t", "tool"), Allow("tool")),
    **dict.fromkeys(("a", "always"), QuestionAction("always")),
    **dict.fromkeys(("p", "pending"), QuestionAction("pending")),
    **dict.fromkeys(("e", "edit"), QuestionAction("edit")),
    **dict.fromkeys(("v", "view"), QuestionAction("view")),
    **dict.fromkeys(("?", "h", "help"), QuestionAction("help")),
}


def parse_answer(line: str) -> Allow | Deny | QuestionAction | None:
    """Return the answer or action that a typed line means, or None if the line is unclear."""
    word, _, reason = line.strip().partition(" ")
    word, reason = word.rstrip(",:;"), reason.strip()
    if word == "N":
        return Deny(reason, all_pending_of_run=True)
    if word.lower() in ("n", "no"):
        return Deny(reason)
    if reason:
        return None
    if word.isascii() and word.isdigit():
        return QuestionAction("go", int(word[:6]))
    return _ANSWERS.get(word.lower())


class LineReader:
    """A reader of lines from a terminal in its ordinary line mode. It reads in the event loop, and only while a caller
    awaits a line."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._typed = b""

    def discard_typed(self) -> None:
        """Drop all input typed so far, because it does not answer the next question."""
        if os.isatty(self.fd):
            self._typed = b""
            with suppress(termios.error):
                termios.tcflush(self.fd, termios.TCIFLUSH)

    async def read_line(self) -> str | None:
        """Return the next line, or None at the end of the input."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._typed:
            ready = asyncio.Event()
            try:
                loop.add_reader(self.fd, ready.set)
            except (OSError, ValueError):  # a regular file, or closed: nobody types there
                return None
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self.fd)
            chunk = read_available(self.fd, 4096)
            if chunk == b"":
                return None
            self._typed += chunk or b""
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode("utf-8", "replace")


class _Waiting:
    """A waiting question. `shown` is set when the printer has reached the question. `turn` is set when the approver
    may ask it, or when it was `granted` together with another question."""

    def __init__(self, question: Approval) -> None:
        self.question = question
        self.shown = asyncio.Event()
        self.turn = asyncio.Event()
        self.granted = False


def attach_terminal(printer: Printer, *, names_runs: bool = False) -> AttachedApprover:
    """Return the approver of a supervisor in this process. `names_runs` is that of `TerminalApprover`."""
    return AttachedApprover(TerminalApprover(printer, names_runs=names_runs), by="user", surface="terminal")


class TerminalApprover:
    """The approver for a user at a terminal. The printer reports when it reaches a question among the blocks.

    With `names_runs`, each question names its run, because the questions are those of several trees."""

    def __init__(self, printer: Printer, stdin_fd: int = 0, *, names_runs: bool = False) -> None:
        self._names_runs = names_runs
        self._printer = printer
        self._lines = LineReader(stdin_fd)
        self._waiting: dict[str, _Waiting] = {}
        self._current: _Waiting | None = None
        self._is_open = False
        self._is_leaving = False
        printer.report_questions(self.mark_shown)

    def leave(self) -> None:
        """Record that the user is leaving. Questions cancelled from now on stay open on other terminals, so the
        approver does not report them as no longer needed."""
        self._is_leaving = True

    async def __call__(self, question: Approval) -> Allow | Deny:
        waiting = self._waiting[question.id] = _Waiting(question)
        try:
            if self._is_open:
                self._show_waiting()
            while True:
                self._give_turn(self._current or waiting)
                await waiting.turn.wait()
                if waiting.granted:
                    return Allow()
                with suppress(TimeoutError):  # a printer that shows other events never reaches this question
                    async with asyncio.timeout(SHOWN_SECONDS):
                        await waiting.shown.wait()
                answer = await self._ask(question)
                if not isinstance(answer, _Waiting):
                    return answer
                waiting.turn.clear()
                self._give_turn(answer)
        finally:
            del self._waiting[question.id]
            if self._current is waiting:
                self._current = None
                if self._waiting:
                    self._give_turn(next(iter(self._waiting.values())))

    def _give_turn(self, waiting: _Waiting) -> None:
        self._current = waiting
        waiting.turn.set()

    def mark_shown(self, approval_id: str) -> None:
        """Ask a question from now on, because everything before it is on the screen."""
        waiting = self._waiting.get(approval_id)
        if waiting is not None:
            waiting.shown.set()

    async def _ask(self, question: Approval) -> Allow | Deny | _Waiting:
        """Return the answer, or the question that the user wants to see first."""
        self._show_question(question)
        if len(self._waiting) > 1:
            self._show_waiting(listed=True)
        self._lines.discard_typed()
        self._is_open = True
        try:
            while True:
                is_in_words = question.tool == INPUT_REQUIRED and question.args.keys() == {"question"}
                line = await self._read_line(ANSWER if is_in_words else PROMPT)
                if line is None:
                    self._printer.show_note(LEFT.format(name=question.id if self._names_runs else question.number))
                    raise ApproverLeft
                typed = parse_answer(line)
                if is_in_words and line.strip():  # a "no" denies, with the whole line as the reason
                    words = line.strip()
                    return Deny(words) if isinstance(typed, Deny) else Allow(args={**question.args, "answer": words})
                answer = await self._perform(typed, question) if isinstance(typed, QuestionAction) else typed
                if answer is not None:
                    return answer
        except asyncio.CancelledError:
            self._printer.end_prompt(answered=False)
            if not self._is_leaving:
                self._printer.show_note("(no longer needed)")
            raise
        finally:
            self._is_open = False

    async def _read_line(self, prompt: str) -> str | None:
        self._printer.show_prompt(prompt)
        line = await self._lines.read_line()
        self._printer.end_prompt(answered=line is not None)
        return line

    async def _perform(self, action: QuestionAction, question: Approval) -> Allow | Deny | _Waiting | None:
        """Perform a typed action. Return None if the question still needs an answer."""
        match action.what:
            case "help":
                self._printer.show_note(HELP.format(always=ALWAYS_HELP if question.rule else ""))
                if len(self._waiting) > 1:
                    self._show_waiting(listed=True)
            case "view":
                self._show_question(question, whole=True)
            case "always":
                return await self._allow_always(question)
            case "pending":
                return await self._allow_pending(question)
            case "edit":
                return await self._edit_args(question)
            case "go":
                found = [each for each in self._waiting.values() if each.question.number == action.number]
                if found:  # several trees may have a question with this number: go to the next one
                    place = found.index(self._current) + 1 if self._current in found else 0
                    return found[place % len(found)]
                self._printer.show_note(f"no question {action.number} is waiting")
        return None

    async def _allow_always(self, question: Approval) -> Allow | None:
        self._printer.show_note(describe_rule(question))
        return Allow("project") if question.rule and await self._confirm() else None

    async def _allow_pending(self, question: Approval) -> Allow | None:
        """Allow all questions the run has open now. Questions that arrive while the user reads are excluded."""
        run = question.tree, question.run
        pending = [each for each in self._waiting.values() if (each.question.tree, each.question.run) == run]
        for waiting in pending:
            self._show_question(waiting.question)
        if not await self._confirm():
            return None
        for waiting in pending:
            waiting.granted = True
            waiting.turn.set()
        return Allow()

    async def _confirm(self) -> bool:
        line = await self._read_line(SURE)
        return line is not None and parse_answer(line) == Allow()

    async def _edit_args(self, question: Approval) -> Allow | None:
        """Let the user edit the arguments and allow the changed call. Return None if nothing changed or editing
        failed."""
        args: dict[str, Any] | str | None
        command = find_editor()
        if command:
            with self._printer.hold_output():
                args = await edit_in_editor(command, question.args, fd=self._lines.fd)
        else:
            line = await self._read_line(JSON)
            args = parse_args(line) if line is not None and line.strip() else None
        if isinstance(args, str):
            self._printer.show_note(args)
            return None
        if args is None or not is_edit(question.args, args):
            self._printer.show_note(UNCHANGED)
            return None
        self._show_question(msgspec.structs.replace(question, args=args, preview=""), whole=True)
        return Allow(args=args) if await self._confirm() else None

    def _show_question(self, question: Approval, *, whole: bool = False) -> None:
        self._printer.show_question(question, whole=whole, asker=self._names_runs)

    def _show_waiting(self, *, listed: bool = False) -> None:
        more = len(self._waiting) - 1
        lines = [f"({more} more question{'' if more == 1 else 's'} waiting)"]
        others = [waiting.question for waiting in self._waiting.values() if listed and waiting is not self._current]
        for asked in others[:LISTED]:
            run = f" of {asked.tree}/{asked.run}" if self._names_runs else ""
            lines.append(f"  {asked.number}. {format_question(asked)}{run}")
        self._printer.show_note("\n".join(lines))
