"""Redaction of events: known secrets leave every event before it is folded, stored or shown."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from retinue.core import events, secrets
from retinue.core.events import Body

B = TypeVar("B", bound=Body)

# The fields of each kind of event that hold text of users, models, tools or peers. Other kinds hold none. A profile
# and its tools are redacted when the plan is made, once for all its runs.
_TEXT_FIELDS: dict[type[Body], tuple[str, ...]] = {
    events.RunSpawned: ("label", "task", "subagent_id", "task_context", "context_paths"),
    events.Thinking: ("text",),
    events.Message: ("text",),
    events.ToolCall: ("args", "raw", "name", "display_name", "call_id"),
    events.ToolResult: ("text", "content", "name", "call_id"),
    events.ApprovalAsked: ("args", "preview", "label", "rule", "tool", "call_id"),
    events.ApprovalDecided: ("reason", "by", "rule", "args", "tool", "call_id"),
    events.Inbox: ("text",),
    events.ProgressReported: ("nickname", "tool_name", "tool_context"),
    events.AnswerGiven: ("text", "call_id"),
    events.AnswersShown: ("missed",),
    events.VoteCast: ("reason", "call_id"),
    events.MemberLost: ("reason",),
    events.RoundAnswered: ("text", "call_id"),
    events.RoundEvaluated: ("packet", "tasks", "problems"),
    events.ChecklistAccepted: ("call_id",),
    events.ImprovementsProposed: ("improvements", "call_id"),
    events.RoundVoted: ("reason", "call_id"),
    events.Warned: ("text",),
    events.RunWaiting: ("text",),
    events.RunEnded: ("final_response", "error_details", "partial", "structured", "changed_files"),
}


def redact(body: B) -> B:
    """Return `body`, or a copy without secrets if it contains any."""
    names = _TEXT_FIELDS.get(type(body))
    if names is None:
        return body
    changes = None
    for name in names:
        value = getattr(body, name)
        if value:
            cleaned = secrets.clean_text(value) if type(value) is str else secrets.clean_value(value)
            if cleaned is not value:
                changes = {**(changes or {}), name: cleaned}
    return body if changes is None else msgspec.structs.replace(body, **changes)
