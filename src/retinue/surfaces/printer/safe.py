"""Text on a terminal: its width and its lines, and the escaping of foreign text, which spells out characters that move
the cursor, hide or reorder letters."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator
from typing import TextIO

# Every control, format and surrogate character, line and paragraph separators, tags, variation selectors beyond
# those of emoji, and the letters that are blank: none of them is seen, so none of them is trusted.
_UNSEEN = (
    "\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_IN_LINES = re.compile(f"[\x00-\x1f{_UNSEEN}]")
_IN_TEXTS = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSEEN}]")


def escape_line(text: str) -> str:
    """Return text for headers, labels and names: one line, whatever was in it."""
    if text.isascii() and text.isprintable():  # nearly all cells of a long table: bench row `ps --all`
        return text
    return _IN_LINES.sub(_spell_out, text)


def escape_text(text: str) -> str:
    """Return text for bodies: newlines and tabs stay, every other invisible character is spelled out."""
    return _IN_TEXTS.sub(_spell_out, text)


def measure_width(text: str) -> int:
    """Return the columns a text takes on a terminal: wide letters take two, combining marks none."""
    if text.isascii():  # nearly all cells of a long table: bench row `ps --all`
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def wrap_line(line: str, width: int, *, at_words: bool = False) -> Iterator[str]:
    """Yield a line in pieces that fit the width, so that the terminal does not break it where no mark of ours would be;
    0 is no limit. `at_words` breaks it between words where it can, and drops the space there."""
    start = used = 0
    line = line.expandtabs()
    for at, char in enumerate(line):
        columns = measure_width(char)
        if width > 0 and used + columns > max(width, 2):
            space = line.rfind(" ", start, at + 1) if at_words else -1
            end = space if space > start else at
            yield line[start:end]
            start = end + (space > start)
            used = measure_width(line[start:at]) - (columns if start > at else 0)
        used += columns
    yield line[start:]


def fold_line(line: str, stream: TextIO, *, indent: str = "") -> str:
    """Return a line for a stream, broken between words where its terminal is too narrow; as it is where there is none.
    The lines below the first begin with `indent`."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # closed, or not a file
        columns = 0
    if measure_width(line) <= columns or columns <= 2 * len(indent):
        return line
    first = next(wrap_line(line, columns, at_words=True))
    rest = line[len(first) :].removeprefix(" ")
    return f"\n{indent}".join([first, *wrap_line(rest, columns - len(indent), at_words=True)])


def _spell_out(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]
