"""The approver at a terminal: one question at a time, in the order they came, answered with a line.

Reads the terminal only while a question is open. What was typed before a question was shown is no answer to it. The
others that wait are numbered, and a number goes there. Fails closed: the end of the input is a no.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from retinue.core.approvals import Allow, Approval, Deny
from retinue.log.styled_text import question_spans
from retinue.surfaces.printer import editor, safe
from retinue.surfaces.printer.answers import HELP, Wish, decide
from retinue.surfaces.printer.lines import Lines
from retinue.surfaces.printer.printer import Printer

PROMPT = "(? for more) [y]es [n]o > "
SURE = "sure? [y]es [n]o > "
JSON = "arguments as a line of JSON > "
SHOWN_SECONDS = 1.0
LISTED = 20
NOBODY = "nobody answered: the input has ended"


class _Place:
    """One question's place: `shown` when the printer is there, `turn` when it is to be asked, or was `granted` beside
    another one."""

    def __init__(self, question: Approval) -> None:
        self.question = question
        self.shown = asyncio.Event()
        self.turn = asyncio.Event()
        self.granted = False


class TerminalApprover:
    """Call it with a question. The questions' place among the blocks is the printer's to tell."""

    by = "user"

    def __init__(self, printer: Printer, stdin_fd: int = 0) -> None:
        self._printer = printer
        self._lines = Lines(stdin_fd)
        self._places: dict[str, _Place] = {}
        self._current: _Place | None = None
        self._open = False
        printer.on_asked = self._reached

    async def __call__(self, question: Approval) -> Allow | Deny:
        place = self._places[question.id] = _Place(question)
        try:
            if self._open:
                self._tell_waiting()
            while True:
                self._give_turn(self._current or place)
                await place.turn.wait()
                if place.granted:
                    return Allow()
                with suppress(TimeoutError):  # a printer that shows other events never reaches this one
                    async with asyncio.timeout(SHOWN_SECONDS):
                        await place.shown.wait()
                answer = await self._ask(question)
                if not isinstance(answer, _Place):
                    return answer
                place.turn.clear()
                self._give_turn(answer)
        finally:
            del self._places[question.id]
            if self._current is place:
                self._current = None
                for following in self._places.values():
                    self._give_turn(following)
                    break

    def _give_turn(self, place: _Place) -> None:
        self._current = place
        place.turn.set()

    def _reached(self, approval_id: str) -> None:
        place = self._places.get(approval_id)
        if place is not None:
            place.shown.set()

    async def _ask(self, question: Approval) -> Allow | Deny | _Place:
        """The answer, or the question that the person wants to see first."""
        self._printer.question(question)
        if len(self._places) > 1:
            self._tell_waiting(listed=True)
        self._lines.forget()
        self._open = True
        try:
            while True:
                line = await self._read(PROMPT)
                if line is None:
                    return Deny(NOBODY)
                said = decide(line)
                answer = await self._do(said, question) if isinstance(said, Wish) else said
                if answer is not None:
                    return answer
        except asyncio.CancelledError:
            self._printer.end_prompt(answered=False)
            self._printer.note("(no longer needed)")
            raise
        finally:
            self._open = False

    async def _read(self, prompt: str) -> str | None:
        """A line typed behind the prompt."""
        self._printer.prompt(prompt)
        line = await self._lines.next()
        self._printer.end_prompt(answered=line is not None)
        return line

    async def _do(self, wish: Wish, question: Approval) -> Allow | Deny | _Place | None:
        match wish.what:
            case "help":
                self._printer.note(HELP)
                if len(self._places) > 1:
                    self._tell_waiting(listed=True)
            case "always":
                return await self._always(question)
            case "pending":
                return await self._pending(question)
            case "edit":
                return await self._edit(question)
            case "go":
                for place in self._places.values():
                    if place.question.number == wish.number:
                        return place
                self._printer.note(f"no question {wish.number} is waiting")
        return None

    async def _always(self, question: Approval) -> Allow | None:
        if not question.rule:
            self._printer.note("no rule says just this: answer y, r or t")
            return None
        self._printer.note(f"writes to retinue.yaml, to allow it from now on: {question.rule}")
        line = await self._read(SURE)
        return Allow("project") if line is not None and decide(line) == Allow() else None

    async def _pending(self, question: Approval) -> Allow | None:
        """Yes to all that its run asks now. What comes while the person reads is not meant."""
        meant = [place for place in self._places.values() if _same_run(place.question, question)]
        for place in meant:
            self._printer.question(place.question)
        line = await self._read(SURE)
        if line is None or decide(line) != Allow():
            return None
        for place in meant:
            place.granted = True
            place.turn.set()
        return Allow()

    async def _edit(self, question: Approval) -> Allow | None:
        args = await self._edited(question.args)
        if isinstance(args, str):
            self._printer.note(args)
            return None
        return None if args is None else Allow(args=args)

    async def _edited(self, args: dict[str, Any]) -> dict[str, Any] | str | None:
        """The arguments as the person wants them; None when they leave them, or why it did not work."""
        command = editor.chosen()
        if command:
            with self._printer.held():
                return await editor.edit(command, args, fd=self._lines.fd)
        line = await self._read(JSON)
        return editor.parsed(line) if line is not None and line.strip() else None

    def _tell_waiting(self, *, listed: bool = False) -> None:
        more = len(self._places) - 1
        lines = [f"({more} more question{'' if more == 1 else 's'} waiting)"]
        others = [place.question for place in self._places.values() if listed and place is not self._current]
        for asked in others[:LISTED]:
            spans = question_spans(asked.label, asked.tool, asked.args)[1:]
            lines.append(f"  {asked.number}. " + safe.line("".join(text for _, text in spans)))
        self._printer.note("\n".join(lines))


def _same_run(one: Approval, other: Approval) -> bool:
    return (one.tree, one.run) == (other.tree, other.run)
