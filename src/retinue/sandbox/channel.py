"""A channel for frames over two descriptors, used by both the host and the tool server.

Buffers unsent data up to a limit. Knows frames, but not their meaning.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from retinue.files.content import read_available
from retinue.protocol.frames import ProtocolError
from retinue.protocol.tool_server import Frame, encode_tool_frame, make_frame_reader

CHUNK = 256 * 1024
UNSENT_BYTES = 64 * 1024 * 1024


class FrameChannel:
    """A channel that owns both descriptors.

    `on_end` is called once: with the protocol error, or with None if the other end has closed or does not read."""

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
        self._frames = make_frame_reader(sender)
        self._on_frame, self._on_end = on_frame, on_end
        self._unsent = bytearray()
        self._sent = asyncio.Event()  # set if the kernel has taken all data; else `_write` runs when the pipe has room
        self._sent.set()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self.is_read_out = False  # the other end has closed and all its data was read
        for fd in (reading, writing):
            os.set_blocking(fd, False)
        self._loop.add_reader(reading, self._read)

    def is_idle(self) -> bool:
        """Return True if no sent frame waits to be written."""
        return self._sent.is_set()

    def send(self, frame: Frame) -> None:
        """Send a frame, in order. Drops the frame if the channel is closed."""
        if self.closed:
            return
        self._unsent += encode_tool_frame(frame)
        if len(self._unsent) > UNSENT_BYTES:
            self._end(None)
        elif self._sent.is_set():
            self._write()

    async def flush(self) -> None:
        """Wait until the kernel has all sent data. From then on the other end can read it even if this process dies."""
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
        """Write as much as possible now, and the rest when the pipe has room."""
        with suppress(BlockingIOError):
            try:
                while self._unsent:
                    done = os.write(self._writing, self._unsent[:CHUNK])
                    del self._unsent[:done]
            except BrokenPipeError:
                self._unsent.clear()  # not the end yet: the last data of the other end may be unread
        if self._unsent and self._sent.is_set():
            self._sent.clear()
            self._loop.add_writer(self._writing, self._write)
        elif not self._unsent and not self._sent.is_set():
            self._sent.set()
            self._loop.remove_writer(self._writing)
