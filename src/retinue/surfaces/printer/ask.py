"""The approver at a terminal: one question at a time, in the order they came, answered with a line.

Reads the terminal in its ordinary line mode from the event loop, without a thread, and only while a question is
open. What was typed before a question was shown is no answer to it. Fails closed: the end of the input is a no.
"""

from __future__ import annotations

import asyncio
import os
import termios
from contextlib import suppress

from retinue.core.approvals import Allow, Approval, Deny
from retinue.surfaces.printer.printer import Printer

PROMPT = "[y]es [n]o > "
SHOWN_SECONDS = 1.0
NOBODY = "nobody answered: the input has ended"


class TerminalApprover:
    """Call it with a question. The questions' place among the blocks is the printer's to tell."""

    def __init__(self, printer: Printer, stdin_fd: int = 0) -> None:
        self._printer = printer
        self._fd = stdin_fd
        self._turn = asyncio.Lock()  # hands over in the order of arrival
        self._places: dict[str, asyncio.Event] = {}
        self._open = False
        self._typed = b""
        printer.on_asked = self._reached

    async def __call__(self, question: Approval) -> Allow | Deny:
        place = self._places[question.id] = asyncio.Event()
        try:
            if self._open:
                self._tell_waiting()
            async with self._turn:
                with suppress(TimeoutError):  # a printer that shows other events never reaches this one
                    async with asyncio.timeout(SHOWN_SECONDS):
                        await place.wait()
                return await self._ask(question)
        finally:
            del self._places[question.id]

    def _reached(self, approval_id: str) -> None:
        place = self._places.get(approval_id)
        if place is not None:
            place.set()

    async def _ask(self, question: Approval) -> Allow | Deny:
        self._printer.question(question)
        if len(self._places) > 1:
            self._tell_waiting()
        self._forget_typed()
        answered = False
        self._open = True
        try:
            while True:
                self._printer.prompt(PROMPT)
                line = await self._line()
                if line is None:
                    return Deny(NOBODY)
                decision = decide(line)
                if decision is not None:
                    answered = True
                    return decision
        except asyncio.CancelledError:
            self._printer.end_prompt(answered=False)
            self._printer.note("(no longer needed)")
            raise
        finally:
            self._open = False
            self._printer.end_prompt(answered=answered)

    def _tell_waiting(self) -> None:
        more = len(self._places) - 1
        self._printer.note(f"({more} more question{'' if more == 1 else 's'} waiting)")

    def _forget_typed(self) -> None:
        if os.isatty(self._fd):
            self._typed = b""
            with suppress(termios.error):
                termios.tcflush(self._fd, termios.TCIFLUSH)

    async def _line(self) -> str | None:
        """The next line; None when there is no more."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._typed:
            ready = asyncio.Event()
            try:
                loop.add_reader(self._fd, ready.set)
            except (OSError, ValueError):  # a file or nothing at all: there is nobody behind it
                return None
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self._fd)
            try:
                chunk = os.read(self._fd, 4096)
            except BlockingIOError:
                continue
            except OSError:  # the terminal is gone
                return None
            if not chunk:
                return None
            self._typed += chunk
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode("utf-8", "replace")


def decide(line: str) -> Allow | Deny | None:
    """What a typed line means: `y`, `n`, `n` with a reason; None when it means neither."""
    word, _, reason = line.strip().partition(" ")
    match word.rstrip(",:;").lower():
        case "y" | "yes" if not reason:
            return Allow()
        case "n" | "no":
            return Deny(reason.strip())
    return None
