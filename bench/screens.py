"""Benchmark of the live view on a real terminal: events of 100 subagents in a second, and the longest wait of a key
meanwhile."""

from __future__ import annotations

import asyncio
import os
import pty
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from bench.table import Row
from retinue.core.events import Event
from retinue.surfaces.cli.live_screen import LiveScreen
from retinue.surfaces.printer.screen import Screen
from retinue.surfaces.printer.terminal import Terminal
from tests.surfaces.printer.facts import make_call_events

AGENTS, CALLS = 100, 100
PROMISED = 5000  # events a second


def rows() -> Iterator[Row]:
    events = make_call_events(agents=AGENTS, calls=CALLS)
    seconds, gap = asyncio.run(_show_events(events))
    second = seconds / len(events) * PROMISED
    rate = f"{len(events) / seconds:,.0f} /s"
    yield Row(f"events of {AGENTS} subagents to the live view; {PROMISED} take", rate, second, 1, "s")
    yield Row("the longest that keys and frames wait meanwhile", f"{gap * 1e3:.0f} ms", gap, 0.3, "s")


async def _show_events(events: list[Event]) -> tuple[float, float]:
    """Return the seconds until all is on the terminal, and the longest time in which nothing else had its turn."""
    master, slave = pty.openpty()

    def read_terminal() -> None:
        with suppress(OSError):
            while os.read(master, 65536):
                pass

    threading.Thread(target=read_terminal, daemon=True).start()
    screen = Screen(Terminal(input_fd=slave, output_fd=slave), color=True)
    live = LiveScreen(screen, level="normal")
    live.view.show_tree("t1")
    screen.open()

    async def give_events() -> AsyncIterator[Event]:
        for event in events:
            yield event

    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        before = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    beating = asyncio.create_task(beat())
    started = time.perf_counter()
    await live.show_items(give_events())
    await live.close()
    seconds = time.perf_counter() - started
    beating.cancel()
    os.close(slave)
    return seconds, longest
