"""Text from MCP servers made safe: without characters that no terminal or model should get, and bounded in length."""

from __future__ import annotations

import re
from typing import Any

from retinue.core.secrets import scrub_text

DESCRIPTION = 8 * 1024
LINE = 300
MAX_DEPTH = 40
# Control characters except newline and tab, text direction overrides, lone surrogates, and invisible tags.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e0fff]")


def strip_unseen(text: str) -> str:
    """Remove control, direction and tag characters."""
    return _UNSEEN.sub("", text.replace("\r\n", "\n"))


def cap_text(text: str, limit: int = DESCRIPTION) -> str:
    """Strip unseen characters. Cut a text longer than `limit`, with a mark."""
    text = strip_unseen(text)
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit} characters cut]"


def to_line(text: str, limit: int = LINE) -> str:
    """Put the text on one line, for an error or a list, and remove everything that looks like a key."""
    return cap_text(scrub_text(" ".join(strip_unseen(text).split())), limit)


def clean_server_value(value: Any, depth: int = 0) -> Any:
    """Apply `cap_text` to all texts of a JSON value. Raises ValueError if the value is nested too deeply."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, str):
        return cap_text(value)
    if isinstance(value, dict):
        return {strip_unseen(str(key)): clean_server_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_server_value(item, depth + 1) for item in value]
    return value


def describe_server_error(error: BaseException) -> str:
    """Describe an error on one line. For an exception group, describe its first exception."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return to_line(str(error)) or type(error).__name__
