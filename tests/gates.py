"""Order and time in the hands of a test, so that none depends on which of two is faster.

A `Gate` holds a command of an agent, in any process; a `HeldClock` holds the replies of a scripted model in this one;
`pass_time` makes what is due later due now, and `hurry` does so until something has ended."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from retinue.testing import ManualClock

T = TypeVar("T")
SECONDS = 200.0  # only ends what hangs
STEP_SECONDS = 0.02


class Gate:
    """A named pipe. Whoever runs `command` waits there until the test opens it, which waits for somebody to come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        os.mkfifo(path)

    @property
    def command(self) -> str:
        """A shell command that waits at the gate and prints nothing."""
        return f"cat {shlex.quote(str(self._path))}"

    @property
    def reply(self) -> dict[str, Any]:
        """A scripted reply whose one call waits at the gate."""
        return {"tools": [{"name": "shell", "args": {"command": self.command}}]}

    def hold(self) -> int:
        """Wait until somebody is at the gate. They stay there as long as the returned descriptor is open."""
        pause = threading.Event()
        for _ in range(int(SECONDS / STEP_SECONDS)):
            if (fd := self._knock()) is not None:
                return fd
            pause.wait(STEP_SECONDS)
        raise AssertionError("nobody came to the gate")

    def open(self) -> None:
        """Let the one pass who is at the gate, or comes there."""
        os.close(self.hold())

    async def wait_for_arrival(self) -> int:
        """Do as `hold`, and let the loop go on meanwhile."""
        async with asyncio.timeout(SECONDS):
            while (fd := self._knock()) is None:
                await asyncio.sleep(STEP_SECONDS)
        return fd

    async def let_pass(self) -> None:
        """Do as `open`, and let the loop go on meanwhile."""
        os.close(await self.wait_for_arrival())

    def _knock(self) -> int | None:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads
                raise
            return None


class HeldClock(ManualClock):
    """The clock of a scripted model: a reply with a delay, however short, comes when the test has called `release`."""

    def __init__(self) -> None:
        super().__init__()
        self._released = asyncio.Event()

    def release(self) -> None:
        self._released.set()

    async def sleep(self, seconds: float) -> None:
        await (self._released.wait() if seconds else asyncio.sleep(0))


async def pass_time(seconds: float) -> None:
    """Let the tasks run that can, then move the loop's clock on. The end of a test that hangs comes no nearer."""
    for _ in range(20):
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    limit: asyncio.Timeout | None = getattr(loop, "test_limit", None)  # set in conftest.py
    if limit is not None and not limit.expired():
        limit.reschedule((limit.when() or 0.0) + seconds)
    ahead = loop.time() - time.monotonic() + seconds
    loop.time = lambda: time.monotonic() + ahead  # type: ignore[method-assign]


async def hurry(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Do the work, and let that many seconds pass whenever it has nothing to do but wait."""
    working = asyncio.create_task(work)
    while not working.done():
        await asyncio.sleep(STEP_SECONDS)
        await pass_time(seconds)
    return await working
