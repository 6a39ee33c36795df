"""One-line texts about a tool call: its main argument and its result. The texts are not escaped (screens do that)."""

from __future__ import annotations

from typing import Any

from retinue.core.rounds import GET_TASK_PLAN, PROPOSE_IMPROVEMENTS, SUBMIT_CHECKLIST
from retinue.core.rules import CODE_MODE
from retinue.core.teams import NEW_ANSWER, VOTE

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
    VOTE: ("agent_id",),
}
_COUNTED = {"read": "lines", "glob": "files", "grep": "matches"}
_ONE = {"lines": "line", "files": "file", "matches": "match"}
_FIXED = {
    "write": "wrote file", "edit": "edited", NEW_ANSWER: "given", VOTE: "cast", GET_TASK_PLAN: "read",
    SUBMIT_CHECKLIST: "accepted", PROPOSE_IMPROVEMENTS: "accepted",
}  # fmt: skip


def shorten_text(text: str, limit: int, keep: int) -> str:
    """Cut a text longer than `limit` to its first `keep` characters, followed by three dots."""
    return text if len(text) <= limit else text[:keep] + "..."


def describe_call(name: str, args: dict[str, Any]) -> str:
    """Describe a call by its most important argument: a path, a pattern, a command."""
    for key in _CONTEXT_ARGS.get(name, ()):
        value = args.get(key)
        if isinstance(value, str):
            if key == "code":
                return _describe_program(value)
            return shorten_text(value, 60, 57) if key == "command" else value
    return ""


def _describe_program(code: str) -> str:
    """Describe a program on one line: its first line and its number of lines."""
    lines = [line for line in split_lines(code) if line.strip()]
    first = shorten_text(lines[0].strip(), 60, 57) if lines else ""
    return first if len(lines) < 2 else f"{first} ... {len(lines)} lines"


def split_lines(text: str) -> list[str]:
    """Split a text into lines as a terminal and `wc` do: at each newline, with or without a carriage return before it.
    Unlike `str.splitlines`, do not split at form feeds, Unicode separators and the like."""
    if "\n" not in text:
        return [text] if text else []
    *whole, rest = text.split("\n")
    lines = [line.removesuffix("\r") for line in whole]
    return [*lines, rest] if rest else lines


def reword_summary(name: str, summary: str, success: bool) -> str:
    """Return a stored summary, which is worded for programs, in words for people: `1 line` instead of `1 lines`."""
    one = {f"1 {what}": f"1 {single}" for what, single in _ONE.items()}
    return one.get(summary, summary) if success and name not in ("bash", "shell") else summary


def summarize_result(name: str, text: str, success: bool, spoken: bool = False) -> str:
    """Summarize the result of a call: a count, a fixed word, or the first line of an error. The count is `1 line` for
    people (`spoken`) and `1 lines` for programs."""
    if not success:
        return shorten_text(split_lines(text)[0] if text else "Error", 50, 47)
    if name in _FIXED:
        return _FIXED[name]
    count = len(split_lines(text)) if "\n" in text else 1 if text else 0
    if not count and name not in _COUNTED:
        return "done"
    if count == 1 and name in ("bash", "shell"):
        return shorten_text(split_lines(text)[0], 50, 47)
    what = _COUNTED.get(name, "lines")
    if spoken and count == 1:
        what = _ONE[what]
    return f"{count} {what}"
