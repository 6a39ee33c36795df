"""Keys that the user presses, parsed from the bytes of a terminal. Knows neither the terminal nor questions.

Pasted text becomes one `Paste`, never keys, so it cannot press anything. Unknown escape sequences are dropped.
"""

from __future__ import annotations

import codecs
import re

import msgspec

ENTER = "enter"
NEWLINE = "ctrl-j"
ESCAPE = "escape"
BACKSPACE = "backspace"
TAB = "tab"
PASTE_START = b"\x1b[200~"
PASTE_END = b"\x1b[201~"
MAX_PASTE_BYTES = 4 * 1024 * 1024
_ESC = 0x1B
_CONTROL = {0x0D: ENTER, 0x0A: NEWLINE, 0x09: TAB, 0x08: BACKSPACE, 0x7F: BACKSPACE}
_SEQUENCE = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[ -~]")
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
_SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left",
    b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left",
    b"\x1b[H": "home", b"\x1b[F": "end", b"\x1bOH": "home", b"\x1bOF": "end",
    b"\x1b[1~": "home", b"\x1b[4~": "end", b"\x1b[7~": "home", b"\x1b[8~": "end",
    b"\x1b[3~": "delete", b"\x1b[5~": "page-up", b"\x1b[6~": "page-down",
    b"\x1b[1;5C": "word-right", b"\x1b[1;5D": "word-left", b"\x1b[1;3C": "word-right", b"\x1b[1;3D": "word-left",
    b"\x1b[Z": "shift-tab", b"\x1b[13;2u": NEWLINE, b"\x1b[27;2;13~": NEWLINE,
}  # fmt: skip
_ALT = {b"\x1b\r": NEWLINE, b"\x1bb": "word-left", b"\x1bf": "word-right", b"\x1b\x7f": "ctrl-w"}


class Key(msgspec.Struct, frozen=True, gc=False):
    """A key. `text` is the text it types, empty for other keys. `name` is that text, or a name such as `enter`, `up`
    or `ctrl-a`."""

    name: str
    text: str = ""


class Paste(msgspec.Struct, frozen=True, gc=False):
    """Text that was pasted in one piece. Line ends are newlines."""

    text: str


class KeyParser:
    """A parser that splits the bytes of a terminal into keys and pastes. It buffers incomplete sequences until more
    bytes arrive."""

    def __init__(self) -> None:
        self._bytes = b""
        self._paste: bytearray | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_unfinished(self) -> bool:
        """Return True while buffered bytes may be the start of a sequence, or the Escape key alone."""
        return bool(self._bytes) and self._paste is None

    def parse(self, data: bytes) -> list[Key | Paste]:
        """Return the keys and pastes that `data` completes."""
        self._bytes += data
        found: list[Key | Paste] = []
        while self._bytes:
            if self._paste is not None:
                if not self._parse_paste(found):
                    break
            elif not self._parse_key(found):
                break
        return found

    def flush(self) -> list[Key | Paste]:
        """Return the keys in the buffered bytes when no more bytes follow: Escape, or nothing."""
        kept, self._bytes = self._bytes, b""
        return [Key(ESCAPE)] if kept == b"\x1b" else []

    def _parse_paste(self, found: list[Key | Paste]) -> bool:
        """Consume bytes of the paste. Return True if the paste has ended."""
        assert self._paste is not None
        self._paste += self._bytes
        self._bytes = b""
        end = self._paste.find(PASTE_END)
        if end < 0:
            del self._paste[MAX_PASTE_BYTES : max(MAX_PASTE_BYTES, len(self._paste) - len(PASTE_END))]
            return False
        text = bytes(self._paste[:end]).decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
        self._bytes = bytes(self._paste[end + len(PASTE_END) :])
        self._paste = None
        found.append(Paste(text))
        return True

    def _parse_key(self, found: list[Key | Paste]) -> bool:
        """Consume the first key in the buffer. Return False if it is incomplete."""
        if self._bytes[0] == _ESC:
            return self._parse_escape(found)
        first, self._bytes = self._bytes[0], self._bytes[1:]
        if first in _CONTROL:
            found.append(Key(_CONTROL[first]))
        elif first < 0x20:
            found.append(Key(f"ctrl-{chr(first + 0x60)}"))
        else:
            text = self._decoder.decode(bytes([first]))
            found.extend(Key(char, char) for char in text)
        return True

    def _parse_escape(self, found: list[Key | Paste]) -> bool:
        if self._bytes.startswith(PASTE_START):
            self._bytes = self._bytes[len(PASTE_START) :]
            self._paste = bytearray()
            return True
        whole = _SEQUENCE.match(self._bytes)
        if whole is not None:
            self._bytes = self._bytes[whole.end() :]
            name = _SEQUENCES.get(whole[0])
            if name is not None:
                found.append(Key(name))
            return True
        if _UNFINISHED.match(self._bytes):
            return False
        name = _ALT.get(self._bytes[:2])
        if name is not None:
            self._bytes = self._bytes[2:]
            found.append(Key(name))
        else:  # Escape, then another key
            self._bytes = self._bytes[1:]
            found.append(Key(ESCAPE))
        return True
