"""Tasks, threads and the clock of an event loop. Every background task has one owner that ends it.

`TaskOwner` replaces a loose `asyncio.create_task`. The functions cover the other cases: wait for the first of several
tasks, finish work although the caller is cancelled, and run blocking work in a thread. If all tasks end with one block
of code, `asyncio.TaskGroup` is the better choice.

The `Deadline` of a run or a tool call, and the `StallTimer` of a run, can be paused while a person is asked.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from retinue.core.ports import Clock, Timer

T = TypeVar("T")

STOP_SECONDS = 2.0
LATE_SECONDS = 1.0


class TaskOwner:
    """The background tasks of one object.

    `on_error` is called with the exception that ended a task. Without `on_error`, the exception goes to the code that
    awaits the task, or asyncio reports it if the task is never awaited."""

    def __init__(self, *, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_error = on_error

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def start(self, work: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this owner."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finish)
        return task

    def start_thread(self, work: Callable[[], T]) -> asyncio.Task[T]:
        """Run a blocking function in a thread, as a task of this owner. Cancelling it does not stop the thread."""
        return self.start(asyncio.to_thread(work))

    def cancel(self) -> None:
        """Request the cancellation of all tasks, without waiting."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until all tasks have ended, including those started meanwhile. Return False after a timeout."""
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        while self._tasks:
            left = None if deadline is None else deadline - asyncio.get_running_loop().time()
            if left is not None and left <= 0:
                return False
            await asyncio.wait(tuple(self._tasks), timeout=left)
            await asyncio.sleep(0)  # lets the callbacks run that remove ended tasks
        return True

    async def close(self, seconds: float | None = STOP_SECONDS) -> bool:
        """Cancel all tasks and wait for them. Return False if some do not end in time."""
        self.cancel()
        return await self.wait(seconds)

    async def __aenter__(self) -> TaskOwner:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(None)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._on_error is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task that the caller owns: the caller awaits it, or cancels it, before it returns or closes."""
    return asyncio.get_running_loop().create_task(work)


class RateLimit:
    """A token bucket: at most `rate` actions a second, and up to `burst` at once after a pause."""

    def __init__(self, rate: float, burst: int, clock: Clock | None = None) -> None:
        self._rate, self._burst = rate, burst
        self._clock = clock or SystemClock()
        self._left, self._at = float(burst), self._clock.monotonic()

    def take(self) -> float:
        """Take a token and return 0, or return the seconds until the next token without taking one."""
        now = self._clock.monotonic()
        self._left, self._at = min(self._burst, self._left + (now - self._at) * self._rate), now
        if self._left < 1:
            return (1 - self._left) / self._rate
        self._left -= 1
        return 0.0

    async def wait(self) -> None:
        """Wait until a token is free, and take it."""
        while seconds := self.take():
            await self._clock.sleep(seconds)  # another waiter may take the token that is free then


async def run_until_first(works: Iterable[Coroutine[Any, Any, Any]]) -> int:
    """Run coroutines concurrently until the first ends, cancel the others, and return the index of the first.

    Raises the exception of the first, if it failed."""
    async with TaskOwner() as owner:
        tasks = [owner.start(work) for work in works]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        number, first = next((number, task) for number, task in enumerate(tasks) if task.done())
        first.result()
        return number


async def finish_despite_cancel(
    work: Coroutine[Any, Any, T], *, hurry: Callable[[], object] = lambda: None, patient: bool = True
) -> T:
    """Run `work` to its end, even if the caller is cancelled meanwhile. The work must have a deadline of its own.

    A cancelled caller gets its CancelledError afterwards. Each cancellation calls `hurry`, which must not raise. If
    `patient`, the first one does not, where a cancellation from before this call counts as the first."""
    caller = asyncio.current_task()
    before = 0 if caller is None else caller.cancelling()
    known = not patient or before > 0
    cancelled = False
    task = start_task(work)
    if before > 1:  # two cancellations in one turn of the event loop arrive as one CancelledError
        hurry()
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
            if known:
                hurry()
            known = True
        except Exception:  # noqa: BLE001 - raised below, by the task's result
            break
    if cancelled:
        retrieve_error(task)
        raise asyncio.CancelledError
    return task.result()


def call_when_done(awaited: Awaitable[Any], callback: Callable[[asyncio.Future[Any]], object]) -> None:
    """Call `callback` when `awaited` is done, failed or cancelled. Does not report an error.

    The callback runs even if the current task is cancelled."""
    future = asyncio.ensure_future(awaited)
    future.add_done_callback(retrieve_error)
    future.add_done_callback(callback)


def retrieve_error(done: asyncio.Future[Any]) -> None:
    """Mark the error of a future as retrieved, so that asyncio does not report it."""
    if not done.cancelled():
        done.exception()


async def run_in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run blocking work in a thread. `work` gets an event that is set when the caller is cancelled.

    A cancelled caller waits a short time for the thread to stop, so that a write ends before its run does."""
    stop = threading.Event()
    task = start_task(asyncio.to_thread(work, stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([task], timeout=STOP_SECONDS)
        task.add_done_callback(retrieve_error)
        raise


class SystemClock:
    """The clock of this machine. Its alarms are timers of the event loop. Deadlines use monotonic time; wall time is
    only for timestamps."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, callback)


class Deadline:
    """A timer that calls `on_expire` once, after `seconds`, not counting pauses."""

    __slots__ = ("_clock", "_left", "_on_expire", "_pauses", "_since", "_stopped", "_timer")

    def __init__(self, seconds: float, clock: Clock, on_expire: Callable[[], None]) -> None:
        self._clock = clock
        self._on_expire = on_expire
        self._left = seconds
        self._pauses = 0
        self._stopped = False
        self._since = clock.monotonic()
        self._timer: Timer | None = clock.call_later(seconds, on_expire)

    @property
    def seconds_left(self) -> float:
        return self._left if self._timer is None else self._left - (self._clock.monotonic() - self._since)

    def pause(self) -> None:
        self._pauses += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left -= self._clock.monotonic() - self._since

    def resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and not self._stopped:
            self._since = self._clock.monotonic()
            self._timer = self._clock.call_later(max(0.0, self._left), self._on_expire)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class StallTimer:
    """A timer that calls `warn` after `seconds` without activity, and `on_expire` after as many seconds again.

    Activity of a run counts for the timers of all runs above it (`parent`). If `seconds` is None, the timer only
    reports activity upward. Time does not count while the timer is paused, while `is_queued` returns True because the
    run waits for a slot, and while this process was suspended. A callback that is late shows a suspension, and then the
    count starts again."""

    __slots__ = ("_clock", "_due", "_is_queued", "_last", "_on_expire", "_parent", "_pauses", "_timer", "_warn",
                 "_warned", "expired", "seconds")  # fmt: skip

    def __init__(
        self,
        seconds: float | None,
        clock: Clock,
        *,
        parent: StallTimer | None,
        is_queued: Callable[[], bool],
        warn: Callable[[], object],
        on_expire: Callable[[], None],
    ) -> None:
        self.seconds = seconds
        self.expired = False
        self._parent = parent
        self._clock = clock
        self._is_queued = is_queued
        self._warn = warn
        self._on_expire = on_expire
        self._warned = False
        self._pauses = 0
        self._last = self._due = 0.0
        self._timer: Timer | None = None

    def start(self) -> None:
        if self.seconds is not None:
            self._restart(self.seconds)

    def record_activity(self) -> None:
        now = self._clock.monotonic()
        timer: StallTimer | None = self
        while timer is not None:
            timer._last, timer._warned = now, False
            timer = timer._parent

    def pause(self) -> None:
        self._pauses += 1
        self._cancel()

    def resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self.seconds is not None:
            self._restart(self.seconds)

    def stop(self) -> None:
        self._pauses = 1  # so that a late `resume` does not restart the timer
        self.seconds = None
        self._cancel()

    def _restart(self, seconds: float) -> None:
        self._last = self._clock.monotonic()
        self._warned = False
        self._schedule(seconds)

    def _schedule(self, seconds: float) -> None:
        self._due = self._clock.monotonic() + seconds
        self._timer = self._clock.call_later(seconds, self._check)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self.seconds is None:
            return
        now = self._clock.monotonic()
        left = self._last + self.seconds - now
        if now - self._due > LATE_SECONDS or self._is_queued():
            self._restart(self.seconds)
        elif left > 0:
            self._schedule(left)
        elif self._warned:
            self.expired = True
            self._on_expire()
        else:
            self._warn()  # the warning is an event, so it counts as activity of the runs above
            self._last, self._warned = now, True
            self._schedule(self.seconds)
