"""One tree, run in this process and shown live on this terminal. Knows no command line options and no exit codes.

The screen watches the log like any other watcher. Blocks are printed in a thread, so that a blocked terminal delays no
run, unless questions are asked on that terminal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from retinue.build.parts import Parts
from retinue.concurrency import TaskOwner
from retinue.core.changes import RunCopy
from retinue.core.control import Control, RunHandle
from retinue.core.errors import LogError, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.profiles import COPIES, Profile
from retinue.core.results import Result
from retinue.log.runs import Runs
from retinue.surfaces.cli.host_process import open_process
from retinue.surfaces.cli.live_screen import LiveScreen, open_live_screen
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer.approver import attach_terminal
from retinue.surfaces.printer.header import Header
from retinue.surfaces.printer.printer import Printer, PrintThread

LAST_WORDS_SECONDS = 1.0
Begin = Callable[[Control], Awaitable[RunHandle]]
LOGGED_SECONDS = 10.0
_TELEMETRY_LOGGERS = ("opentelemetry", "retinue.telemetry")


class UnappliedChanges(NamedTuple):
    """The changes of the run `name` (TREE/N) in this number of files, which were not applied."""

    name: str
    files: int


@dataclass(frozen=True)
class ShownTree:
    """A tree that was shown to its end. `unapplied` are the changes that the user can apply. `stuck` is True if the
    terminal took no more text; `log_error` is the error of the log."""

    result: Result[Any]
    runs: Runs
    unapplied: Sequence[UnappliedChanges] = ()
    stuck: bool = False
    log_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Display:
    """The way a tree is shown on the terminal of `printer`.

    `asks` asks questions there, line by line. `live` shows the live view instead, which asks too; it shows `header`
    until the run has started. Events up to sequence number `after` are not shown."""

    printer: Printer
    asks: bool = False
    live: bool = False
    after: int = 0
    header: Header | None = None


async def run_and_show(
    parts: Parts,
    begin: Begin,
    display: Display,
    *,
    serves: bool = True,
    announce: Callable[[RunHandle], None] | None = None,
    profile: Profile | None = None,
    make: Callable[[Parts], Control] | None = None,
) -> ShownTree:
    """Run the tree that `begin` starts to its end, and show it.

    `announce` is called with the run once its first event is in the log. `profile` is the profile of the run, if it is
    known in advance. `serves` and `make` are those of `open_process`."""
    printer, live, after = display.printer, display.live, display.after
    shown: ShownTree | None = None
    async with _open_screen(display) as screen:
        say = screen.view.show_note if isinstance(screen, LiveScreen) else printer.show_note
        if live:
            parts = replace(parts, approver=None)  # the live view answers: it is registered by `attend` below
        elif display.asks:
            parts = replace(parts, approver=attach_terminal(printer))
        process = open_process(parts, say, serves=serves, profile=profile, make=make)
        with catch_telemetry_warnings() as telemetry:
            try:
                async with process as (control, signals), control.attend() if live else nullcontext():
                    run = await begin(control)
                    if after:
                        say(f"{run.tree} continues after event {after}; `retinue tail` shows the earlier ones")
                    if announce is not None:
                        await _wait_until_logged(run)
                        announce(run)
                    shown = await _show_to_end(run, screen, signals)
                    await screen.close()
                    seen = shown.runs.runs.values()  # a stuck screen may not have seen all
                    may_have_copy = any(each.ended is None or each.spawned.workspace_kind in COPIES for each in seen)
                    unapplied = await find_unapplied(shown.result, control) if may_have_copy else ()
                    shown = replace(shown, stuck=shown.stuck or screen.is_stuck, unapplied=unapplied)
                    await _wait_for_other_trees(control, signals, printer, stuck=shown.stuck)
            except LogError as error:
                if shown is None:
                    raise
                shown = replace(shown, log_error=str(error))
    if telemetry.first and not shown.stuck:
        printer.show_note(f"warning: telemetry: {telemetry.first}")
    return shown


@asynccontextmanager
async def _open_screen(display: Display) -> AsyncIterator[LiveScreen | BlockScreen]:
    if display.live:
        async with open_live_screen(level=display.printer.level, after=display.after, header=display.header) as live:
            yield live
        return
    screen = BlockScreen(display.printer, in_thread=not display.asks, after=display.after)
    try:
        yield screen
    finally:
        await screen.close()


async def _wait_for_other_trees(control: Control, signals: Signals, printer: Printer, *, stuck: bool) -> None:
    """Wait for trees that other terminals resumed in this process, until Ctrl-C. Prints nothing if `stuck`."""
    say = (lambda _: None) if stuck else printer.show_note
    while (live := await control.list_trees(live=True)) and not signals.killed.is_set():
        tree = live[0]
        say(f"{tree.tree} still runs here, for another terminal; Ctrl-C cancels it")
        signals.set_actions(partial(control.cancel, tree.tree, tree.root), partial(control.kill, tree.tree), say)
        await control.wait(tree.tree, tree.root)


async def _wait_until_logged(run: RunHandle) -> None:
    """Wait until the run is in the log, for a limited time. The end of the run reports a log that failed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOGGED_SECONDS):
            await run.wait_until_logged()


async def _show_to_end(run: RunHandle, screen: LiveScreen | BlockScreen, signals: Signals) -> ShownTree:
    """Show the tree of a run until the run has ended."""
    tasks = TaskOwner()
    screen.attach(run, signals)
    showing = tasks.start(screen.show_tree(run))
    result = await run.result()
    last = screen.runs.runs.get(run.number)
    is_logged = last is not None and last.ended is not None
    with suppress(RetinueError):  # the log cannot be read, or does not have the tree
        is_logged = is_logged or (await run.control.describe_run(run.tree, run.number)).status is not None
    if not is_logged:
        showing.cancel()  # the log failed, so the screen would wait for the end forever
    killed = tasks.start(signals.killed.wait())
    await asyncio.wait({showing, killed}, return_when=asyncio.FIRST_COMPLETED)
    if killed.done():  # a working terminal needs no time for the rest, and a blocked one gets no more than this
        await asyncio.wait({showing}, timeout=LAST_WORDS_SECONDS)
    killed.cancel()
    return ShownTree(result, screen.runs, stuck=not showing.done())


async def find_unapplied(result: Result[Any], control: Control) -> list[UnappliedChanges]:
    """Return the changes in the tree of `result` that were not applied yet. Changes whose records cannot be read any
    more do not count as applied: the answer must not be lost."""
    copies: dict[int | None, RunCopy] = {}
    with suppress(OSError, RetinueError):
        copies = {copy.run: copy for copy in await control.list_copies(result.tree)}
    return list(_find_unapplied(result, copies))


def _find_unapplied(result: Result[Any], copies: Mapping[int | None, RunCopy]) -> Iterator[UnappliedChanges]:
    """Yield the unapplied changes of each run. `copies` holds the copied workspaces by their runs.

    Children of a run with changes or of a team are skipped: their changes went into the copy of that run, and a team
    presents only the changes of one member."""
    copy = copies.get(result.run if result.team is None else result.team.presented)
    count = result.changed_count if copy is None or copy.unapplied is None else copy.unapplied
    if count:
        yield UnappliedChanges(f"{result.tree}/{result.run}", count)
    if not (count or result.changed_count or result.team is not None):
        for child in result.children:
            yield from _find_unapplied(child, copies)


class BlockScreen:
    """A screen that prints a tree as blocks. Has the methods of `LiveScreen`."""

    is_stuck = False

    def __init__(self, printer: Printer, *, in_thread: bool, after: int) -> None:
        self.runs = Runs("")
        self.thread = PrintThread(in_thread=in_thread)
        self._printer = printer
        self._after = after

    def attach(self, run: RunHandle, signals: Signals) -> None:
        """Print the tree of `run` from now on, and direct signals to it."""
        self.runs = Runs(run.tree)
        signals.set_actions(
            partial(run.control.cancel, run.tree, run.number), partial(run.control.kill, run.tree), self._say
        )

    async def show_tree(self, run: RunHandle) -> None:
        """Print the events of the tree of a run until the tree has ended."""
        async for item in run.control.watch(run.tree, deltas=self._printer.shows_deltas):
            if not isinstance(item, Delta):
                self.runs.apply(item)
            await self.thread.enqueue(self._show, item)
        await self.thread.drain()

    async def close(self) -> None:
        """Print no more."""
        self.thread.close()

    def _show(self, item: Event | Delta) -> None:
        if isinstance(item, Delta):
            self._printer.show_delta(item)
        elif item.seq <= self._after:
            self._printer.recall_event(item)
        else:
            self._printer.show_event(item)

    def _say(self, text: str) -> None:
        self.thread.submit(self._printer.show_note, text)


class TelemetryWarnings(logging.Handler):
    """A log handler that keeps one warning, because later ones mostly repeat it.

    Keeps the first warning of the library, unless Retinue's own logger has a warning. `say` shows each warning that it
    keeps, at once."""

    first = ""

    def __init__(self, say: Callable[[str], object] | None) -> None:
        super().__init__(logging.WARNING)
        self._say, self._loop = say, asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first or record.name == _TELEMETRY_LOGGERS[-1]:
            self.first = record.getMessage()
            if self._say is not None:
                with suppress(RuntimeError):  # the event loop is closed
                    self._loop.call_soon_threadsafe(self._say, f"warning: telemetry: {self.first}")


@contextmanager
def catch_telemetry_warnings(say: Callable[[str], object] | None = None) -> Iterator[TelemetryWarnings]:
    """Keep the warnings of telemetry off the screen, and one of them for later. A server passes `say` to show it at
    once."""
    words, loggers = TelemetryWarnings(say), [logging.getLogger(name) for name in _TELEMETRY_LOGGERS]
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
