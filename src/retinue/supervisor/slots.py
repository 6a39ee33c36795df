"""Concurrency slots of a tree: a limit on how many of its runs work at once. Knows no runs, only slot holders.

No run waits for a slot while holding one. A run that only waits for its children releases its slot, and later gets a
slot before the runs in the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec


class Slots(msgspec.Struct, eq=False, gc=False):
    """The slots of one tree. A `limit` of None means unlimited; 0 lets nothing run."""

    limit: int | None
    _taken: int = 0
    _queue: tuple[asyncio.Future[None], ...] = ()

    def limit_to(self, limit: int | None) -> None:
        """Set another limit. Slots that are taken stay taken."""
        self.limit = limit

    def try_acquire(self) -> bool:
        """Take a slot if one is free and nobody waits for it. Return True if a slot was taken."""
        if self.limit is not None and (self._taken >= self.limit or self._queue):
            return False
        self._taken += 1
        return True

    def enqueue(self, *, first: bool = False) -> asyncio.Future[None]:
        """Return a request: a future that is done when the request has a slot. `first` puts the request at the head of
        the queue. A request no longer wanted must be withdrawn."""
        request = asyncio.get_running_loop().create_future()
        self._queue = (request, *self._queue) if first else (*self._queue, request)
        self._serve_queue()
        return request

    def withdraw(self, request: asyncio.Future[None]) -> None:
        """Remove a request from the queue. If the request has a slot already, the slot goes to the next request."""
        if request.done() and not request.cancelled():
            self.release()
        elif request in self._queue:
            self._queue = tuple(other for other in self._queue if other is not request)
            request.cancel()

    def release(self) -> None:
        self._taken -= 1
        self._serve_queue()

    def _serve_queue(self) -> None:
        while self._queue and (self.limit is None or self._taken < self.limit):
            request, *rest = self._queue
            self._queue = tuple(rest)
            if not request.done():
                self._taken += 1
                request.set_result(None)


class SlotHolder(msgspec.Struct, eq=False, gc=False):
    """The slot of one run: held, requested (`slot_request`), or neither. `slots` is None for a run that needs no slot,
    such as a primary or a team.

    The holder counts the run's tool calls in flight, and how many of them only wait for children. While all of them
    do, the slot is free for other runs."""

    slots: Slots | None
    has_slot: bool = False
    slot_request: asyncio.Future[None] | None = None
    calls_in_flight: int = 0
    waiting_calls: int = 0
    stopped: bool = False

    @property
    def is_queued(self) -> bool:
        return self.slot_request is not None

    @property
    def needs_slot(self) -> bool:
        """True if the run needs a slot and has none."""
        return self.slots is not None and not self.has_slot

    def try_acquire(self) -> bool:
        """Take a slot if one is free and nobody waits for it. Return True if a slot was taken."""
        assert self.slots is not None
        self.has_slot = self.slots.try_acquire()
        return self.has_slot

    def acquire_or_enqueue(self) -> None:
        """Take a slot, or a place at the end of the queue."""
        if self.slots is not None and not self.try_acquire():
            self.slot_request = self.slots.enqueue()

    async def acquire(self) -> None:
        """Wait for the slot. Several calls of a run may want the slot back at once: they share one request."""
        while self.slots is not None and not self.has_slot:
            if self.stopped:
                raise asyncio.CancelledError  # a run that was stopped meanwhile gets no slot
            if self.slot_request is None:
                self.slot_request = self.slots.enqueue(first=True)
            request = self.slot_request
            await asyncio.wait([request])
            if self.slot_request is request:
                self.slot_request, self.has_slot = None, True

    def stop(self) -> None:
        """Mark the run as stopping: it does not take its slot back."""
        self.stopped = True

    def leave(self) -> None:
        """Release the slot, or leave the queue, for good."""
        if self.slots is None:
            return
        if self.slot_request is not None:
            self.slots.withdraw(self.slot_request)
            self.slot_request = None
        elif self.has_slot:
            self.slots.release()
            self.has_slot = False

    def begin_calls(self, count: int = 1) -> None:
        self.calls_in_flight += count

    def end_call(self) -> None:
        self.calls_in_flight -= 1
        if self.waiting_calls:
            self._release_if_only_waiting()

    def drop_call(self) -> None:
        """Forget a call that was begun and did not run."""
        self.calls_in_flight -= 1

    @property
    def _only_waits(self) -> bool:
        return self.waiting_calls > 0 and self.waiting_calls >= self.calls_in_flight

    def _release_if_only_waiting(self) -> None:
        if self.slots is not None and self.has_slot and self._only_waits:
            self.slots.release()
            self.has_slot = False

    async def wait_without_slot(self, awaited: Awaitable[None]) -> None:
        """Wait for children. While the run does nothing else, its slot is free for other runs.

        If several waits overlap, the last one to end takes the slot back, even if it was cancelled."""
        self.waiting_calls += 1
        self._release_if_only_waiting()
        try:
            await awaited
        finally:
            self.waiting_calls -= 1
            if not self.stopped and not self._only_waits:
                await self.acquire()
