"""The events that a peer may see: of a tree here that the peer asked for, or of a tree there that we asked for.

Only the listed kinds are sent, and of `run.spawned` only the listed fields. Instructions, tools, limits and paths of
this machine stay here. Pure: no I/O.
"""

from __future__ import annotations

import msgspec

from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Gap,
    Inbox,
    Message,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunStarted,
    Thinking,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    UsageReported,
    Warned,
)

REPORTED = (
    RunStarted, TurnStarted, Thinking, Message, ToolCall, ToolStarted, ToolResult, ApprovalAsked, ApprovalDecided,
    Inbox, UsageReported, TurnEnded, Warned, Gap, RunEnded,
)  # fmt: skip
SENT = (*REPORTED, RunResumed)  # a client of ours withdraws the questions of a resumed run, and adopts no such event


def strip_event(event: Event) -> Event | None:
    """Return the event as a peer may see it, or None for an event that no peer may see."""
    body = event.body
    if isinstance(body, RunSpawned):
        spawned = RunSpawned(
            parent=body.parent,
            label=body.label,
            depth=body.depth,
            task=body.task,
            subagent_id=body.subagent_id,
            workspace="",
            model=body.model,
            call_id=body.call_id,
            trace_id=body.trace_id,
            span_id=body.span_id,
        )
        return msgspec.structs.replace(event, body=spawned)
    if not isinstance(body, SENT):
        return None
    if isinstance(body, Thinking | Message | ToolResult | RunEnded) and body.file:
        return msgspec.structs.replace(event, body=msgspec.structs.replace(body, file=""))
    return event
