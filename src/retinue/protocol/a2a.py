"""The A2A extension between two retinue processes: metadata in addition to the standard A2A fields.

An agent that offers `EXTENSION` in its card accepts the remaining limits of the requesting run in the metadata of a
message. It sends every event of its tree as JSON text in the metadata of a status update, with the sequence number as
a cursor, and text deltas while its models generate. A client that was disconnected subscribes again after a cursor
(`AFTER_HEADER`). Pure: no A2A library, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from retinue.core.approvals import INPUT_REQUIRED, Allow, Approval, Decision, Deny, find_answer_text
from retinue.core.caller import Caller
from retinue.core.events import ApprovalAsked, Delta, Event, encode_event
from retinue.protocol import inherited_limits
from retinue.protocol.control import decode_item, encode_delta
from retinue.protocol.peer_events import strip_event
from retinue.protocol.strict_json import MAX_DIGITS

EXTENSION = "urn:retinue:a2a:runs:1"
AFTER_HEADER = "Retinue-After"
ASKED, ANSWERED = "approval.asked", "approval.answer"
PATH_KEY, RUN_KEY = "retinue/path", "retinue/run"
MOST_PREVIEW = MOST_ANSWER = 64 * 1024  # characters
TOO_LONG = f"the user's answer has more than {MOST_ANSWER} characters"


def make_request_metadata(caller: Caller, path: str) -> dict[str, Any]:
    """Return the metadata of a message that requests a run: the run's path here and its remaining limits.

    Numbers are sent as text, since A2A turns every number into a float."""
    return {**{key: str(value) for key, value in inherited_limits.to_meta(caller).items()}, PATH_KEY: path}


def make_command_metadata(run: str) -> dict[str, Any]:
    """Return the metadata of a message or a cancel for run number `run` of the peer's tree."""
    return {RUN_KEY: run}


def read_command_metadata(metadata: object) -> int | None:
    """Return the number of the run that a message or a cancel is for. The default is 0, the task itself. Return None
    for an invalid number."""
    if not isinstance(metadata, Mapping) or RUN_KEY not in metadata:
        return 0
    return read_number(metadata[RUN_KEY])


def read_number(text: object) -> int | None:
    """Parse a number that the peer sent as text. Return None for any other value."""
    if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return int(text)
    return None


def make_event_metadata(item: Event | Delta) -> dict[str, Any] | None:
    """Return the metadata that carries an event or a delta to another process, or None for an item that is not sent.

    A delta has no cursor, because deltas are not sent again."""
    if isinstance(item, Delta):
        return {"event": encode_delta(item).decode("utf-8", "replace")} if item.text else None
    event = strip_event(item)
    if event is None:
        return None
    return {"event": encode_event(event).decode("utf-8", "replace"), "cursor": str(event.seq)}


def read_event_metadata(metadata: object) -> tuple[Event | Delta, str] | None:
    """Return the event or delta in the metadata of an update, and its cursor, or None if there is none.

    Raises `msgspec.MsgspecError` for malformed content."""
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("event"), str):
        return None
    cursor = metadata.get("cursor")
    return decode_item(metadata["event"].encode()), "" if read_number(cursor) is None else str(cursor)


# Approvals that a client answers


class ApprovalAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag=ANSWERED):
    """The data part that answers a question. The answer counts only for the action with this `digest`. `answer` is the
    text for a free-text question."""

    approval_id: str
    digest: str
    decision: Literal["allow", "deny"]
    reason: str = ""
    answer: Annotated[str, msgspec.Meta(max_length=MOST_ANSWER)] = ""

    @property
    def verdict(self) -> Decision:
        if self.decision == "allow":
            return Allow(args={"answer": self.answer}) if self.answer else Allow()
        return Deny(self.reason[:1000] or "the client said no")


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


def make_answer(asked: ApprovalAsked, decision: Decision) -> dict[str, Any]:
    """Return the data part that answers a question. A text that is too long is not sent, which is a no."""
    answer: dict[str, Any] = {"type": ANSWERED, "approval_id": asked.approval_id, "digest": asked.digest}
    if isinstance(decision, Deny):
        return {**answer, "decision": "deny", "reason": decision.reason}
    text = find_answer_text(decision) if asked.tool == INPUT_REQUIRED else ""
    if len(text) > MOST_ANSWER:
        return {**answer, "decision": "deny", "reason": TOO_LONG}
    return {**answer, "decision": "allow", **({"answer": text} if text else {})}


def read_approval_answer(data: object) -> ApprovalAnswer | None:
    """Return the answer in a data part, or None if the part is not an answer.

    Raises `msgspec.ValidationError` for a malformed answer."""
    if not isinstance(data, Mapping) or data.get("type") != ANSWERED:
        return None
    return msgspec.convert(data, ApprovalAnswer)
