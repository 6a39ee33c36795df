"""The extension of A2A between two retinue processes, and its shapes beside the standard fields.

An agent that offers `EXTENSION` in its card takes, in the metadata of a message, what is left to the run that asks, and
gives every event of its tree as JSON text in the metadata of a status update, with its place as a cursor, and pieces of
text while its models speak. A client that was cut off subscribes again after a cursor (`AFTER_HEADER`). Pure: no A2A
library, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from retinue.core.approvals import Allow, Approval, Decision, Deny
from retinue.core.caller import Caller
from retinue.core.events import (
    Delta,
    Event,
    Message,
    RunEnded,
    RunRemote,
    RunSpawned,
    Thinking,
    ToolResult,
    Unknown,
    encode_event,
)
from retinue.protocol import inherited_limits
from retinue.protocol.control import decode_item, encode_delta

EXTENSION = "urn:retinue:a2a:runs:1"
AFTER_HEADER = "Retinue-After"
ASKED, ANSWERED = "approval.asked", "approval.answer"
PATH_KEY, RUN_KEY = "retinue/path", "retinue/run"
MOST_DIGITS = 18
MOST_PREVIEW = 64 * 1024
_TEXTS = (Message, Thinking, ToolResult, RunEnded)


def make_request_metadata(caller: Caller, path: str) -> dict[str, Any]:
    """Return the metadata of a message that asks for a run: its path here, and what is left to it. Numbers are texts:
    A2A turns every number into a float."""
    return {**{key: str(value) for key, value in inherited_limits.to_meta(caller).items()}, PATH_KEY: path}


def read_request_metadata(metadata: Mapping[str, Any]) -> Caller:
    """Return what is left to the run that asks; nonsense counts as nothing left."""
    return inherited_limits.from_meta(metadata)


def make_command_metadata(run: str) -> dict[str, Any]:
    """Return the metadata of words or a cancel that are for one run of the other tree, by its number there."""
    return {RUN_KEY: run}


def read_command_metadata(metadata: object) -> int:
    """Return the number of the run that words or a cancel are for: 0, the task itself, unless another is named."""
    return read_number(metadata.get(RUN_KEY) if isinstance(metadata, Mapping) else None) or 0


def read_number(text: object) -> int | None:
    """Return the number that a text of the other side is; None for any other value."""
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS:
        return int(text)
    return None


def make_event_metadata(item: Event | Delta) -> dict[str, Any] | None:
    """Return the metadata that carries an event or a delta to another process; None for one that stays here.
    Instructions, tools and paths of this machine are left out. A delta has no cursor: it is not told again."""
    if isinstance(item, Delta):
        return {"event": encode_delta(item).decode("utf-8", "replace")} if item.text else None
    event, body = item, item.body
    if isinstance(body, Unknown | RunRemote):
        return None
    if isinstance(body, RunSpawned):
        body = RunSpawned(
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
    elif isinstance(body, _TEXTS) and body.file:
        body = msgspec.structs.replace(body, file="")
    line = encode_event(msgspec.structs.replace(event, body=body))
    return {"event": line.decode("utf-8", "replace"), "cursor": str(event.seq)}


def read_event_metadata(metadata: object) -> tuple[Event | Delta, str] | None:
    """Return the event or the delta, and the cursor, that the metadata of an update carries; None if it carries none.
    Raises `msgspec.MsgspecError` for what is neither."""
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("event"), str):
        return None
    cursor = metadata.get("cursor")
    return decode_item(metadata["event"].encode()), "" if read_number(cursor) is None else str(cursor)


# Approvals that a client answers


class ApprovalAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=ANSWERED):
    """The data part that answers a question. It counts only for the action that has the digest."""

    approval_id: str
    digest: str
    decision: Literal["allow", "deny"]
    reason: str = ""

    @property
    def verdict(self) -> Decision:
        return Allow() if self.decision == "allow" else Deny(self.reason[:1000] or "the client said no")


def make_question(asked: Approval) -> dict[str, Any]:
    """Return the data part that asks a client about a call."""
    return {
        "type": ASKED,
        "approval_id": asked.id,
        "digest": asked.digest,
        "path": asked.path,
        "agent": asked.agent,
        "tool": asked.tool,
        "args": msgspec.to_builtins(asked.args, enc_hook=str),
        "preview": asked.preview[:MOST_PREVIEW],
    }


def make_answer(approval_id: str, digest: str, decision: Decision) -> dict[str, Any]:
    """Return the data part that answers a question."""
    word, reason = ("allow", "") if isinstance(decision, Allow) else ("deny", decision.reason)
    return {"type": ANSWERED, "approval_id": approval_id, "digest": digest, "decision": word, "reason": reason}


def read_approval_answer(data: object) -> ApprovalAnswer | None:
    """Return the answer that a data part is; None if it is about something else. Raises `msgspec.ValidationError` for
    an answer that is not well formed."""
    if not isinstance(data, Mapping) or data.get("type") != ANSWERED:
        return None
    return msgspec.convert(data, ApprovalAnswer)
