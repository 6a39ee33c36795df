"""Signals as commands to a tree. For trees, Retinue handles signals only here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from retinue.concurrency import TaskOwner

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CANCELLING = "cancelling; press Ctrl-C again to kill"
KILLING = "killing"
KILLED = 130
Action = Callable[[], Coroutine[Any, Any, object] | None]


class Signals:
    """Signal handlers: the first signal cancels, the second kills, the third ends the process at once.

    If `set_actions` was given `ask`, the first Ctrl-C only asks what to cancel, and does not count. Signals that were
    ignored when the process started stay ignored."""

    def __init__(self) -> None:
        self.set_actions(lambda: None, lambda: None, lambda _: None)
        self._count = 0
        self._has_asked = False
        self._tasks = TaskOwner()
        self._handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self.killed = asyncio.Event()

    def set_actions(
        self,
        cancel: Action,
        kill: Action,
        say: Callable[[str], object],
        *,
        ask: Callable[[], object] | None = None,
        leave: Callable[[], object] | None = None,
    ) -> None:
        """Set the actions of the first signal (`cancel`) and the second (`kill`). `say` shows a message at each.

        `ask` is called at the first Ctrl-C instead. `leave` is called before the third signal ends the process."""
        self._cancel, self._kill, self._say = cancel, kill, say
        self._ask, self._leave = ask, leave

    def forget_question(self) -> None:
        """Call `ask` again at the next Ctrl-C, because the user has answered."""
        self._has_asked = False

    def __enter__(self) -> Signals:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Handle signals from now on."""
        for number in self._handled:
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)

    def stop(self) -> None:
        """Let signals have their usual effect again. Does nothing if they have it already."""
        for number in self._handled:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _received(self, number: int) -> None:
        if self._ask is not None and number == signal.SIGINT and not self._has_asked and not self._count:
            self._has_asked = True
            self._ask()
            return
        self._count += 1
        if self._count > 2:
            if self._leave is not None:
                self._leave()
            os._exit(KILLED)
        word, act = (CANCELLING, self._cancel) if self._count == 1 else (KILLING, self._kill)
        with suppress(OSError):  # the signal may have come because the terminal is gone
            self._say(word)
        work = act()
        if work is not None:
            self._tasks.start(work)
        if self._count == 2:
            self.killed.set()
