"""The fold of one run's events into the thread its model saw: what resuming and continuing start from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from retinue.core.events import (
    Event,
    Inbox,
    Message,
    RunSpawned,
    Thinking,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
)
from retinue.core.messages import AssistantTurn, Call, Native, Thought, ToolTurn, Turn, UserTurn


def thread(events: Iterable[Event], run: int) -> list[Turn]:  # noqa: PLR0912 - one case for each kind
    """The turns in the order the model saw them. Tool results stand in the order of their calls."""
    turns: list[Turn] = []
    waiting: list[UserTurn] = []
    thoughts: list[Thought] = []
    text = ""
    calls: list[Call] = []
    results: dict[str, ToolTurn] = {}
    natives: dict[str, Native] = {}
    for event in events:
        if event.run != run:
            continue
        match event.body:
            case RunSpawned(task=task):
                turns.append(UserTurn(task))
            case Inbox(text=words, source=source):
                waiting.append(UserTurn(words, source))
            case TurnStarted():
                turns += waiting
                waiting.clear()
            case Thinking(text=words, file=file) as body:
                thoughts.append(Thought(_whole(words, file), body.type, body.signature, body.block_id, body.origin))
            case Message(text=words, file=file, host=False):
                text = _whole(words, file)
            case ToolCall(call_id=call_id, name=name, args=args, tier="provider"):
                natives[call_id] = Native(call_id, name, args, "")
            case ToolResult(call_id=call_id, text=words, success=success) as body if call_id in natives:
                done = natives[call_id]
                natives[call_id] = Native(
                    call_id, done.name, done.args, words, success, content=body.content, origin=body.origin
                )
            case ToolCall(call_id=call_id, name=name, args=args, host=False):
                calls.append(Call(call_id, name, args))
            case ToolResult(call_id=call_id, name=name, text=words, success=success):
                results[call_id] = ToolTurn(call_id, name, words, success)
            case TurnEnded():
                turns.append(AssistantTurn(text, tuple(calls), tuple(thoughts), tuple(natives.values())))
                turns += [results[call.id] for call in calls if call.id in results]
                text, calls, thoughts, results, natives = "", [], [], {}, {}
            case _:
                pass
    return turns + list(waiting)


def _whole(text: str, file: str) -> str:
    return Path(file).read_text() if file else text
