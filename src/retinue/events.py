"""The public event types: the body of each kind, for `match event.body`, and their union `EventBody`.

    async for event in run.events():
        match event.body:
            case events.ToolCall(name=name, args=args):
                print("calls", name, args)
            case events.RunEnded(status=status):
                print("ended", status)

docs/events.md lists the fields of each kind. `Unknown` is a kind that a newer version of Retinue has written."""

from __future__ import annotations

from retinue.core.events import (
    AnswerGiven,
    AnswersShown,
    ApprovalAsked,
    ApprovalDecided,
    ChecklistAccepted,
    Delta,
    Event,
    EventBody,
    Gap,
    ImprovementsProposed,
    Inbox,
    MemberLost,
    Message,
    ModelChanged,
    ProgressReported,
    RoundAnswered,
    RoundEvaluated,
    RoundVoted,
    RunEnded,
    RunRemote,
    RunResumed,
    RunSpawned,
    RunStarted,
    RunWaiting,
    TeamDecided,
    Thinking,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    Unknown,
    UsageReported,
    VoteCast,
    Warned,
)

__all__ = [
    "AnswerGiven",
    "AnswersShown",
    "ApprovalAsked",
    "ApprovalDecided",
    "ChecklistAccepted",
    "Delta",
    "Event",
    "EventBody",
    "Gap",
    "ImprovementsProposed",
    "Inbox",
    "MemberLost",
    "Message",
    "ModelChanged",
    "ProgressReported",
    "RoundAnswered",
    "RoundEvaluated",
    "RoundVoted",
    "RunEnded",
    "RunRemote",
    "RunResumed",
    "RunSpawned",
    "RunStarted",
    "RunWaiting",
    "TeamDecided",
    "Thinking",
    "ToolCall",
    "ToolResult",
    "ToolStarted",
    "TurnEnded",
    "TurnStarted",
    "Unknown",
    "UsageReported",
    "VoteCast",
    "Warned",
]
