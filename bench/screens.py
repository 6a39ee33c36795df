"""How many events a second the live view of 100 subagents takes on a real terminal, and for how long it keeps keys
waiting meanwhile."""

from __future__ import annotations

import asyncio
import os
import pty
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

from bench.table import Row
from retinue.core.events import Body, Event, RunSpawned, RunStarted, ToolCall, ToolResult, TurnStarted
from retinue.surfaces.cli.live_screen import LiveScreen
from retinue.surfaces.printer.screen import Screen
from retinue.surfaces.printer.terminal import Terminal

AGENTS, CALLS = 100, 100
PROMISED = 5000  # events a second


def rows() -> Iterator[Row]:
    events = make_events()
    seconds, gap = asyncio.run(_show_events(events))
    second = seconds / len(events) * PROMISED
    rate = f"{len(events) / seconds:,.0f} /s"
    yield Row(f"events of {AGENTS} subagents to the live view; {PROMISED} take", rate, second, 1, "s")
    yield Row("the longest that keys and frames wait meanwhile", f"{gap * 1e3:.0f} ms", gap, 0.3, "s")


def make_events() -> list[Event]:
    """Return the events of subagents that all make calls at once."""
    events: list[Event] = []

    def add(run: int, body: Body) -> None:
        path, agent = ("/main", "main") if run == 0 else (f"/main/a-{run}", "a")
        events.append(Event(len(events) + 1, "t1", run, path, agent, time.time(), body))  # type: ignore[arg-type]

    add(0, RunSpawned(None, "main", 0, "x", "id", "/w", model="m"))
    add(0, RunStarted())
    for run in range(1, AGENTS + 1):
        add(run, RunSpawned(0, f"agent {run}", 1, "x", f"id{run}", "/w", model="m"))
        add(run, RunStarted())
        add(run, TurnStarted(1))
    for call in range(CALLS):
        for run in range(1, AGENTS + 1):
            add(run, ToolCall(f"c{call}", "glob", {"pattern": f"{call}.txt"}))
            add(run, ToolResult(f"c{call}", "glob", "", True))
    return events


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
