"""The process of `retinue watch` and of `retinue a2a serve`: a Control, and a screen that shows every tree it runs.

A server runs trees for other programs until Ctrl-C. `retinue mcp serve` has no such screen, because its stdout and
stderr belong to the client. Knows no command line options.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from retinue.build.parts import Parts
from retinue.concurrency import TaskOwner
from retinue.core.control import Control
from retinue.core.events import Delta, Event, RunEnded
from retinue.surfaces.cli.host_process import kill_trees, open_process
from retinue.surfaces.cli.live import catch_telemetry_warnings
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import Printer, PrintThread

LAST_SECONDS = 1.0  # for the last events, before the screen closes
LOOK = "`retinue show {tree}` has the answer"


@asynccontextmanager
async def open_server_process(
    parts: Parts, printer: Printer, *, serves: bool, in_thread: bool = True
) -> AsyncIterator[tuple[Control, ServerScreen, asyncio.Event]]:
    """Open a Control and a screen. Ctrl-C sets the event, and a second Ctrl-C kills all trees.

    `serves` is that of `open_process`. `in_thread` is False if questions are asked on the terminal of `printer`."""
    screen, stop = ServerScreen(printer, in_thread=in_thread), asyncio.Event()
    try:
        with catch_telemetry_warnings(screen.say):
            async with open_process(parts, screen.say, serves=serves, prepares=False) as (control, signals):
                signals.set_actions(stop.set, lambda: kill_trees(control), screen.say)
                yield control, screen, stop
    finally:
        await screen.close()


class ServerScreen:
    """A screen that prints trees as blocks. Prints a tree's label when the output switches to the tree.

    Each tree is read from a watcher of its own, so a slow terminal delays no run and misses no event."""

    def __init__(self, printer: Printer, *, in_thread: bool = True) -> None:
        self._printer = printer
        self._thread = PrintThread(in_thread=in_thread)
        self._trees = TaskOwner(on_error=lambda error: self.say(f"warning: a tree is not shown any more: {error}"))
        self._printing: dict[str, asyncio.Task[None]] = {}  # by tree

    def say(self, text: str) -> None:
        """Print a message of the server itself."""
        self._thread.submit(self._printer.show_note, safe.escape_line(text))

    def show_example(self, text: str) -> None:
        """Print a command of several lines that the user can copy."""
        self._thread.submit(self._printer.show_note, text)

    def say_after(self, tree: str, text: str) -> None:
        """Print a message below the last event of a tree."""
        self._trees.start(self._say_after(self._printing.get(tree), text))

    def show_tree(self, control: Control, tree: str, *, label: str, line: str, tells_end: bool = True) -> None:
        """Print a `line` about a new tree, the events of the tree, and with `tells_end` how it ended."""
        self._thread.submit(partial(self._printer.show_note, safe.escape_line(line), tree=tree))
        printing = self._printing[tree] = self._trees.start(self._print_tree(control, tree, label, tells_end))
        printing.add_done_callback(lambda _: self._printing.pop(tree, None))

    async def close(self) -> None:
        """Wait a short time for the last events, and print no more."""
        await self._trees.wait(LAST_SECONDS)
        self._thread.close()

    async def _say_after(self, printing: asyncio.Task[None] | None, text: str) -> None:
        if printing is not None:
            await asyncio.wait({printing})
        self.say(text)

    async def _print_tree(self, control: Control, tree: str, label: str, tells_end: bool) -> None:
        async for event in control.watch(tree):
            if not isinstance(event, Delta):
                await self._thread.enqueue(self._print_event, event, label)
                if tells_end and event.run == 0 and isinstance(event.body, RunEnded):
                    self.say(f"{tree} {event.body.status}; {LOOK.format(tree=tree)}")
        await self._thread.drain()

    def _print_event(self, event: Event, label: str) -> None:
        below = "" if self._printer.last_tree == event.tree else f"-- {safe.escape_line(label)}"
        self._printer.show_event(event, below=below)
