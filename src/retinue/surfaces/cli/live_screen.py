"""The live view of one tree, whose keys and signals become commands to a Control.

The first Ctrl-C asks what to cancel, the second cancels the tree, the third kills it. If another surface answered a
question first, the view tells the user.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from retinue.core.approvals import Approval, Decision, describe_closing
from retinue.core.control import Control, RunHandle
from retinue.core.errors import RetinueError
from retinue.core.events import Delta, Event
from retinue.log.questions import find_closing
from retinue.log.runs import Runs
from retinue.surfaces.cli import output
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer import colors
from retinue.surfaces.printer.header import Header
from retinue.surfaces.printer.live_view import LiveView
from retinue.surfaces.printer.printer import Level
from retinue.surfaces.printer.screen import Screen
from retinue.surfaces.printer.terminal import Terminal

AT_ONCE_SECONDS = 0.02  # of folding events, before keys and frames get their turn
BY = "user"
SURFACE = "terminal"
TOO_LATE = "somebody else was first: question {number} {what}"
Unsent = tuple[list[str], str]  # the entered texts, and the text in the input line
T = TypeVar("T")


async def pace_items(items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Yield `items`. However many come at once, keys and frames get their turn between them."""
    loop = asyncio.get_running_loop()
    last = loop.time()
    async for item in items:
        yield item
        if loop.time() - last > AT_ONCE_SECONDS:
            await asyncio.sleep(0)
            last = loop.time()


class LiveScreen:
    """A live view on this terminal. Its keys act on the Control of the run that `attach` was called with.

    With `talks` it has an input line. The texts entered there wait in `typed`, also those of a user who is faster than
    the start of the run."""

    def __init__(self, screen: Screen, *, level: Level, after: int = 0, talks: bool = False) -> None:
        self.screen = screen
        self.typed: asyncio.Queue[str] = asyncio.Queue()
        self._control: Control | None = None
        self._tree = ""
        self.view = LiveView(
            screen,
            level=level,
            after=after,
            answer=self.send_answer,
            cancel=self._send_cancel,
            submit=self.typed.put_nowait if talks else None,
        )

    @property
    def runs(self) -> Runs:
        """Return the runs of the tree on screen."""
        return self.view.activity.runs

    @property
    def is_stuck(self) -> bool:
        """Return True if the terminal of this closed screen did not take the last text."""
        return self.screen.is_stuck

    def take_unsent(self) -> Unsent:
        """Remove and return the texts that were not taken, and return the text in the input line."""
        texts = []
        while not self.typed.empty():
            texts.append(self.typed.get_nowait())
        return texts, self.view.input.text

    def restore_unsent(self, unsent: Unsent) -> None:
        """Restore what `take_unsent` of an earlier screen returned."""
        texts, draft = unsent
        for text in texts:
            self.typed.put_nowait(text)
        self.view.input.replace_text(draft)

    def attach(self, run: RunHandle, signals: Signals) -> None:
        """Show the tree of `run` from now on, and direct keys and signals to it."""
        self._control, self._tree = run.control, run.tree
        self.view.show_tree(run.tree)
        signals.set_actions(
            partial(run.control.cancel, run.tree, run.number),
            partial(run.control.kill, run.tree),
            self._say,
            ask=lambda: self.view.ask_cancel(signals.forget_question),
            leave=self.screen.terminal.restore,
        )

    async def show_tree(self, run: RunHandle) -> None:
        """Show the events of the tree of a run until the tree has ended."""
        async with aclosing(run.control.watch(run.tree, deltas=True)) as items:
            await self.show_items(items)

    async def show_items(self, items: AsyncIterator[Event | Delta]) -> None:
        """Show events and deltas until there are no more."""
        async for item in pace_items(items):
            self.view.apply(item)

    async def close(self) -> None:
        """Restore the terminal. Does nothing if the screen is closed already."""
        await self.screen.close()

    def _say(self, text: str) -> None:
        self.view.end_cancel()
        self.view.show_note(text)

    def send_answer(self, question: Approval, decision: Decision) -> None:
        """Answer a question in the background. A note tells the user if the answer fails or comes too late."""
        self.screen.tasks.start(self._answer(question, decision))

    async def _answer(self, question: Approval, decision: Decision) -> None:
        if self._control is None:
            return
        try:
            answered = await self._control.answer(question.id, decision, by=BY, digest=question.digest, surface=SURFACE)
            closed = None
            if answered != "taken":
                async with aclosing(self._control.watch(question.tree)) as events:
                    closed = await find_closing(events, question.id)
        except RetinueError as error:
            self.view.show_note(str(error))
            self.view.reopen_question(question)
            return
        if closed is not None:
            self.view.show_note(TOO_LATE.format(number=question.number, what=describe_closing(closed)))

    def _send_cancel(self, run: int) -> None:
        self.screen.tasks.start(self._cancel(run))

    async def _cancel(self, run: int) -> None:
        if self._control is not None:
            with suppress(RetinueError):
                await self._control.cancel(self._tree, run)


@asynccontextmanager
async def open_live_screen(
    *, level: Level, after: int = 0, talks: bool = False, header: Header | None = None
) -> AsyncIterator[LiveScreen]:
    """Open the live view on this terminal. Other output to stderr appears after the view is closed. `talks` is that of
    `LiveScreen`.

    An exception ends the process if the terminal is stuck: its message would hang on the terminal."""
    screen = Screen(Terminal(), color=colors.wants_color(sys.stderr))
    live = LiveScreen(screen, level=level, after=after, talks=talks)
    if header is not None:
        live.view.show_header(header)
    screen.open()
    try:
        try:
            yield live
        finally:
            await live.close()
    except BaseException:
        if live.is_stuck:
            output.exit_stuck()
        raise
