"""Text on a terminal: its width, its wrapping, and the escaping of foreign text. Escaping spells out characters that
move the cursor, or hide or reorder letters."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from typing import TextIO

from retinue.core.unseen import reveal_line, reveal_text

escape_text = reveal_text  # for bodies: keeps newlines and tabs, spells out every other invisible character


def escape_line(text: str) -> str:
    """Return `text` as one escaped line, for headers, labels and names."""
    if text.isascii() and text.isprintable():  # nearly all cells of a long table: bench row `ps --all`
        return text
    return reveal_line(text)


def measure_width(text: str) -> int:
    """Return the columns that `text` takes on a terminal. Wide letters take two, combining marks none."""
    if text.isascii():  # nearly all cells of a long table: bench row `ps --all`
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def cut_to_width(text: str, width: int, *, keeps_end: bool = False) -> str:
    """Return escaped text cut to `width` columns. An ellipsis marks the cut; with `keeps_end` it is in front."""
    if measure_width(text) <= width:
        return text
    if text.isascii():  # nearly all cells of a long table: bench row `ps --all`
        return f"…{text[len(text) - width + 1 :]}" if keeps_end else f"{text[: width - 1]}…"
    kept, left = "", width - 1
    for char in reversed(text) if keeps_end else text:
        left -= measure_width(char)
        if left < 0:
            break
        kept += char
    return f"…{kept[::-1]}" if keeps_end else f"{kept}…"


def wrap_line(line: str, width: int, *, at_words: bool = False) -> Iterator[str]:
    """Yield `line` in pieces of at most `width` columns; 0 means no limit. Without wrapping here, the terminal would
    break the line where no mark of ours precedes it. With `at_words`, break between words where possible and drop the
    space there."""
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
    """Return `line` wrapped between words to the width of the stream's terminal, or unchanged if there is no terminal.
    Lines after the first start with `indent`."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):  # closed, or not a file
        columns = 0
    if measure_width(line) <= columns or columns <= 2 * len(indent):
        return line
    first = next(wrap_line(line, columns, at_words=True))
    rest = line[len(first) :].removeprefix(" ")
    return f"\n{indent}".join([first, *wrap_line(rest, columns - len(indent), at_words=True)])
