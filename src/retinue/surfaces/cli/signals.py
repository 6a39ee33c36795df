"""Signals of the terminal as commands to a tree: the one place of retinue that handles them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from retinue.concurrency import TaskOwner

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANCELLING = "cancelling; press Ctrl-C again to kill"
KILLING = "killing"
KILLED = 130


class Stoppable(Protocol):
    """Control, or a process with many trees to stop."""

    async def cancel(self, tree: str, run: int = 0, /) -> bool: ...
    async def kill(self, tree: str, /) -> None: ...


class StopAll:
    """All trees of a process that serves others, as one thing to stop: the first signal stops serving."""

    def __init__(self, stop: Callable[[], None], kill: Callable[[], None]) -> None:
        self._stop, self._kill = stop, kill

    async def cancel(self, tree: str, run: int = 0, /) -> bool:
        self._stop()
        return True

    async def kill(self, tree: str, /) -> None:
        self._kill()


class Signals:
    """The first cancels the tree, the second kills it, a third leaves at once; the log says then what was interrupted.

    Signals that were ignored when we started stay ignored."""

    def __init__(self, control: Stoppable) -> None:
        self._control = control
        self._tree, self._run = "", 0
        self._say: Callable[[str], None] = lambda _: None
        self._count = 0
        self._tasks = TaskOwner()
        self._handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self.killed = asyncio.Event()

    def aim(self, tree: str, say: Callable[[str], None], run: int = 0) -> None:
        self._tree, self._run, self._say = tree, run, say

    def __enter__(self) -> Signals:
        for number in self._handled:
            asyncio.get_running_loop().add_signal_handler(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in self._handled:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _received(self) -> None:
        self._count += 1
        if self._count == 1:
            self._say(CANCELLING)
            self._tasks.start(self._control.cancel(self._tree, self._run))
        elif self._count == 2:
            self._say(KILLING)
            self._tasks.start(self._control.kill(self._tree))
            self.killed.set()
        else:
            os._exit(KILLED)
