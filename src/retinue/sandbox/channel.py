"""Frames over two descriptors, the same at both ends. Reads whatever comes; writes what fits and keeps the rest, up to
a bound. Knows frames, not what they mean."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from retinue.files.content import read_available
from retinue.protocol.tool_server import Frame, FrameReader, ProtocolError, encode_frame

CHUNK = 256 * 1024
UNSENT_BYTES = 64 * 1024 * 1024


class FrameChannel:
    """Owns both descriptors. `on_end` is called once: with what was wrong, or None when the other end has closed or
    does not read what it is sent."""

    def __init__(
        self,
        reading: int,
        writing: int,
        *,
        sender: Literal["server", "host"],
        on_frame: Callable[[Any], None],
        on_end: Callable[[ProtocolError | None], None],
    ) -> None:
        self._reading, self._writing = reading, writing
        self._frames = FrameReader(sender)
        self._on_frame, self._on_end = on_frame, on_end
        self._unsent = bytearray()
        self._sent = asyncio.Event()  # the system has taken all of it; else it is written when there is room
        self._sent.set()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self.is_read_out = False  # the other end has closed, and all it sent was read
        for fd in (reading, writing):
            os.set_blocking(fd, False)
        self._loop.add_reader(reading, self._read)

    @property
    def is_idle(self) -> bool:
        """Tell whether all that was sent is with the other end."""
        return self._sent.is_set()

    def send(self, frame: Frame) -> None:
        """Take a frame, in order. Nothing goes to an end that has closed."""
        if self.closed:
            return
        self._unsent += encode_frame(frame)
        if len(self._unsent) > UNSENT_BYTES:
            self._end(None)
        elif self._sent.is_set():
            self._write()

    async def flush(self) -> None:
        """Wait until the system has taken all that was sent; also when this end dies now, the other end reads it."""
        await self._sent.wait()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._sent.set()
        self._loop.remove_reader(self._reading)
        self._loop.remove_writer(self._writing)
        for fd in {self._reading, self._writing}:
            os.close(fd)

    def _end(self, error: ProtocolError | None) -> None:
        if not self.closed:
            self.close()
            self._on_end(error)

    def _read(self) -> None:
        data = read_available(self._reading, CHUNK)
        if data is None:
            return
        if not data:
            self.is_read_out = True
            self._end(None)
            return
        try:
            for frame in self._frames.feed(data):
                if self.closed:
                    return
                self._on_frame(frame)
        except ProtocolError as error:
            self._end(error)

    def _write(self) -> None:
        """Write as much as goes now; the rest when there is room."""
        with suppress(BlockingIOError):
            try:
                while self._unsent:
                    done = os.write(self._writing, self._unsent[:CHUNK])
                    del self._unsent[:done]
            except BrokenPipeError:
                self._unsent.clear()  # what it still said is read before its end is
        if self._unsent and self._sent.is_set():
            self._sent.clear()
            self._loop.add_writer(self._writing, self._write)
        elif not self._unsent and not self._sent.is_set():
            self._sent.set()
            self._loop.remove_writer(self._writing)
