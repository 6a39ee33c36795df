"""Words of a server made fit for us: without what no terminal or model should get, and no longer than is of use."""

from __future__ import annotations

import re
from typing import Any

from retinue.core.secrets import scrub

DESCRIPTION = 8 * 1024
LINE = 300
DEEPEST = 40
# Control characters but for newlines and tabs, what turns letters around, and the tags that nobody sees.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e0fff]")


def plain(text: str) -> str:
    """The text without what is not seen."""
    return _UNSEEN.sub("", text.replace("\r\n", "\n"))


def capped(text: str, most: int = DESCRIPTION) -> str:
    """The plain text, cut with a mark where it is longer than is of use."""
    text = plain(text)
    return text if len(text) <= most else f"{text[:most]} [... {len(text) - most} characters cut]"


def line(text: str, most: int = LINE) -> str:
    """The text on one line, for an error or a list; what looks like a key is not in it."""
    return capped(scrub(" ".join(plain(text).split())), most)


def plain_value(value: Any, deep: int = 0) -> Any:
    """A value of JSON with all its texts plain; raises ValueError when it is nested without end."""
    if deep > DEEPEST:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        return capped(value)
    if isinstance(value, dict):
        return {plain(str(key)): plain_value(item, deep + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_value(item, deep + 1) for item in value]
    return value


def reason(error: BaseException) -> str:
    """What went wrong, on one line; of a group of errors the first that says something."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return line(str(error)) or type(error).__name__
