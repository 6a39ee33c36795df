"""Reports of subagents to a collector: one JSON object per event, in the format that CPE processes send.

Encodes and decodes; does no I/O. Decoding is strict, with errors that name the field, but unknown fields are ignored.
We add some fields that peers need neither send nor read: `parentRunID` and `rootRunID` link runs, `seq` counts a run's
events from 1, `cost` is the cost of `tokenUsage` in US dollars, `success` says how a tool call went, and `status` how
a run ended.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal
from hashlib import sha256
from math import ceil
from typing import Any, Literal

import msgspec

from retinue.core.events import Body, RunEnded, RunSpawned, Thinking, ToolCall, ToolResult
from retinue.core.usage import NO_USAGE, Usage
from retinue.protocol.strict_json import InvalidBody, decode_body, encode_body

ROUTE = "/subagent-events"
UNNAMED_SUBAGENT = "subagent"  # the name of a subagent that gives none
ADDRESS = "RETINUE_SUBAGENT_LOGGING_ADDRESS"
CPE_ADDRESS = "CPE_SUBAGENT_LOGGING_ADDRESS"
BODY_BYTES = 4 * 1024 * 1024
PAYLOAD_BYTES = 128 * 1024
LONGEST_ID = 200
CODE_MODE = "execute_python_code"
MOST_TOKENS = 10**12
Type = Literal["subagent_start", "tool_call", "tool_result", "thought_trace", "subagent_end"]
_TOOL_TYPES = ("tool_call", "tool_result")
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d{1,30})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)
_COST = re.compile(r"\d{1,12}(\.\d{1,18})?", re.ASCII)
_LATEST_MILLIS = 253_402_300_800_000  # the year 10000
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _Tokens(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None


class Reported(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """One event as a peer posts it. `timestamp` is RFC3339, or milliseconds since 1970."""

    subagent_name: str
    run_id: str = msgspec.field(name="subagentRunID")
    timestamp: str | int | float
    type: Type
    tool_name: str | None = None
    call_id: str | None = msgspec.field(name="toolCallID", default=None)
    payload: str | None = None
    execution_timeout_seconds: int | float | None = None
    reasoning_type: str | None = None
    token_usage: _Tokens | None = None
    parent_id: str | None = msgspec.field(name="parentRunID", default=None)
    root_id: str | None = msgspec.field(name="rootRunID", default=None)
    seq: int | None = None
    cost: str | None = None
    success: bool = True
    status: str | None = None

    @property
    def usage(self) -> Usage | None:
        """Tokens that the model call spent; None if the peer does not say."""
        told = self.token_usage
        if told is None or told == _Tokens():
            return None
        output = told.output_tokens or 0
        given = told.input_tokens
        if given is None:
            given = max(0, (told.total_tokens or 0) - output)
        return Usage(given, output, told.cache_read_tokens or 0, told.cache_write_tokens or 0)

    @property
    def spent(self) -> Decimal | None:
        return None if self.cost is None else Decimal(self.cost)


_SPELLINGS = {"subagentRunId": "subagentRunID", "toolCallId": "toolCallID", "parentRunId": "parentRunID",
              "rootRunId": "rootRunID"}  # fmt: skip


def decode_report(body: bytes) -> Reported:
    """Decode the event in a request's body. Raises InvalidBody, which names the invalid field."""
    given = decode_body(body, dict[str, Any])
    for spelt, name in _SPELLINGS.items():
        if spelt in given:
            value = given.pop(spelt)
            if given.setdefault(name, value) != value:
                raise InvalidBody(f"`{name}` and `{spelt}` are both given and differ")
    try:
        event = msgspec.convert(given, Reported)
    except msgspec.ValidationError as error:
        raise InvalidBody(str(error)) from None
    _check_event(event)
    return event


def _check_event(event: Reported) -> None:
    for name, value in (("subagentName", event.subagent_name), ("subagentRunID", event.run_id)):
        if not value.strip():
            raise InvalidBody(f"`{name}` is blank")
    for name, value in (
        ("subagentName", event.subagent_name),
        ("subagentRunID", event.run_id),
        ("parentRunID", event.parent_id or ""),
        ("toolName", event.tool_name or ""),
        ("toolCallID", event.call_id or ""),
        ("reasoningType", event.reasoning_type or ""),
    ):
        if len(value) > LONGEST_ID:
            raise InvalidBody(f"`{name}` is longer than {LONGEST_ID} characters")
        if _UNSEEN.search(value):
            raise InvalidBody(f"`{name}` holds a control character")
    if event.type in _TOOL_TYPES and not (event.tool_name or "").strip():
        raise InvalidBody(f"Object missing required field `toolName`, which a {event.type} has")
    _check_time(event.timestamp)
    timeout = event.execution_timeout_seconds
    if timeout is not None and not 0 <= timeout <= 1e9:
        raise InvalidBody("`executionTimeoutSeconds` is out of range")
    tokens = () if event.token_usage is None else msgspec.structs.astuple(event.token_usage)
    if any(number is not None and not 0 <= number <= MOST_TOKENS for number in tokens):
        raise InvalidBody("a number in `tokenUsage` is out of range")
    if event.cost is not None and not _COST.fullmatch(event.cost):
        raise InvalidBody("`cost` is not an amount such as 0.0123")
    if event.seq is not None and event.seq < 1:
        raise InvalidBody("`seq` counts from 1")


def _check_time(value: str | int | float) -> None:
    if isinstance(value, str):
        try:
            if _TIME.fullmatch(value):
                datetime.fromisoformat(value.upper())
                return
        except ValueError:
            pass
        raise InvalidBody("`timestamp` is neither RFC3339, such as 2026-01-23T00:00:00Z, nor milliseconds since 1970")
    if not 0 <= value < _LATEST_MILLIS:
        raise InvalidBody("`timestamp` is out of range")


class Sender:
    """The encoder of one run's events. Each event has the run's id and a sequence number. Usage from `add_usage` is
    sent with the next event."""

    def __init__(self, name: str, run_id: str, *, parent_id: str = "", root_id: str = "") -> None:
        self.run_id = run_id
        self.root_id = root_id or run_id
        self._name = name
        self._parent_id = parent_id
        self._seq = 0
        self._usage: Usage | None = None
        self._cost: Decimal | None = None

    def add_usage(self, usage: Usage, cost: Decimal | None) -> None:
        if usage == NO_USAGE:
            return
        if self._usage is None:
            self._usage, self._cost = usage, cost
        else:
            self._usage += usage
            self._cost = None if cost is None or self._cost is None else self._cost + cost

    def encode_event(self, body: Body, at: float) -> bytes | None:
        """Encode an event. Return None for an event that is not reported."""
        event = self._make_event(body, at)
        return None if event is None else encode_body(event)

    def _make_event(self, body: Body, at: float) -> Reported | None:
        match body:
            case RunSpawned(task=task):
                return self._number_event("subagent_start", at, payload=cut_payload(task))
            case Thinking(text=text, type=kind):
                return self._number_event("thought_trace", at, payload=cut_payload(text), reasoning_type=kind or None)
            case ToolCall(call_id=call_id, name=name, args=args, timeout_seconds=timeout):
                code = name == CODE_MODE and timeout is not None and 0 <= timeout <= 1e9
                seconds = ceil(timeout) if code and timeout is not None else None
                text = body.raw or encode_body(args).decode()
                return self._number_event(
                    "tool_call",
                    at,
                    tool_name=name,
                    call_id=call_id or None,
                    payload=cut_payload(text),
                    execution_timeout_seconds=seconds,
                )
            case ToolResult(call_id=call_id, name=name, text=text, success=success):
                named: dict[str, Any] = {"tool_name": name, "call_id": call_id or None}
                return self._number_event("tool_result", at, **named, payload=cut_payload(text), success=success)
            case RunEnded(status=status, final_response=text, error_details=error):
                said = text if status == "done" else error or text
                return self._number_event("subagent_end", at, payload=cut_payload(said) or None, status=status)
        return None

    def _number_event(self, kind: Type, at: float, **fields: Any) -> Reported:
        self._seq += 1
        usage, cost, self._usage, self._cost = self._usage, self._cost, None, None
        return Reported(
            subagent_name=self._name,
            run_id=self.run_id,
            timestamp=format_time(at),
            type=kind,
            token_usage=None if usage is None else _to_tokens(usage),
            parent_id=self._parent_id or None,
            root_id=self.root_id,
            seq=self._seq,
            cost=None if cost is None else f"{cost:f}",
            **fields,
        )


def encode_ending(run_id: str, status: str, text: str, at: float) -> bytes:
    """Encode the end of a run as its caller reports it. It has no `seq`, which counts only the run's own events."""
    said = Reported(
        subagent_name=UNNAMED_SUBAGENT,
        run_id=run_id,
        timestamp=format_time(at),
        type="subagent_end",
        status=status,
        payload=cut_payload(text) or None,
    )
    return encode_body(said)


def make_caller_tag(run_id: str) -> str:
    """Return the tag of a run.

    A reported process ends the run ids that it gives to its calls with the tag of the calling run. The collector can
    then place a run whose own process does not name its caller."""
    return sha256(run_id.encode("utf-8", "replace")).hexdigest()[:8]


def _to_tokens(usage: Usage) -> _Tokens:
    cached = (usage.cache_read_tokens or None, usage.cache_write_tokens or None)
    return _Tokens(usage.input_tokens, usage.output_tokens, usage.total_tokens, *cached)


def format_time(at: float) -> str:
    """Return a time as RFC3339: UTC, always with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def cut_payload(text: str) -> str:
    """Return the text, cut to `PAYLOAD_BYTES` with a mark that says how much is missing."""
    data = text.encode("utf-8", "replace")
    if len(data) <= PAYLOAD_BYTES:
        return text
    return f"{data[:PAYLOAD_BYTES].decode('utf-8', 'ignore')}\n[... {len(data) - PAYLOAD_BYTES} more bytes were cut]"


def read_arguments(payload: str) -> tuple[dict[str, Any], str]:
    """Return the arguments of a call if the payload is a JSON object, else no arguments and the raw payload."""
    if not payload.strip():
        return {}, ""
    try:
        return decode_body(payload.encode(), dict[str, Any]), ""
    except (InvalidBody, UnicodeEncodeError):
        return {}, payload
