"""Frames over two descriptors, the same at both ends. Reads whatever comes and never waits for who takes it; writes
what fits and keeps the rest, up to a bound. Knows frames, not what they mean."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from retinue.protocol.link import WINDOW_BYTES, Ack, Frame, LinkError, Wire

CHUNK = 256 * 1024
KEPT_BYTES = 64 * 1024 * 1024


class Channel:
    """Owns both descriptors. `on_end` is called once: with what was wrong, or None when the other end has closed."""

    def __init__(
        self,
        reading: int,
        writing: int,
        *,
        incoming: Literal["up", "down"],
        on_frame: Callable[[Any], None],
        on_end: Callable[[LinkError | None], None],
    ) -> None:
        self._reading, self._writing = reading, writing
        self._wire = Wire(incoming)
        self._on_frame, self._on_end = on_frame, on_end
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._flushed = asyncio.Event()
        self._room.set()
        self._flushed.set()
        self.closed = False
        for fd in (reading, writing):
            os.set_blocking(fd, False)
        self._loop.add_reader(reading, self._read)

    def send(self, frame: Frame) -> None:
        """Takes a frame, in order. Nothing goes to an end that has closed."""
        if self.closed:
            return
        self._kept += self._wire.pack(frame)
        if self._wire.unacknowledged > WINDOW_BYTES:
            self._room.clear()
        if len(self._kept) > KEPT_BYTES:
            self._end(LinkError("the other end does not read what it is sent"))
        elif self._flushed.is_set():
            self._write()

    async def room(self) -> None:
        """Waits while too much of what was sent has not been acknowledged."""
        await self._room.wait()

    async def flushed(self) -> None:
        """Waits until all that was sent is with the other end, or the other end is gone."""
        await self._flushed.wait()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._reading)
        self._loop.remove_writer(self._writing)
        for fd in {self._reading, self._writing}:
            os.close(fd)
        self._room.set()
        self._flushed.set()

    def _end(self, error: LinkError | None) -> None:
        if not self.closed:
            self.close()
            self._on_end(error)

    def _read(self) -> None:
        try:
            data = os.read(self._reading, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(None)
            return
        try:
            frames = self._wire.feed(data)
        except LinkError as error:
            self._end(error)
            return
        if self._wire.unacknowledged <= WINDOW_BYTES:
            self._room.set()
        for frame in frames:
            if self.closed:
                return
            self._on_frame(frame)
        if self._wire.owes_ack:
            self.send(Ack())

    def _write(self) -> None:
        """As much as goes now; the rest when there is room."""
        with suppress(BlockingIOError):
            try:
                while self._kept:
                    done = os.write(self._writing, self._kept[:CHUNK])
                    del self._kept[:done]
            except BrokenPipeError:
                self._kept.clear()  # what it still said is read before its end is
        if self._kept:
            if self._flushed.is_set():
                self._flushed.clear()
                self._loop.add_writer(self._writing, self._write)
        elif not self._flushed.is_set():
            self._flushed.set()
            self._loop.remove_writer(self._writing)
