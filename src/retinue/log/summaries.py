"""One-line words about a tool call: what it was about, how it went. Pure text, no escaping (screens do that)."""

from __future__ import annotations

from typing import Any

from retinue.core.rules import CODE_MODE

_CONTEXT_ARGS = {
    "read": ("file_path", "path"),
    "write": ("file_path", "path"),
    "edit": ("file_path", "path"),
    "glob": ("pattern",),
    "grep": ("pattern",),
    "web_search": ("query",),
    "bash": ("command",),
    "shell": ("command",),
    CODE_MODE: ("code",),
}
_COUNTED = {"read": "lines", "glob": "files", "grep": "matches"}
_ONE = {"lines": "line", "files": "file", "matches": "match"}
_FIXED = {"write": "wrote file", "edit": "edited"}


def shorten(text: str, limit: int, keep: int) -> str:
    """The text, or its first `keep` characters and three dots when it is longer than `limit`."""
    return text if len(text) <= limit else text[:keep] + "..."


def context(name: str, args: dict[str, Any]) -> str:
    """The argument that says what a call is about: a path, a pattern, a command."""
    for key in _CONTEXT_ARGS.get(name, ()):
        value = args.get(key)
        if isinstance(value, str):
            return shorten(value, 60, 57) if key == "command" else _program(value) if key == "code" else value
    return ""


def _program(code: str) -> str:
    """A program on one line: how it begins, and how long it is."""
    lines = [line for line in lines_of(code) if line.strip()]
    first = shorten(lines[0].strip(), 60, 57) if lines else ""
    return first if len(lines) < 2 else f"{first} ... {len(lines)} lines"


def lines_of(text: str) -> list[str]:
    """The lines as a terminal and `wc` count them: ended by a newline, with or without a carriage return before it.
    Form feeds, Unicode separators and the like are text (`str.splitlines` breaks there)."""
    if "\n" not in text:
        return [text] if text else []
    *whole, rest = text.split("\n")
    lines = [line.removesuffix("\r") for line in whole]
    return [*lines, rest] if rest else lines


def summary(name: str, text: str, success: bool, spoken: bool = False) -> str:
    """How a call went: a count, a fixed word, or the first line of what went wrong. A program reads `1 lines`, a person
    (`spoken`) 1 line."""
    if not success:
        return shorten(lines_of(text)[0] if text else "Error", 50, 47)
    if name in _FIXED:
        return _FIXED[name]
    count = text.count("\n") + (not text.endswith("\n")) if text else 0  # of `lines_of`, which need not be made
    if not count and name not in _COUNTED:
        return "done"
    if count == 1 and name in ("bash", "shell"):
        return shorten(lines_of(text)[0], 50, 47)
    what = _COUNTED.get(name, "lines")
    return f"{count} {_ONE[what] if spoken and count == 1 else what}"
