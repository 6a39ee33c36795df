"""Invisible characters, and characters that reorder the visible text. In foreign text none of them is trusted."""

from __future__ import annotations

import re

# Every control, format and surrogate character, line and paragraph separators, tags, variation selectors beyond
# those of emoji, and blank letters, as the inside of a regex character class. C0 is added below.
UNSEEN = (
    "\x7f-\x9f\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ud800-\udfff\ufeff\uffa0\ufff0-\ufffb"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_IN_LINES = re.compile(f"[\x00-\x1f{UNSEEN}]")
_IN_TEXTS = re.compile(f"[\x00-\x08\x0b-\x1f{UNSEEN}]")


def reveal_line(text: str) -> str:
    """Return text for headers, labels and names: always one line, with unseen characters spelled out."""
    return _IN_LINES.sub(_spell_out, text)


def reveal_text(text: str) -> str:
    """Return text for a person who has to judge it. Newlines and tabs stay; every other unseen character is spelled
    out."""
    return _IN_TEXTS.sub(_spell_out, text)


def _spell_out(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]
