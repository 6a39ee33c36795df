"""The host's side of programs that run behind a wall: their calls are made on the run's link, each in its own task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

from retinue.core.messages import Call
from retinue.core.ports import Link, Made, Maker, Outcome
from retinue.protocol import link as wire

AT_ONCE = 64
TOO_MANY = Made(error=f"More than {AT_ONCE} calls of one program at once.")


class Programs:
    """Those of one run, by the calls they are of. One begins with its first call of a tool and ends with its own."""

    def __init__(self, link: Link, kept: Callable[[Call, Outcome], Outcome]) -> None:
        self._link, self._kept = link, kept
        self._open: dict[str, tuple[AbstractContextManager[Maker], Maker, set[asyncio.Task[Made]]]] = {}

    async def make(self, outer: Call, frame: wire.Make, send: Callable[[wire.Frame], None]) -> wire.Frame:
        if outer.id not in self._open:
            entered = self._link.program(
                outer, kept=self._kept, person=lambda waits: send(wire.Person(outer.id, waits))
            )
            self._open[outer.id] = entered, entered.__enter__(), set()
        _, make, tasks = self._open[outer.id]
        if len(tasks) >= AT_ONCE:
            made = TOO_MANY
        else:
            task = asyncio.ensure_future(make(frame.name, frame.args))
            tasks.add(task)
            try:
                made = await task
            finally:
                tasks.discard(task)
        return wire.Made(frame.id, made.value, made.error, made.note)

    def close(self, outer: str) -> None:
        """The program has ended: what it still waits for is given up."""
        entered, _, tasks = self._open.pop(outer, (None, None, ()))
        if entered is not None:
            entered.__exit__(None, None, None)
        for task in tasks:
            task.cancel()

    def drop(self) -> None:
        """The run is over, with all it was doing."""
        for outer in list(self._open):
            self.close(outer)
