"""Order and time in the hands of a test, so that none depends on which of two is faster.

A `Gate` holds a command of an agent, in any process; a `HeldClock` holds the replies of a scripted model in this one;
`pass_time` makes what is due later due now, and `hurry` does so until something has ended. `until` waits for something
real, such as the work of another process, and `wait_for_answer` asks for it. `limit_calls` counts steps, where a time
would depend on the machine."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from retinue.testing import ManualClock

T = TypeVar("T")
SECONDS = 200.0  # only ends what hangs
STEP_SECONDS = 0.02
POLL_SECONDS = 0.01


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
        return await until(self._knock)

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


async def until(look: Callable[[], T | None]) -> T:
    """Poll something real until there is something, and return that. Counts polls: `pass_time` does not end it."""
    for _ in range(int(SECONDS / POLL_SECONDS)):
        if found := look():
            return found
        await asyncio.sleep(POLL_SECONDS)
    raise AssertionError("it never came true")


async def wait_for_answer(ask: Callable[[], Awaitable[T | None]]) -> T:
    """Do as `until`, with a question to another process or to a server, and return the first answer that is one."""
    for _ in range(int(SECONDS / POLL_SECONDS)):
        if answer := await ask():
            return answer
        await asyncio.sleep(POLL_SECONDS)
    raise AssertionError("the answer never came")


@contextmanager
def limit_calls(most: int) -> Iterator[None]:
    """Fail as soon as the block has made more than `most` calls of functions, in Python or C."""
    left = most

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal left
        left -= event in ("call", "c_call")
        if left < 0:
            sys.setprofile(None)
            raise AssertionError(f"more than {most} calls")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert left >= 0, f"more than {most} calls"  # what was called may have caught the error


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
