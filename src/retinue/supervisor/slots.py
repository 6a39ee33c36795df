"""How many runs of a tree run at once. Nobody waits for a slot while holding one.

A run that waits only for its children gives its slot back and is the first to get one again.
"""

from __future__ import annotations

import asyncio


class Slots:
    """`limit` None is unlimited; 0 lets nothing run."""

    __slots__ = ("_free", "_waiting", "limit")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._free = limit or 0
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def take_now(self) -> bool:
        """A slot, if one is free and nobody waits for it."""
        if self.limit is None:
            return True
        if self._free == 0 or self._waiting:
            return False
        self._free -= 1
        return True

    def line_up(self, *, first: bool = False) -> asyncio.Future[None]:
        """A place in the queue; done when the slot is there. Whoever no longer wants it calls `leave`."""
        place = asyncio.get_running_loop().create_future()
        self._waiting = (place, *self._waiting) if first else (*self._waiting, place)
        self._serve()
        return place

    def leave(self, place: asyncio.Future[None]) -> None:
        """Out of the queue; a slot that had already come is given on."""
        if place.done() and not place.cancelled():
            self.give_back()
        elif place in self._waiting:
            self._waiting = tuple(other for other in self._waiting if other is not place)
            place.cancel()

    def give_back(self) -> None:
        if self.limit is None:
            return
        self._free += 1
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (self.limit is None or self._free > 0):
            place, *rest = self._waiting
            self._waiting = tuple(rest)
            if place.done():
                continue
            if self.limit is not None:
                self._free -= 1
            place.set_result(None)
