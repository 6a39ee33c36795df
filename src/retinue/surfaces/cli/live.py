"""One tree, run in this process and shown on this terminal while it happens. Knows nothing of arguments or exit codes.

The screen is a watcher like any other: it is fed from the log, in a thread of its own unless questions are asked on
it, so that a terminal that does not take its text holds up no run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
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


async def load_server(servers: AsyncExitStack, control: Control, parts: Parts, say: Callable[[str], object]) -> None:
    """Start the control server of this process, which is imported here too."""
    from retinue.build.servers import serve_control

    await serve_control(servers, control, parts, say)


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
        say: Callable[[str], object] = printer.show_note
        live_screen: LiveScreen | None = None
        if live:
            live_screen = await screens.enter_async_context(
                open_live_screen(level=printer.level, after=after, header=header)
            )
            say = live_screen.view.show_note
            parts = replace(parts, approver=None)  # the view answers, as one who attends
        elif terminal:
            parts = replace(parts, approver=TerminalApprover(printer))
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
                    await load_server(servers, control, parts, say)
                if live:
                    await servers.enter_async_context(control.attend())
                run = await begin(control)
                if after:
                    say(f"{run.tree} continues after event {after}; `retinue tail` shows the earlier ones")
                if announce is not None:
                    await _wait_until_logged(run)
                    announce(run)
                screen = _Screen(run, printer, in_thread=not terminal, after=after, live=live_screen)
                shown = await screen.show_to_end(signals)
                await screens.aclose()
                if live_screen is not None and live_screen.is_stuck:
                    shown = replace(shown, stuck=True)
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


class _Screen:
    """The screen of one run: prints what happens in its tree, and waits for its ending. With `live` it is the live
    view's, else the printer's."""

    def __init__(
        self, run: RunHandle, printer: Printer, *, in_thread: bool, after: int, live: LiveScreen | None = None
    ) -> None:
        self._run = run
        self._live = live
        self._printer = printer
        self._thread = PrintThread(in_thread=in_thread)
        self._runs = Runs(run.tree)
        self._after = after
        self._tasks = TaskOwner()

    async def show_to_end(self, signals: Signals) -> Shown:
        printing = self._tasks.start(self._print() if self._live is None else self._show_live(self._live))
        control, tree = self._run.control, self._run.tree
        if self._live is None:
            signals.aim(partial(control.cancel, tree, self._run.number), partial(control.kill, tree), self._say)
        else:
            self._live.attach(self._run, signals)
            self._runs = self._live.view.activity.runs
        result = await self._run.result()
        if not await self._is_ending_logged():
            printing.cancel()
        killed = self._tasks.start(signals.killed.wait())
        await asyncio.wait({printing, killed}, return_when=asyncio.FIRST_COMPLETED)
        if killed.done():  # a screen that takes its text has it at once, another one is not waited for
            await asyncio.wait({printing}, timeout=LAST_WORDS_SECONDS)
        killed.cancel()
        self._thread.close()
        return Shown(result, self._runs, stuck=not printing.done())

    async def _print(self) -> None:
        async for item in self._run.control.watch(self._run.tree, deltas=self._printer.shows_deltas):
            if not isinstance(item, Delta):
                self._runs.apply(item)
            await self._thread.enqueue(self._show, item)
        await self._thread.drain()

    async def _show_live(self, live: LiveScreen) -> None:
        async with aclosing(self._run.control.watch(self._run.tree, deltas=True)) as items:
            await live.show_items(items)

    def _show(self, item: Event | Delta) -> None:
        if isinstance(item, Delta):
            self._printer.show_delta(item)
        elif item.seq <= self._after:
            self._printer.recall_event(item)
        else:
            self._printer.show_event(item)

    def _say(self, text: str) -> None:
        self._thread.submit(self._printer.show_note, text)

    async def _is_ending_logged(self) -> bool:
        """Return whether the log has the ending. A log that failed never gets it; then there is nothing to wait for."""
        shown = self._runs.runs.get(self._run.number)
        if shown is not None and shown.ended is not None:
            return True
        try:
            return (await self._run.control.describe_run(self._run.tree, self._run.number)).status is not None
        except RetinueError:  # the log cannot be read, or has nothing of the tree
            return False


class TelemetryWarnings(logging.Handler):
    """A log handler that keeps the first warning, since later ones mostly repeat it; ours go before the library's."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first or record.name == _TELEMETRY_LOGGERS[-1]:
            self.first = record.getMessage()


@contextmanager
def catch_telemetry_warnings() -> Iterator[TelemetryWarnings]:
    """Keep the warnings of telemetry off the live screen."""
    words, loggers = TelemetryWarnings(), [logging.getLogger(name) for name in _TELEMETRY_LOGGERS]
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
