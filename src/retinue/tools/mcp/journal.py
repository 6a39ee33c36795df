"""What a server says beside the protocol (stderr, log messages): in a file of ours, never on a terminal.

The file is private and has an end: what a server says beyond that is read and dropped, so that it never waits for us.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from retinue.core.errors import RetinueError
from retinue.core.secrets import clean
from retinue.files.private import make_private_folder, open_private_file
from retinue.tools.mcp import words

LARGEST = 4 * 1024 * 1024
KEPT_OLD = 1024 * 1024
TAIL = 2048
CUT = b"\n[... the rest is not kept ...]\n"


class Journal:
    """One server's file; without one only the last words are known."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._fd: int | None = None
        self._room = LARGEST
        self._tail = b""

    def open(self, what: str) -> None:
        """A new life of the server begins."""
        self.close()
        self._room, self._tail = LARGEST, b""
        if self.path is None:
            return
        with suppress(OSError, RetinueError):
            make_private_folder(self.path.parent)
            if self.path.exists() and self.path.stat().st_size > KEPT_OLD:
                self.path.replace(self.path.with_suffix(".old.log"))
            self._fd = open_private_file(self.path, append=True)
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(self._fd, f"--- {stamp} process {os.getpid()}: {clean(what)}\n".encode("utf-8", "replace"))

    def take(self, data: bytes) -> None:
        """Words of the server."""
        self._tail = (self._tail + data[-TAIL:])[-TAIL:]
        self._write(data)

    def note(self, text: str) -> None:
        """Words of ours about it."""
        self._write(f"[{text}]\n".encode("utf-8", "replace"))

    def _write(self, data: bytes) -> None:
        if self._fd is None or self._room <= 0:
            return
        self._room -= len(data)
        with suppress(OSError):  # a full disk is no reason to stop listening
            os.write(self._fd, clean(data.decode("utf-8", "replace")).encode() if self._room > 0 else CUT)

    @property
    def last_words(self) -> str:
        """The last line that says something, or two."""
        lines = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return words.line(" / ".join(lines[-2:]))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
