"""Foreign text on a terminal: its width, and its escaping, which spells out characters that move the cursor, hide or
reorder letters."""

from __future__ import annotations

import unicodedata

from retinue.core.unseen import reveal_line, reveal_text


def escape_line(text: str) -> str:
    """Return text for headers, labels and names: one line, whatever was in it."""
    return reveal_line(text)


def escape_text(text: str) -> str:
    """Return text for bodies: newlines and tabs stay, every other invisible character is spelled out."""
    return reveal_text(text)


def measure_width(text: str) -> int:
    """Return the columns a text takes on a terminal: wide letters take two, combining marks none."""
    if text.isascii():  # nearly all cells of a long table: bench row `ps --all`
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)
