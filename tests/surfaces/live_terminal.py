"""A live view in this process, on a pseudo-terminal: keys are typed on its other side, and all it writes is read there.

Cheaper than tmux, and enough where the terminal itself is not what is tested."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from retinue.core.control import Control, RunHandle
from retinue.surfaces.cli.live_screen import LiveScreen
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer.printer import Level
from retinue.surfaces.printer.screen import Screen
from retinue.surfaces.printer.terminal import Terminal
from tests.gates import until

COLUMNS, ROWS = 80, 24


class LiveTerminal:
    """The screen, what was written to it, and the keys of its person. With `talks` there is an input line."""

    def __init__(self, *, level: Level = "normal", talks: bool = False) -> None:
        self._master, self._slave = os.openpty()
        self._seen: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.screen = Screen(Terminal(input_fd=self._slave, output_fd=self._slave), color=False)
        self.live = LiveScreen(self.screen, level=level, talks=talks)

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._master, 65536)
            except OSError:
                return
            if not chunk:
                return
            self._seen.append(chunk)

    @property
    def written(self) -> str:
        """All that was written, with its escape sequences."""
        return b"".join(self._seen).decode()

    @property
    def lasting(self) -> list[str]:
        """The lines that last, of what was written so far."""
        text = re.sub(r"\x1b\[\?7l.*?(?:\x1b\[\?7h|$)", "", self.written, flags=re.DOTALL)
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text).replace("\r", "").split("\n")

    @property
    def bottom(self) -> list[str]:
        """The lines below them, as they would be drawn now."""
        return ["".join(text for _, text in line) for line in self.screen.compose(COLUMNS, ROWS).lines]

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def wait_until(self, is_there: Callable[[], object]) -> None:
        await until(is_there)

    async def sees(self, text: str) -> None:
        """Wait until a text is among the lines below."""
        await self.wait_until(lambda: text in "\n".join(self.bottom))

    async def keeps(self, text: str) -> None:
        """Wait until a text is among the lines that last."""
        await self.wait_until(lambda: text in "\n".join(self.lasting))

    async def show(self, control: Control, run: RunHandle) -> None:
        """Show a tree until it ends."""
        self.live.attach(run, Signals())
        async with aclosing(control.watch(run.tree, deltas=True)) as items:
            await self.live.show_items(items)

    def close(self) -> None:
        os.close(self._slave)
        self._reader.join(10)
        os.close(self._master)


@asynccontextmanager
async def open_live_terminal(*, level: Level = "normal", talks: bool = False) -> AsyncIterator[LiveTerminal]:
    terminal = LiveTerminal(level=level, talks=talks)
    terminal.screen.open()
    try:
        yield terminal
    finally:
        await terminal.live.close()
        terminal.close()
