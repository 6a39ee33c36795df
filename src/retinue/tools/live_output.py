"""The output of a running command for screens. Pieces may be dropped, but no piece contains half a secret.

Used on both sides of a sandbox. The tool server does not know the secrets: it drops whole lines and marks the gap. The
host masks the secrets before it drops anything.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable

from retinue.core.secrets import SecretStream

PIECE_SECONDS = 0.05
PIECE_CHARACTERS = 4096
_LINE_END = re.compile(r"[\r\n]")


class LiveOutput:
    """A throttle that passes output to `show`, at most one piece per `PIECE_SECONDS`.

    A piece is the last lines since the previous piece, with a flag that says whether lines before them were dropped.
    Output waits while `is_ready` returns False. `masks` hides secrets."""

    def __init__(
        self, show: Callable[[str, bool], None], *, is_ready: Callable[[], bool] | None = None, masks: bool
    ) -> None:
        self._show, self._is_ready, self._masks = show, is_ready, masks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._secrets = SecretStream()
        self._text = ""
        self._is_cut = False
        self._skips = False  # drops text up to the next line
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, data: bytes, *, is_cut: bool = False) -> None:
        """Take the next bytes. `is_cut` says that bytes before them are missing. Text held back so far is then
        dropped, since it may be the beginning of a secret whose rest is missing."""
        if is_cut:
            self._decoder.reset()
            self._secrets = SecretStream(is_cut=True)
            self._is_cut = True
        text = self._decoder.decode(data)
        self._text += self._secrets.feed(text) if self._masks else text
        self._drop_lines()
        if self._text and self._timer is None:
            self._send()

    def _drop_lines(self) -> None:
        """Keep the last lines only. A line that has lost its beginning is dropped as a whole."""
        if len(self._text) > PIECE_CHARACTERS:
            self._text = self._text[-PIECE_CHARACTERS:]
            self._is_cut = self._skips = True
        if self._skips:
            end = _LINE_END.search(self._text)
            self._skips = end is None
            self._text = "" if end is None else self._text[end.end() :]

    def _send(self) -> None:
        if self._text and (self._is_ready is None or self._is_ready()):
            text, is_cut, self._text, self._is_cut = self._text, self._is_cut, "", False
            self._show(text, is_cut)
        elif not self._text:
            self._timer = None
            return
        self._timer = asyncio.get_running_loop().call_later(PIECE_SECONDS, self._send)

    def close(self) -> None:
        """Stop showing output. The result of the call has the whole output."""
        if self._timer is not None:
            self._timer.cancel()
        self._text = ""
