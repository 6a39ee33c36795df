"""The folds of events for reading after a run: the run as a Markdown page, and its tool calls with arguments, preview,
permission and result."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from retinue.core.events import (
    AnswerGiven,
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Inbox,
    MemberLost,
    Message,
    RunEnded,
    RunSpawned,
    TeamDecided,
    Thinking,
    ToolCall,
    ToolResult,
    VoteCast,
    Warned,
)
from retinue.log.blocks import make_team_spans


def format_transcript(events: Iterable[Event]) -> str:
    """Format the events of a run in order: task, thoughts, messages, calls. Foreign texts are quoted or fenced."""
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
            case AnswerGiven() | VoteCast() | MemberLost() | TeamDecided():
                parts.append(_format_team_fact(event.body))
            case Warned(text=text):
                parts.append("## Warning\n\n" + _quote_text(text))
            case RunEnded(status=status, final_response=text, error_details=error):
                parts.append(
                    f"## Ended: {status}\n\n{text}" + (f"\n\n{_quote_text(error)}" if error and error != text else "")
                )
    return "\n\n".join(parts) + "\n"


def _format_team_fact(fact: AnswerGiven | VoteCast | MemberLost | TeamDecided) -> str:
    match fact:
        case AnswerGiven(member=agent, label=label, text=text):
            return f"## Answer {label} of {agent}\n\n{_quote_text(text)}"
        case VoteCast(member=agent, choice=choice, reason=reason):
            return f"## Vote of {agent}: {choice or 'abstained'}\n\n{_quote_text(reason)}"
    return "## Team\n\n" + "".join(text for _, text in make_team_spans(fact))


def _quote_text(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines()) or "> "


def _fence_text(text: str, language: str = "") -> str:
    """Put a text between fences longer than any fence inside it."""
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text}\n{ticks}"


EVERY_TOOL = "*"


class Action(msgspec.Struct):
    """One tool call. `asked`: a person was asked. `allowed` is None while a question is open, and for a call that
    neither a person nor a rule decided. `success` is None until there is a result."""

    run: int
    path: str
    at: float
    call_id: str
    tool: str
    args: dict[str, Any]
    tier: str
    asked: bool = False
    preview: str = ""
    allowed: bool | None = None
    by: str = ""
    reason: str = ""
    success: bool | None = None
    text: str = ""
    duration_ms: int = 0
    file: str = ""

    @property
    def permission(self) -> str:
        """A phrase with the decision and the person or rule behind it."""
        if self.allowed is None:
            return "nobody has answered" if self.asked else "nobody was asked"
        words = f"{'approved' if self.allowed else 'denied'} by {self.by or 'somebody'}"
        return f"{words}: {self.reason}" if self.reason else words


def fold_actions(events: Iterable[Event], *, path: str, tools: Collection[str]) -> list[Action]:
    """Return the calls of the given tools by the run at `path` and the runs below it, in order."""
    found: dict[tuple[int, str], Action] = {}
    for event in events:
        body = event.body
        if not (event.path == path or event.path.startswith(path + "/")):
            continue
        if isinstance(body, ToolCall) and (body.name in tools or EVERY_TOOL in tools):
            key = event.run, body.call_id
            found[key] = Action(
                run=event.run,
                path=event.path,
                at=event.at,
                call_id=body.call_id,
                tool=body.name,
                args=body.args,
                tier=body.tier,
            )
        elif isinstance(body, ApprovalAsked | ApprovalDecided | ToolResult):
            action = found.get((event.run, body.call_id))
            if action is not None:
                _apply_body(action, body)
    return list(found.values())


def _apply_body(action: Action, body: ApprovalAsked | ApprovalDecided | ToolResult) -> None:
    match body:
        case ApprovalAsked(preview=preview):
            action.asked, action.preview = True, preview
        case ApprovalDecided(allowed=allowed, by=by, surface=surface, reason=reason, args=args):
            action.allowed, action.by, action.reason = allowed, f"{by} ({surface})" if surface else by, reason
            if args is not None:  # the call runs with edited arguments, which the preview does not show
                action.args, action.preview = args, ""
        case ToolResult(success=success, text=text, duration_ms=took, file=file):
            action.success, action.text, action.duration_ms, action.file = success, text, took, file
