"""Text that screens share, as spans with a role: a call, a question, counts, JSON for people. Knows no terminal."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from retinue.core.approvals import Approval
from retinue.core.events import ApprovalAsked
from retinue.log.summaries import describe_call, shorten_text

Role = Literal["plain", "mark", "name", "label", "tool", "good", "bad", "faint"]
Span = tuple[Role, str]


def make_question_spans(label: str | None, tool: str, args: dict[str, Any]) -> tuple[Span, ...]:
    """Return the spans of a question, `◐ [label] edit(src/lib.rs)`. The primary has no label."""
    who: tuple[Span, ...] = () if label is None else (("label", f"[{label}] "),)
    return (("mark", "◐ "), *who, *make_call_spans(tool, args))


def format_question_body(question: Approval | ApprovalAsked) -> str:
    """Return the text a person needs to see before they answer: the preview, or the arguments if there is none."""
    return question.preview or (format_json(question.args) if question.args else "")


def format_json(value: Any) -> str:
    """Format a value as JSON for people, with two spaces of indent; values that are no JSON by their text."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "(nested too deeply to show)"


def reformat_json(text: str) -> str:
    """Indent a JSON object or array by two spaces; return any other text as it is."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def format_seconds(value: float) -> str:
    """Format seconds as `10s` or `2.5s`."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s" if value < 1e9 else f"{value:g}s"


def make_call_spans(tool: str, args: dict[str, Any]) -> tuple[Span, ...]:
    return ("tool", tool), ("plain", f"({describe_call(tool, args) or _describe_args(args)})")


def _describe_args(args: dict[str, Any]) -> str:
    """Describe a call by its first argument, for tools without an argument known to matter most."""
    for name, value in args.items():
        if isinstance(value, str):
            return shorten_text(value, 60, 57)
        if isinstance(value, list):
            return f"{len(value)} {name}"
    return ""


def format_count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
