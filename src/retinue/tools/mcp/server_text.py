"""Text from MCP servers made safe: without characters that no terminal or model should get, and bounded in length."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from retinue.core.secrets import scrub_text

NOT_MCP = "is not what MCP requires"
MAX_PROBLEMS = 100
DESCRIPTION = 8 * 1024
LINE = 300
READ = 16 * 1024  # characters of a text of which only a part is shown; the others are only counted
MAX_DEPTH = 40
# Control characters except newline and tab, text direction overrides, lone surrogates, and invisible tags.
_UNSEEN_ASCII = dict.fromkeys([*range(9), *range(11, 32), 127])
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e0fff]")


def strip_unseen(text: str) -> str:
    """Remove control, direction and tag characters."""
    text = text.replace("\r\n", "\n")
    return text.translate(_UNSEEN_ASCII) if text.isascii() else _UNSEEN.sub("", text)  # much faster for ASCII


def cap_text(text: str, limit: int = DESCRIPTION) -> str:
    """Strip unseen characters. Cut a text longer than `limit`, with a mark."""
    return _cut_text(strip_unseen(text[:READ]), limit, len(text) - READ)


def to_line(text: str, limit: int = LINE) -> str:
    """Put the text on one line, for an error or a list, and remove everything that looks like a key."""
    line = scrub_text(" ".join(strip_unseen(text[:READ]).split()))
    return _cut_text(line, limit, len(text) - READ)


def _cut_text(text: str, limit: int, unread: int) -> str:
    cut = max(0, len(text) - limit) + max(0, unread)
    return f"{text[:limit]} [... {cut} characters cut]" if cut else text


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
    if isinstance(error, ValidationError):
        return describe_invalid_part(error) or f"its answer {NOT_MCP}"
    return to_line(str(error)) or type(error).__name__


def describe_invalid_part(error: ValidationError, part: tuple[str | int, ...] = ()) -> str:
    """Return the first problem below `part` of a server's answer; empty if the problems are elsewhere. A server can
    cause any number of problems, so many are not looked through."""
    if error.error_count() > MAX_PROBLEMS:
        return f"it {NOT_MCP}"
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        path = problem["loc"]
        if path[: len(part)] == part:
            field = ".".join(str(each) for each in path[len(part) :][:2])
            why = "is missing" if problem["type"] == "missing" else NOT_MCP
            return f"its '{to_line(field)}' {why}" if field else "it is not an object"
    return ""
