"""The fold of one run's events into a page of Markdown a person reads afterwards."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from retinue.core.events import Event, Inbox, Message, RunEnded, RunSpawned, Thinking, ToolCall, ToolResult, Warned


def format_transcript(events: Iterable[Event]) -> str:
    """Format the events of a run in order: task, thoughts, messages, calls. Texts of others are quoted or fenced."""
    parts: list[str] = []
    for event in events:
        match event.body:
            case RunSpawned(label=label, task=task):
                parts.append(f"# {event.agent} [{label}]\n\n{event.path} in tree {event.tree}\n\n## Task\n\n{task}")
            case Thinking(text=text) if text:
                parts.append("## Thought\n\n" + _quote_text(text))
            case Message(text=text):
                parts.append(f"## Message\n\n{text}")
            case ToolCall(name=name, raw=raw) if raw:
                parts.append(f"## Tool call: {name}\n\n" + _fence_text(raw))
            case ToolCall(name=name, args=args):
                parts.append(
                    f"## Tool call: {name}\n\n"
                    + _fence_text(msgspec.json.format(msgspec.json.encode(args)).decode(), "json")
                )
            case ToolResult(name=name, text=text, success=success):
                parts.append(f"## Tool result: {name}{'' if success else ' (failed)'}\n\n" + _fence_text(text))
            case Inbox(text=text):
                parts.append("## Inbox\n\n" + _quote_text(text))
            case Warned(text=text):
                parts.append("## Warning\n\n" + _quote_text(text))
            case RunEnded(status=status, final_response=text, error_details=error):
                parts.append(
                    f"## Ended: {status}\n\n{text}" + (f"\n\n{_quote_text(error)}" if error and error != text else "")
                )
            case _:
                pass
    return "\n\n".join(parts) + "\n"


def _quote_text(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines()) or "> "


def _fence_text(text: str, language: str = "") -> str:
    """Put a text between fences longer than any inside it."""
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text}\n{ticks}"
