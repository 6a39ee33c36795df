"""One tree, run in this process and shown on this terminal while it happens. Knows nothing of arguments or exit codes.

The screen is a watcher like any other: it is fed from the log, in a thread of its own unless questions are asked on
it, so that a terminal that does not take its text holds up no run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retinue import build
from retinue.concurrency import TaskOwner
from retinue.control.server import ControlServer
from retinue.core.errors import LogError, RetinueError
from retinue.core.events import Delta, Event, RunEnded
from retinue.core.profiles import Profile
from retinue.core.results import Result
from retinue.log.runs import Runs
from retinue.supervisor.run import Run
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.cli.live_line import Speech
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.cli.telemetry import catch_telemetry_warnings
from retinue.surfaces.printer.approver import TerminalApprover
from retinue.surfaces.printer.printer import Printer, PrintThread

LAST_WORDS_SECONDS = 1.0
Begin = Callable[[Supervisor], Run | Awaitable[Run]]
LOGGED_SECONDS = 10.0


@dataclass(frozen=True)
class Shown:
    """The outcome of a tree. `stuck` says that the screen took no more text; `log_error` is why the log failed."""

    result: Result[Any]
    runs: Runs
    stuck: bool = False
    log_error: str | None = None


async def drive(  # noqa: PLR0913 - what one command wants of it, another does not
    parts: build.Parts,
    begin: Begin,
    *,
    printer: Printer,
    terminal: bool = False,
    control: bool = True,
    after: int = 0,
    announce: Callable[[Run], None] | None = None,
    profile: Profile | None = None,
    make: Callable[[build.Parts], Supervisor] = build.make_supervisor,
) -> Shown:
    """Run what `begin` starts to its end. `terminal` asks on the printer's terminal, `control` starts a control server
    for other processes, `announce` is told of the run when its first event is written; events up to `after` are known
    and not shown. `profile` is that of the run, where it is known. Events are written in every case."""
    if terminal:
        parts = replace(parts, approver=TerminalApprover(printer))
    supervisor = make(parts)
    try:
        await supervisor.prepare(profile, printer.show_note)
    except BaseException:  # Ctrl-C while servers were waited for
        await supervisor.close()
        raise
    shown: Shown | None = None
    with Signals(supervisor) as signals, catch_telemetry_warnings() as telemetry:
        servers = AsyncExitStack()
        try:
            if control and parts.state is not None:
                await open_control(servers, supervisor, parts.state, printer.show_note)
            begun = begin(supervisor)
            node = begun if isinstance(begun, Run) else await begun
            if after:
                printer.show_note(
                    f"{node.ref.tree} continues after event {after}; `retinue tail` shows the earlier ones"
                )
            if announce is not None:
                await _wait_until_logged(supervisor, node)
                announce(node)
            shown = await _Screen(supervisor, node, printer, in_thread=not terminal, after=after).show_to_end(signals)
            await _wait_for_other_trees(supervisor, signals, printer)
        finally:
            try:
                await servers.aclose()
                await supervisor.close()
            except LogError as error:
                if shown is None:
                    raise
                shown = replace(shown, log_error=str(error))
    if telemetry.first and not shown.stuck:
        printer.show_note(f"warning: telemetry: {telemetry.first}")
    return shown


async def _wait_for_other_trees(supervisor: Supervisor, signals: Signals, printer: Printer) -> None:
    """Wait for trees that other terminals resumed here, until Ctrl-C."""
    while supervisor.trees and not signals.killed.is_set():
        tree = next(iter(supervisor.trees.values()))
        assert tree.root is not None
        printer.show_note(f"{tree.id} still runs here, for another terminal; Ctrl-C cancels it")
        signals.aim(tree.id, printer.show_note, tree.root.ref.run)
        await tree.root.join()


async def open_control(
    servers: AsyncExitStack, supervisor: Supervisor, state: Path, say: Callable[[str], object]
) -> None:
    """Open a control server for other terminals, closed with `servers`. Runs work without it: a failure warns."""
    try:
        await servers.enter_async_context(ControlServer(supervisor.control, state, unattended=supervisor.is_unattended))
    except RetinueError as error:
        say(f"warning: no control server for other terminals: {error}")


async def _wait_until_logged(supervisor: Supervisor, node: Run) -> None:
    """Wait until the run can be found in the log. A log that fails is reported elsewhere."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LOGGED_SECONDS):
            async for _ in supervisor.watch(node.ref.tree):
                return


class _Screen:
    def __init__(self, supervisor: Supervisor, node: Run, printer: Printer, *, in_thread: bool, after: int) -> None:
        self._supervisor = supervisor
        self._node = node
        self._printer = printer
        self._thread = PrintThread("retinue-screen") if in_thread else None
        self._runs = Runs(node.ref.tree)
        self._speech = Speech(printer) if printer.terminal and printer.level != "quiet" else None
        self._after = after
        self._seq = 0
        self._tasks = TaskOwner()

    async def show_to_end(self, signals: Signals) -> Shown:
        printing = self._tasks.start(self._print())
        signals.aim(self._node.ref.tree, self._say, self._node.ref.run)
        await self._node.join()
        if not await self._is_ending_logged():
            printing.cancel()
        killed = self._tasks.start(signals.killed.wait())
        await asyncio.wait({printing, killed}, return_when=asyncio.FIRST_COMPLETED)
        if killed.done():  # a screen that takes its text has it at once, another one is not waited for
            await asyncio.wait({printing}, timeout=LAST_WORDS_SECONDS)
        killed.cancel()
        if self._thread is not None:
            self._thread.close()
        return Shown(self._node.result(), self._runs, stuck=not printing.done())

    async def _print(self) -> None:
        async for item in self._supervisor.watch(self._node.ref.tree, deltas=self._speech is not None):
            if not isinstance(item, Delta):
                self._runs.apply(item)
                self._seq = item.seq
            if self._thread is None:
                self._show(item)
            else:
                await self._thread.enqueue(self._show, item)
        if self._thread is not None:
            await self._thread.drain()

    def _show(self, item: Event | Delta) -> None:
        if isinstance(item, Delta):
            if self._speech is not None:
                self._speech.hear(item)
            return
        if self._speech is not None:
            self._speech.over(item)
        if item.seq <= self._after:
            self._printer.recall_event(item)
        else:
            self._printer.show_event(item)

    def _say(self, text: str) -> None:
        if self._thread is None:
            self._printer.show_note(text)
        else:
            self._thread.submit(self._printer.show_note, text)

    async def _is_ending_logged(self) -> bool:
        """Return whether the log has the ending. A log that failed never gets it; then there is nothing to wait for."""
        ref = self._node.ref
        shown = self._runs.runs.get(ref.run)
        if shown is not None and shown.ended is not None:
            return True
        rest = await self._supervisor.log.read(ref.tree, after=self._seq)
        return any(event.run == ref.run and isinstance(event.body, RunEnded) for event in rest)
