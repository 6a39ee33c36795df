"""Signals of the terminal as commands to a tree: the one place of retinue that handles them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any

from retinue.concurrency import TaskOwner

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANCELLING = "cancelling; press Ctrl-C again to kill"
KILLING = "killing"
KILLED = 130
Action = Callable[[], Coroutine[Any, Any, object] | None]


class Signals:
    """The first cancels, the second kills, a third leaves at once; the log says then what was interrupted.

    Signals that were ignored when we started stay ignored."""

    def __init__(self) -> None:
        self.aim(lambda: None, lambda: None, lambda _: None)
        self._count = 0
        self._tasks = TaskOwner()
        self._handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self.killed = asyncio.Event()

    def aim(self, cancel: Action, kill: Action, say: Callable[[str], object]) -> None:
        """Set what the first two signals do. `say` tells the user which of them came."""
        self._cancel, self._kill, self._say = cancel, kill, say

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
        if self._count > 2:
            os._exit(KILLED)
        word, act = (CANCELLING, self._cancel) if self._count == 1 else (KILLING, self._kill)
        with suppress(OSError):  # the terminal may be gone, which is why a signal comes
            self._say(word)
        work = act()
        if work is not None:
            self._tasks.start(work)
        if self._count == 2:
            self.killed.set()
