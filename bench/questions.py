"""Benchmark of the delay until a question is on a screen: asked at depth 3 in a sandbox, drawn on a real terminal, in
this process and through another process's Control."""

from __future__ import annotations

import asyncio
import os
import pty
import shutil
import statistics
import struct
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from fcntl import ioctl
from pathlib import Path

import retinue
from bench.table import Row
from retinue.control.address_files import find_addresses
from retinue.control.client import ControlClient
from retinue.control.server import ControlServer
from retinue.core.approvals import QuestionClosed
from retinue.core.control import Control
from retinue.core.events import ApprovalAsked, Event
from retinue.sandbox import bubblewrap
from retinue.sandbox.builder import SandboxUnavailable
from retinue.surfaces.printer.live_view import LiveView
from retinue.surfaces.printer.screen import Screen
from retinue.surfaces.printer.terminal import Terminal
from retinue.testing import scripted

QUESTIONS = 200
NAMES = ("one", "two", "three")
SIZE = struct.pack("HHHH", 24, 80, 0, 0)


def rows() -> Iterator[Row]:
    try:
        bubblewrap.probe_bubblewrap()
    except SandboxUnavailable as error:
        yield Row("questions in sandboxes: not measured", str(error)[:40])
        return
    for where, over_loopback in (("its screen", False), ("another process's Control and screen", True)):
        folder = Path(tempfile.mkdtemp(prefix="retinue-bench-"))
        try:
            late = asyncio.run(_ask_at_depth(folder, over_loopback=over_loopback))
        finally:
            shutil.rmtree(folder)
        p99 = statistics.quantiles(late, n=100)[98] * 1e3
        median = statistics.median(late) * 1e3
        yield Row(f"question at depth 3 in a sandbox to {where}, p50, p99", f"{median:.1f} ms", p99, 100, "ms")


class Eyes:
    """Reads a terminal in a thread, and notes when each question was on it."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        ioctl(self.slave, termios.TIOCSWINSZ, SIZE)
        self.seen: dict[int, float] = {}
        self._wanted = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        data = b""
        while chunk := self._read_chunk():
            data = data[-4096:] + chunk
            while b"true # q%dq" % self._wanted in data.replace("\u2502 ".encode(), b""):
                self.seen[self._wanted] = time.time()
                self._wanted += 1

    def _read_chunk(self) -> bytes:
        try:
            return os.read(self.master, 65536)
        except OSError:
            return b""

    def close(self) -> None:
        os.close(self.slave)
        self._thread.join(1)
        os.close(self.master)


async def _ask_at_depth(folder: Path, *, over_loopback: bool) -> list[float]:
    """Return the seconds from each `approval.asked` to its question on the terminal."""
    commands = [{"tools": [{"name": "shell", "args": {"command": f"true # q{n}q"}}]} for n in range(QUESTIONS)]
    script: dict[str, list[object]] = {"three": [*commands, {"text": "end"}]}
    for name, child in zip(("main", *NAMES), NAMES, strict=False):
        order = {"name": "spawn_subagents", "args": {"tasks": [{"task": "go", "subagent_type": child}]}}
        script[name] = [{"tools": [order]}, {"text": "end"}]
    model = scripted(script)
    profiles = [retinue.Profile(name, "You work.", model=model) for name in NAMES]
    asked: dict[int, float] = {}
    eyes = Eyes()
    options = {"project": folder, "path": folder / ".retinue", "runtime": "isolated", "wait_approvals": 600.0}
    limits = retinue.Limits(turns=None)
    async with AsyncExitStack() as stack:
        r = await stack.enter_async_context(
            retinue.open(profiles=profiles, allow=["spawn_subagents"], limits=limits, **options)  # type: ignore[arg-type]
        )
        await stack.enter_async_context(ControlServer(r.control, folder / ".retinue"))
        [address] = find_addresses(folder / ".retinue")
        control: Control = ControlClient(address) if over_loopback else r.control
        run = await r.spawn(retinue.Profile("main", "You work.", model=model), "go")
        await run.wait_until_logged()
        screen = Screen(Terminal(input_fd=eyes.slave, output_fd=eyes.slave), color=False)
        view = LiveView(screen, run.tree)
        screen.open()

        async def answer() -> None:
            async with aclosing(r.control.watch_questions()) as changes:
                async for change in changes:
                    if isinstance(change, QuestionClosed):
                        continue
                    number = len(asked) - 1
                    while number not in eyes.seen:
                        number = len(asked) - 1
                        await asyncio.sleep(0.002)
                    await r.control.answer(change.id, retinue.Allow(), by="bench", digest=change.digest)

        answering = asyncio.create_task(answer())
        async with aclosing(control.watch(run.tree, deltas=True)) as items:
            async for item in items:
                view.apply(item)
                if isinstance(item, Event) and isinstance(item.body, ApprovalAsked):
                    asked[len(asked)] = item.at
        answering.cancel()
        await screen.close()
        assert (await run.result()).status == "done"
    eyes.close()
    return [eyes.seen[number] - at for number, at in asked.items()]
