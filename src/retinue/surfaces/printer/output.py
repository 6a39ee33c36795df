"""A writer of whole pieces of text to a stream. A reader that is gone is no error: writing stops silently."""

from __future__ import annotations

import os
import select

from retinue.surfaces.printer.colors import Stream

COLUMNS = 80


class Output:
    """The output of a printer. Each `write` is one write of the system, as far as the system takes it whole."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._fd = _find_descriptor(stream)
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self.is_closed = False
        self._held: list[str] | None = None

    @property
    def columns(self) -> int:
        """The width of the terminal; a usual width if there is none."""
        try:
            return os.get_terminal_size(-1 if self._fd is None else self._fd).columns or COLUMNS
        except OSError:
            return COLUMNS

    def hold(self) -> None:
        """Keep what is written until `release`, because another program has the terminal."""
        self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        self.write("".join(held))

    def write(self, text: str) -> None:
        if self.is_closed or not text:
            return
        if self._held is not None:
            self._held.append(text)
            return
        try:
            self._stream.flush()
            if self._fd is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                self._write_all(text.encode(self._encoding, "backslashreplace"))
        except (OSError, ValueError):  # the reader is gone, or the stream was closed
            self.is_closed = True

    def _write_all(self, data: bytes) -> None:
        assert self._fd is not None
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # a program that shares the terminal made it non-blocking
                waiting = select.poll()
                waiting.register(self._fd, select.POLLOUT)
                waiting.poll()


def _find_descriptor(stream: Stream) -> int | None:
    fileno = getattr(stream, "fileno", None)
    try:
        return None if fileno is None else int(fileno())
    except (OSError, ValueError):
        return None
