"""Truncation of long text to a size that fits inline: the head, a mark that says how much is missing, and the tail.

`HeadAndTail` takes bytes as they arrive and keeps only the two ends in memory. `truncate_text` does the same for a
whole text. Sizes are counted in clean UTF-8, so that the model never gets more than the limit. The whole text goes to a
spill file, which the caller names. If the file cannot hold it (cap reached, disk full), the mark says how much was
kept.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from retinue.core.errors import RetinueError
from retinue.core.limits import INLINE_BYTES
from retinue.core.secrets import SecretStream, clean_beginning, clean_end
from retinue.files.private import open_private_file

SPILL_BYTES = 256 * 1024 * 1024
_MARK = re.compile(r"\n\[\.\.\. \d+ bytes cut; [^\n]* \.\.\.\]\n")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class HeadAndTail:
    """The head and the tail of a stream. `spill` returns the path of a new file for the whole text; `has` is a file
    that already holds it. A spill file gets at most `cap` bytes."""

    def __init__(
        self,
        limit: int = INLINE_BYTES,
        *,
        spill: Callable[[], Path] | None = None,
        has: Path | None = None,
        cap: int = SPILL_BYTES,
    ) -> None:
        self._limit, self._spill, self._cap = limit, spill, cap
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._secrets = SecretStream()
        self._head, self._tail = bytearray(), bytearray()
        self._total = 0
        self._path = has
        self._fd: int | None = None
        self._spilled = 0
        self._trouble = ""

    def feed(self, raw: bytes) -> None:
        self._keep_ends(self._secrets.feed(self._decoder.decode(raw)).encode())

    def close(self) -> tuple[str, str]:
        """Return the text, cut if it was too long, and the file with the whole text ("" if nothing was cut or kept)."""
        self._keep_ends((self._secrets.feed(self._decoder.decode(b"", True)) + self._secrets.rest()).encode())
        self.close_spill_file()
        if self._total <= self._limit:
            return (self._head + self._tail).decode(), ""
        room = max(0, self._limit - len(self._mark(self._total)))
        # The bytes are valid UTF-8, so "ignore" drops only a character that the cut has split.
        head = self._head[: room - room // 2].decode("utf-8", "ignore")
        tail = self._tail[len(self._tail) - room // 2 :].decode("utf-8", "ignore")
        mark = self._mark(self._total - len(head.encode()) - len(tail.encode()))
        return head + mark.decode() + tail, str(self._path or "")

    def close_spill_file(self) -> None:
        """Close the spill file. Safe to call again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _keep_ends(self, data: bytes) -> None:
        before, self._total = self._total, self._total + len(data)
        if self._total > self._limit:
            if before <= self._limit:
                self._open()
                self._write(bytes(self._head))
                self._tail += self._head
            self._write(data)
        if before + len(data) <= self._limit:
            self._head += data
            return
        self._head += data[: self._limit - len(self._head)]
        self._tail += data
        del self._tail[: -self._limit]

    def _open(self) -> None:
        if self._spill is None:
            return
        try:
            path = self._spill()
            self._fd = open_private_file(path)
        except (OSError, RetinueError) as error:
            self._trouble = getattr(error, "strerror", None) or str(error)
        else:
            self._path = path

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            return
        room = self._cap - self._spilled
        rest = memoryview(data)[:room]
        try:
            while rest:
                done = os.write(self._fd, rest)
                self._spilled += done
                rest = rest[done:]
        except OSError as error:
            self._trouble = error.strerror or str(error)
            if error.errno in _NO_SPACE:
                self._remove_file()
            self.close_spill_file()
        if len(data) > room:
            self._trouble = self._trouble or "the limit of such a file"
            self.close_spill_file()

    def _remove_file(self) -> None:
        """Remove the spill file from a full disk: the log needs the space more, and without a log the run ends."""
        assert self._fd is not None and self._path is not None
        os.ftruncate(self._fd, 0)
        self._path.unlink(missing_ok=True)
        self._path = None

    def _mark(self, missing: int) -> bytes:
        if self._path is None:
            where = f"not kept: {self._trouble}" if self._trouble else "not kept"
        elif self._trouble:
            where = f"only the first {self._spilled} bytes in {self._path}: {self._trouble}"
        else:
            where = f"whole text in {self._path}"
        return f"\n[... {missing} bytes cut; {where} ...]\n".encode("utf-8", "replace")


def truncate_text(text: str, limit: int = INLINE_BYTES, *, spill: Callable[[], Path]) -> tuple[str, str]:
    """Return the text, cut in the middle if it is over the limit, and the spill file that then has the whole text."""
    ends = HeadAndTail(limit, spill=spill)
    ends.feed(text.encode("utf-8", "replace"))
    return ends.close()


def clean_cut(text: str) -> str:
    """Return a truncated text without the halves of a secret on both sides of the cut.

    For text that was cut in a sandbox, where the secrets are not known."""
    found = _MARK.search(text)
    if found is None:
        return text
    return clean_end(text[: found.start()]) + found[0] + clean_beginning(text[found.end() :])
