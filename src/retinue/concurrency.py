"""Tasks, threads and the clock of an event loop: every background task has one owner that ends it.

`TaskOwner` replaces a loose `asyncio.create_task`. The functions cover the other shapes: the first of several to
finish, work that finishes although its caller is cancelled, and blocking work in a thread. Where tasks live and die
together with one block, `asyncio.TaskGroup` is the better choice. Knows nothing of what the tasks do.

Nearly every run sets an alarm that never goes off: its deadline. As timers of the event loop they would all lie in the
heap it sorts its short sleeps in, and every turn of the loop would pay for them. So the alarms of a `SystemClock` have
a heap of their own, and the loop has one timer, for the next of them. The `Deadline` of a run and of a tool call, and
the `StallTimer` of a run, can be paused while a person is asked.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from retinue.core.ports import Clock, Timer

T = TypeVar("T")

STOP_SECONDS = 2.0
CANCELLED_KEPT = 256
LATE_SECONDS = 1.0


class TaskOwner:
    """The tasks that one object runs in the background.

    `on_error` is told of an exception that ended a task. Without it the one who awaits the task gets the exception, and
    if nobody does, asyncio reports it."""

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
        """Run a blocking function in a thread, as a task of this owner. Cancelling it leaves the thread running."""
        return self.start(asyncio.to_thread(work))

    def cancel(self) -> None:
        """Ask all tasks to end."""
        for task in tuple(self._tasks):
            task.cancel()

    async def wait(self, seconds: float | None = None) -> bool:
        """Wait until all tasks have ended, those started meanwhile too; return False when the time is up first."""
        deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        while self._tasks:
            left = None if deadline is None else deadline - asyncio.get_running_loop().time()
            if left is not None and left <= 0:
                return False
            await asyncio.wait(tuple(self._tasks), timeout=left)
            await asyncio.sleep(0)  # the callbacks that take ended tasks out run now
        return True

    async def close(self, seconds: float | None = STOP_SECONDS) -> bool:
        """Cancel all tasks and wait for them; return False if some do not end in time."""
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


class RateLimit:
    """At most `rate` things a second, and `burst` at once after a pause."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = float(burst), time.monotonic()

    def take(self) -> float:
        """Count one thing, or return after how many seconds it may be tried again."""
        now = time.monotonic()
        self._left, self._at = min(self._burst, self._left + (now - self._at) * self._rate), now
        if self._left < 1:
            return (1 - self._left) / self._rate
        self._left -= 1
        return 0.0

    async def wait(self) -> None:
        """Count one thing, when its time has come."""
        if seconds := self.take():
            await asyncio.sleep(seconds)
            self.take()


async def run_until_first(works: Iterable[Coroutine[Any, Any, Any]]) -> int:
    """Run coroutines at once until one of them ends, and end the others; return the number of the one that ended.

    Raises the exception of that one."""
    async with TaskOwner() as owner:
        tasks = [owner.start(work) for work in works]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        number, first = next((number, task) for number, task in enumerate(tasks) if task.done())
        first.result()
        return number


async def finish_despite_cancel(
    work: Coroutine[Any, Any, T], *, hurry: Callable[[], object] = lambda: None, patient: bool = True
) -> T:
    """Finish work that has a deadline of its own, also when the caller is cancelled meanwhile.

    A caller that is cancelled gets its CancelledError afterwards. Each cancellation calls `hurry`; a `patient` caller
    only from the second one on, counting those that may have led here."""
    caller = asyncio.current_task()
    before = 0 if caller is None else caller.cancelling()
    known = not patient or before > 0
    cancelled = False
    async with TaskOwner() as owner:
        task = owner.start(work)
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
        if not task.cancelled():
            task.exception()
        raise asyncio.CancelledError
    return task.result()


def call_when_done(awaited: Awaitable[Any], callback: Callable[[asyncio.Future[Any]], object]) -> None:
    """Call back when the awaited is done, however that went: an error is for others to tell. Nothing that is cancelled
    meanwhile prevents it."""
    future = asyncio.ensure_future(awaited)
    future.add_done_callback(_retrieve_error)
    future.add_done_callback(callback)


def _retrieve_error(done: asyncio.Future[Any]) -> None:
    """Take the error of a future, which asyncio would report when nobody has."""
    if not done.cancelled():
        done.exception()


async def run_in_thread(work: Callable[[threading.Event], T]) -> T:
    """Run blocking work in a thread. When the caller is cancelled, set the work's event and wait a little for it to
    stop, so that a write is over before its run is."""
    stop = threading.Event()
    task = TaskOwner().start_thread(lambda: work(stop))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([task], timeout=STOP_SECONDS)
        task.add_done_callback(_retrieve_error)
        raise


class Alarm(msgspec.Struct, order=True):
    """One alarm of a clock. Alarms sort by time, those of one time in the order they were set."""

    due: float
    number: int
    clock: SystemClock
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        if self.callback is not None:
            self.callback = None
            self.clock.count_cancelled()


class LoopClock:
    """The time, and timers of the event loop. Deadlines run on monotonic time; wall time only dates events."""

    wall = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, callback)


class SystemClock(LoopClock):
    """A clock of one event loop for many alarms that seldom go off."""

    def __init__(self) -> None:
        self._due: list[Alarm] = []
        self._made = 0
        self._cancelled = 0
        self._timer: asyncio.TimerHandle | None = None

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Alarm:
        self._made += 1
        alarm = Alarm(time.monotonic() + seconds, self._made, self, callback)
        heapq.heappush(self._due, alarm)
        if self._due[0] is alarm or self._timer is None:
            self._set_timer()
        return alarm

    def count_cancelled(self) -> None:
        """Count a cancelled alarm. Rebuilds the heap when most of its alarms are cancelled."""
        self._cancelled += 1
        if self._cancelled > CANCELLED_KEPT and self._cancelled > len(self._due) // 2:
            self._due = [alarm for alarm in self._due if alarm.callback is not None]
            heapq.heapify(self._due)
            self._cancelled = 0

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait = max(0.0, self._due[0].due - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait, self._call_due)

    def _call_due(self) -> None:
        self._timer = None
        now = time.monotonic()
        try:
            while self._due and self._due[0].due <= now:
                alarm = heapq.heappop(self._due)
                callback, alarm.callback = alarm.callback, None
                if callback is None:
                    self._cancelled = max(0, self._cancelled - 1)
                else:
                    callback()
        finally:  # a callback that raises must not take the other alarms with it
            if self._due and self._timer is None:
                self._set_timer()


class Deadline:
    """Calls `on_expire` once, after `seconds` of running time. Pausing it (a person is asked) stops the time."""

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
    """Calls `warn` after `seconds` without activity, and `on_expire` after as many again.

    Activity of a run counts for the timers of all runs above it (`parent`). Without `seconds` the timer only reports
    activity upward. Time does not count while the timer is paused, while `is_queued` says that a slot is waited for,
    and while this process itself did not run: then the callback is late, and counting starts again."""

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
        self._pauses = 1  # a late resume must not start it again
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
