"""The live view under load: many agents and events, a terminal on the other side of a pseudo-terminal."""

import asyncio
import itertools
import os
import re
import threading
import time
from collections.abc import AsyncIterator

import pytest

from retinue.core.events import Event, RunSpawned, RunStarted, ToolCall, ToolResult, TurnStarted
from retinue.surfaces.cli.live_screen import LiveScreen
from retinue.surfaces.printer.keys import Key
from retinue.surfaces.printer.markdown import render_markdown
from retinue.surfaces.printer.screen import FRAME_SECONDS, Screen
from retinue.surfaces.printer.terminal import Terminal

AGENTS, CALLS = 100, 50


def make_events() -> list[Event]:
    """100 subagents that make 50 calls each: 10,000 events and more."""
    events: list[Event] = []

    def add(run: int, body: object) -> None:
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


@pytest.mark.requirement("P10")
async def test_a_hundred_agents_freeze_nothing_and_lose_no_block() -> None:
    master, slave = os.openpty()
    seen: list[bytes] = []

    def read_terminal() -> None:
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                return
            if not chunk:
                return
            seen.append(chunk)

    reader = threading.Thread(target=read_terminal, daemon=True)
    reader.start()
    screen = Screen(Terminal(input_fd=slave, output_fd=slave), color=False)
    live = LiveScreen(screen, level="normal")
    live.view.show_tree("t1")
    screen.open()
    events = make_events()

    async def give_events() -> AsyncIterator[Event]:
        for event in events:
            yield event

    beats = [time.monotonic()]

    async def beat() -> None:
        while True:
            await asyncio.sleep(0)
            beats.append(time.monotonic())

    beating = asyncio.ensure_future(beat())
    began = time.monotonic()
    await live.show_items(give_events())
    took = time.monotonic() - began
    live.view.press_key(Key("x", "x"))
    beating.cancel()
    bottom = screen.compose(80, 24)
    await live.close()
    assert not live.is_stuck
    os.close(slave)
    reader.join(10)
    os.close(master)
    text = b"".join(seen).decode()
    frames = text.count("\x1b[?7l")
    assert frames <= took / FRAME_SECONDS + 5
    lines = re.sub(r"\x1b\[\?7l.*?\x1b\[\?7h", "", text, flags=re.DOTALL).split("\n")
    for run in (1, 50, AGENTS):
        for call in range(CALLS):
            assert sum(f"✓ [agent {run}] glob({call}.txt)" in line for line in lines) == 1
    assert len(bottom.lines) < 24
    assert any("… and 93 more at work" in "".join(piece for _, piece in line) for line in bottom.lines)
    assert "Agents: 1 primary, 100 running, 0 finished" in "".join(piece for _, piece in bottom.lines[-1])
    gaps = sorted(after - before for before, after in itertools.pairwise(beats))
    assert gaps[len(gaps) * 9 // 10] < 1.0  # others had their turn all the time, however busy the machine is


def test_markdown_is_rendered_without_links_images_or_markup_of_ours() -> None:
    text = "# Title\n\n**bold** [a](http://b) ![i](http://c)\nList<int> [red]x[/red] \x1b]8;;http://e\x07"
    shown = render_markdown(text, width=60, color=True)
    assert "\x1b]" not in shown and "\x07" not in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert plain.split("\n") == [
        "Title", "", "bold a (http://b) !i (http://c)", "List<int> [red]x[/red] \\x1b]8;;http://e\\x07",
    ]  # fmt: skip
    assert render_markdown("plain words", width=60, color=True) == "plain words"
    assert "\x1b" not in render_markdown(text, width=60, color=False)
