"""Lines typed at a terminal, read in its ordinary line mode from the event loop, without a thread."""

from __future__ import annotations

import asyncio
import os
import termios
from contextlib import suppress


class Lines:
    """Reads only while somebody waits for a line. What was typed before may be forgotten."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._typed = b""

    def forget(self) -> None:
        """What was typed until now is no answer to what comes."""
        if os.isatty(self.fd):
            self._typed = b""
            with suppress(termios.error):
                termios.tcflush(self.fd, termios.TCIFLUSH)

    async def next(self) -> str | None:
        """The next line; None when there is no more."""
        loop = asyncio.get_running_loop()
        while b"\n" not in self._typed:
            ready = asyncio.Event()
            try:
                loop.add_reader(self.fd, ready.set)
            except (OSError, ValueError):  # a file or nothing at all: there is nobody behind it
                return None
            try:
                await ready.wait()
            finally:
                loop.remove_reader(self.fd)
            try:
                chunk = os.read(self.fd, 4096)
            except BlockingIOError:
                continue
            except OSError:  # the terminal is gone
                return None
            if not chunk:
                return None
            self._typed += chunk
        line, _, self._typed = self._typed.partition(b"\n")
        return line.decode("utf-8", "replace")
