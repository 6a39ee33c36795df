"""The output of a server outside the protocol (stderr, log messages), kept in a file and never shown on a terminal.

The file is private and bounded. Output beyond the bound is read and dropped, so that a server never waits for us.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from retinue.core.errors import RetinueError
from retinue.core.secrets import clean_text
from retinue.files.private import make_private_folder, open_private_file
from retinue.tools.mcp.server_text import to_line

MAX_BYTES = 4 * 1024 * 1024
ROTATE_BYTES = 1024 * 1024
TAIL_BYTES = 2048
CUT = b"\n[... the rest is not kept ...]\n"


class ServerOutput:
    """One server's output file. Without a path only the last lines are kept, in memory."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._fd: int | None = None
        self._room = MAX_BYTES
        self._tail = b""

    def start_section(self, title: str) -> None:
        """Open the file for a new start of the server, with a header line that contains `title`."""
        self.close()
        self._room, self._tail = MAX_BYTES, b""
        if self.path is None:
            return
        with suppress(OSError, RetinueError):
            make_private_folder(self.path.parent)
            if self.path.exists() and self.path.stat().st_size > ROTATE_BYTES:
                self.path.replace(self.path.with_suffix(".old.log"))
            self._fd = open_private_file(self.path, append=True)
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            os.write(self._fd, f"--- {stamp} process {os.getpid()}: {clean_text(title)}\n".encode("utf-8", "replace"))

    def add_output(self, data: bytes) -> None:
        """Add output of the server."""
        self._tail = (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        self._write(data)

    def add_note(self, text: str) -> None:
        """Add a note of our own about the server."""
        self._write(f"[{text}]\n".encode("utf-8", "replace"))

    def _write(self, data: bytes) -> None:
        if self._fd is None or self._room <= 0:
            return
        self._room -= len(data)
        with suppress(OSError):  # a full disk must not end the connection
            os.write(self._fd, clean_text(data.decode("utf-8", "replace")).encode() if self._room > 0 else CUT)

    @property
    def last_lines(self) -> str:
        """The last two lines that are not blank, joined into one."""
        lines = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return to_line(" / ".join(lines[-2:]))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
