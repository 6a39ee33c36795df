"""The words screens share, in pieces that say what each is: a call, a question, counts, JSON for people. Pure text."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from retinue.core.approvals import Approval
from retinue.core.events import ApprovalAsked
from retinue.log.summaries import context, shorten

Role = Literal["plain", "mark", "name", "label", "tool", "good", "bad", "faint"]
Span = tuple[Role, str]


def question_spans(label: str | None, tool: str, args: dict[str, Any]) -> tuple[Span, ...]:
    """`◐ [label] edit(src/lib.rs)`; the primary has no label."""
    who: tuple[Span, ...] = () if label is None else (("label", f"[{label}] "),)
    return (("mark", "◐ "), *who, *call_spans(tool, args))


def question_body(question: Approval | ApprovalAsked) -> str:
    """What a person has to see before they answer: the preview, or without one the arguments."""
    return question.preview or (pretty(question.args) if question.args else "")


def pretty(value: Any) -> str:
    """JSON with two spaces of indent, for people: what JSON has no word for is named."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "(nested too deeply to show)"


def reformatted(text: str) -> str:
    """A JSON object or array with two spaces of indent; anything else as it is."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def seconds(value: float) -> str:
    """10s, 2.5s."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s" if value < 1e9 else f"{value:g}s"


def call_spans(tool: str, args: dict[str, Any]) -> tuple[Span, ...]:
    return ("tool", tool), ("plain", f"({context(tool, args) or _gist(args)})")


def _gist(args: dict[str, Any]) -> str:
    """What the first argument says, for tools that have no argument known to matter most."""
    for name, value in args.items():
        if isinstance(value, str):
            return shorten(value, 60, 57)
        if isinstance(value, list):
            return f"{len(value)} {name}"
    return ""


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
