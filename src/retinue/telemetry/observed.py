"""A log that is observed by telemetry: every tree that is written to is watched, in the same way as by any screen.

Spans are made in a thread of their own, so that an exporter that is slow, broken or hangs holds up no run: at most the
end of the program, by a few seconds. Errors here are logged as warnings and hurt nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from urllib.parse import quote

from opentelemetry.baggage import get_all as get_all_baggage
from opentelemetry.trace import get_current_span

from retinue.concurrency import TaskOwner
from retinue.core.events import Event
from retinue.core.ports import Log
from retinue.core.traces import TraceOrigin, baggage_of
from retinue.log.forwarding_log import ForwardingLog
from retinue.protocol.inherited_limits import from_environment
from retinue.telemetry.providers import Providers
from retinue.telemetry.recorder import Recorder

FLUSH_SECONDS = 3.0
AHEAD = 4096
_LOG = logging.getLogger("retinue.telemetry")


def current_trace() -> TraceOrigin:
    """Return the trace a new tree belongs to: the active span's, else TRACEPARENT of the environment, else none.
    Baggage is the active one, else BAGGAGE of the environment."""
    active = ",".join(f"{key}={quote(str(value), safe='')}" for key, value in get_all_baggage().items())
    above = from_environment(os.environ)
    baggage = baggage_of(active) or above.baggage
    span = get_current_span().get_span_context()
    if span.is_valid:
        text = f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags) & 1:02x}"
        return TraceOrigin(text, baggage)
    return TraceOrigin(above.traceparent, baggage)


class ObservedLog(ForwardingLog):
    """A log whose trees are also sent to OpenTelemetry. Closing it closes the log inside."""

    def __init__(self, log: Log, providers: Providers) -> None:
        super().__init__(log)
        self._finish = providers.finish
        self._where = providers.where
        self._recorder = Recorder(providers.tracers, providers.meters)
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._tasks = TaskOwner()
        self._watching: dict[str, asyncio.Task[None]] = {}
        threading.Thread(target=self._run_queue, name="retinue-telemetry", daemon=True).start()

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        written = self._log.append(event, wait)
        if event.tree not in self._watching:
            self._watching[event.tree] = self._tasks.start(self._watch(event.tree, event.seq))
        return written

    async def close(self) -> None:
        """Give telemetry a few seconds to send the rest, and the log all the time it needs."""
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._tasks.wait()
                await self._drain_queue()
                await asyncio.gather(*(_run_in_thread(work) for work in self._finish))
        except TimeoutError:
            _LOG.warning("not all was sent: %s did not take it within %g s", self._where, FLUSH_SECONDS)
        finally:
            self._tasks.cancel()
            self._queue.put(None)
            await self._log.close()

    async def _watch(self, tree: str, first: int) -> None:
        """Queue every event of a tree. Those before `first` are of an earlier process, which has sent them."""
        try:
            async for event in self._log.watch(tree):
                if isinstance(event, Event):
                    self._queue.put(partial(self._recorder.apply, event, news=event.seq >= first))
                    if event.seq % AHEAD == 0:
                        await self._drain_queue()
        except Exception as error:  # noqa: BLE001 - an observer never hurts a run
            _LOG.warning("the telemetry of tree %s ends here: %s: %s", tree, type(error).__name__, error)
        finally:
            self._watching.pop(tree, None)
            self._queue.put(partial(self._recorder.forget, tree))

    async def _drain_queue(self) -> None:
        """Wait until the thread has worked off the queue."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(lambda: _resolve_in_loop(loop, done))
        await done

    def _run_queue(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the boundary to somebody else's span processors
                _LOG.warning("telemetry failed: %s: %s", type(error).__name__, error)


async def _run_in_thread(work: Callable[[], object]) -> None:
    """Run work in a thread, as `asyncio.to_thread` does, but one that the end of the program does not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary to somebody else's exporters
            _LOG.warning("telemetry was not sent: %s: %s", type(error).__name__, error)
        _resolve_in_loop(loop, done)

    threading.Thread(target=run, name="retinue-telemetry-end", daemon=True).start()
    await done


def _resolve_in_loop(loop: asyncio.AbstractEventLoop, done: asyncio.Future[None]) -> None:
    with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
        loop.call_soon_threadsafe(_resolve, done)


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
