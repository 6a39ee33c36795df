"""One tree, run in this process and shown on this terminal while it happens. Knows nothing of arguments or exit codes.

The screen is a watcher like any other: it is fed from the log, in a thread of its own unless questions are asked on
it, so that a terminal that does not take its text holds up no run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from retinue.build.parts import Parts
from retinue.concurrency import TaskOwner
from retinue.core.control import Control, RunHandle
from retinue.core.errors import LogError, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.profiles import Profile
from retinue.core.results import Result
from retinue.log.runs import Runs
from retinue.surfaces.cli.live_screen import LiveScreen, open_live_screen
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.approver import TerminalApprover
from retinue.surfaces.printer.header import Header
from retinue.surfaces.printer.printer import Printer, PrintThread

LAST_WORDS_SECONDS = 1.0
Begin = Callable[[Control], Awaitable[RunHandle]]
LOGGED_SECONDS = 10.0
_TELEMETRY_LOGGERS = ("opentelemetry", "retinue.telemetry")


@dataclass(frozen=True)
class Shown:
    """The outcome of a tree. `stuck` says that the screen took no more text; `log_error` is why the log failed."""

    result: Result[Any]
    runs: Runs
    stuck: bool = False
    log_error: str | None = None


def load_control(parts: Parts) -> Control:
    """Open a Control of this process. Most of retinue is imported here, behind the header that is on screen."""
    from retinue.build.supervisor import open_control

    return open_control(parts)


async def drive(  # noqa: PLR0913 - what one command wants of it, another does not
    parts: Parts,
    begin: Begin,
    *,
    printer: Printer,
    terminal: bool = False,
    live: bool = False,
    serve: bool = True,
    after: int = 0,
    announce: Callable[[RunHandle], None] | None = None,
    profile: Profile | None = None,
    header: Header | None = None,
    make: Callable[[Parts], Control] = load_control,
) -> Shown:
    """Run what `begin` starts to its end. `terminal` asks on the printer's terminal, `live` shows the live view there
    and asks in it, `serve` starts a control server for other processes, `announce` is told of the run when its first
    event is written; events up to `after` are known and not shown. `profile` is that of the run, where it is known,
    and `header` what the live view shows of it before it has started.
    Events are written in every case."""
    async with AsyncExitStack() as screens:
        screen: LiveScreen | BlockScreen
        say: Callable[[str], object] = printer.show_note
        if live:
            view = open_live_screen(level=printer.level, after=after, header=header)
            screen = await screens.enter_async_context(view)
            say = screen.view.show_note
            parts = replace(parts, approver=None)  # the view answers, as one who attends
        else:
            screen = BlockScreen(printer, in_thread=not terminal, after=after)
            screens.callback(screen.thread.close)
            parts = replace(parts, approver=TerminalApprover(printer)) if terminal else parts
        control = make(parts)
        try:
            await control.prepare(profile, say)
        except BaseException:  # Ctrl-C while servers were waited for
            await control.close()
            raise
        shown: Shown | None = None
        with Signals() as signals, catch_telemetry_warnings() as telemetry:
            servers = AsyncExitStack()
            try:
                if serve and parts.state is not None:
                    from retinue.build.servers import serve_control

                    await serve_control(servers, control, parts, say)
                if live:
                    await servers.enter_async_context(control.attend())
                run = await begin(control)
                if after:
                    say(f"{run.tree} continues after event {after}; `retinue tail` shows the earlier ones")
                if announce is not None:
                    await _wait_until_logged(run)
                    announce(run)
                shown = await _show_to_end(run, screen, signals)
                await screens.aclose()
                shown = replace(shown, stuck=shown.stuck or screen.is_stuck)
                await _wait_for_other_trees(control, signals, printer)
            finally:
                try:
                    await servers.aclose()
                    await control.close()
                except LogError as error:
                    if shown is None:
                        raise
                    shown = replace(shown, log_error=str(error))
    if telemetry.first and not shown.stuck:
        printer.show_note(f"warning: telemetry: {telemetry.first}")
    return shown


async def _wait_for_other_trees(control: Control, signals: Signals, printer: Printer) -> None:
    """Wait for trees that other terminals resumed here, until Ctrl-C."""
    while (live := await control.list_trees(live=True)) and not signals.killed.is_set():
        tree = live[0]
        printer.show_note(f"{tree.tree} still runs here, for another terminal; Ctrl-C cancels it")
        signals.aim(partial(control.cancel, tree.tree, tree.root), partial(control.kill, tree.tree), printer.show_note)
        await control.wait(tree.tree, tree.root)


async def _wait_until_logged(run: RunHandle) -> None:
    """Wait until the run can be found in the log. A log that fails is reported elsewhere."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOGGED_SECONDS):
            await run.wait_until_logged()


async def _show_to_end(run: RunHandle, screen: LiveScreen | BlockScreen, signals: Signals) -> Shown:
    """Show what happens in the tree of a run, and wait for the run's ending."""
    tasks = TaskOwner()
    screen.attach(run, signals)
    showing = tasks.start(screen.show_tree(run))
    result = await run.result()
    if not await _is_ending_logged(run, screen.runs):
        showing.cancel()
    killed = tasks.start(signals.killed.wait())
    await asyncio.wait({showing, killed}, return_when=asyncio.FIRST_COMPLETED)
    if killed.done():  # a screen that takes its text has it at once, another one is not waited for
        await asyncio.wait({showing}, timeout=LAST_WORDS_SECONDS)
    killed.cancel()
    return Shown(result, screen.runs, stuck=not showing.done())


async def _is_ending_logged(run: RunHandle, runs: Runs) -> bool:
    """Return whether the log has the ending. A log that failed never gets it; then there is nothing to wait for."""
    shown = runs.runs.get(run.number)
    if shown is not None and shown.ended is not None:
        return True
    try:
        return (await run.control.describe_run(run.tree, run.number)).status is not None
    except RetinueError:  # the log cannot be read, or has nothing of the tree
        return False


class BlockScreen:
    """A tree as the blocks of a printer. Has the methods of `LiveScreen`."""

    is_stuck = False

    def __init__(self, printer: Printer, *, in_thread: bool, after: int) -> None:
        self.runs = Runs("")
        self.thread = PrintThread(in_thread=in_thread)
        self._printer = printer
        self._after = after

    def attach(self, run: RunHandle, signals: Signals) -> None:
        """Show the tree of this run from now on, and aim signals at it."""
        self.runs = Runs(run.tree)
        signals.aim(partial(run.control.cancel, run.tree, run.number), partial(run.control.kill, run.tree), self._say)

    async def show_tree(self, run: RunHandle) -> None:
        """Print what happens in the tree of a run to its end."""
        async for item in run.control.watch(run.tree, deltas=self._printer.shows_deltas):
            if not isinstance(item, Delta):
                self.runs.apply(item)
            await self.thread.enqueue(self._show, item)
        await self.thread.drain()

    def _show(self, item: Event | Delta) -> None:
        if isinstance(item, Delta):
            self._printer.show_delta(item)
        elif item.seq <= self._after:
            self._printer.recall_event(item)
        else:
            self._printer.show_event(item)

    def _say(self, text: str) -> None:
        self.thread.submit(self._printer.show_note, text)


class ServerScreen:
    """The trees of a server as the blocks of a printer: where another tree's turn begins, its label stands above."""

    def __init__(self, printer: Printer, *, in_thread: bool = True) -> None:
        self.thread = PrintThread(in_thread=in_thread)
        self._printer = printer
        self._shown = ""

    def say(self, text: str) -> None:
        """Print a line of the server itself."""
        self.thread.submit(self._printer.show_note, safe.escape_line(text))

    def begin_tree(self, tree: str, text: str) -> None:
        """Print a line about a tree that begins, which needs no label then."""
        self.say(text)
        self._shown = tree

    def print_event(self, event: Event, label: str) -> None:
        """Print an event of a tree. Must be called in the thread."""
        if self._printer.show_event(event, below="" if self._shown == event.tree else f"-- {safe.escape_line(label)}"):
            self._shown = event.tree


async def kill_trees(control: Control) -> None:
    """Kill every tree that runs in this process."""
    for tree in await control.list_trees(live=True):
        await control.kill(tree.tree)


class TelemetryWarnings(logging.Handler):
    """A log handler that keeps the first warning, since later ones mostly repeat it; ours go before the library's."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first or record.name == _TELEMETRY_LOGGERS[-1]:
            self.first = record.getMessage()


@contextmanager
def catch_telemetry_warnings() -> Iterator[TelemetryWarnings]:
    """Keep the warnings of telemetry off the live screen."""
    words, loggers = TelemetryWarnings(logging.WARNING), [logging.getLogger(name) for name in _TELEMETRY_LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(words)
    try:
        yield words
    finally:
        for logger, propagated in zip(loggers, before, strict=True):
            logger.removeHandler(words)
            logger.propagate = propagated
