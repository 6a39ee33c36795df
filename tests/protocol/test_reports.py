"""The format of reported events, in both directions."""

import json
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retinue.core.events import RunEnded, RunSpawned, Thinking, ToolCall, ToolResult, TurnStarted
from retinue.core.usage import Usage
from retinue.protocol import reports
from retinue.protocol.reports import Sender, decode_report, read_arguments
from retinue.protocol.strict_json import InvalidBody

GIVEN: dict[str, Any] = {
    "subagentName": "code-review-agent",
    "subagentRunID": "a1b2c3d4",
    "type": "tool_call",
    "toolName": "execute_go_code",
    "toolCallID": "call_123",
    "executionTimeoutSeconds": 10,
    "tokenUsage": {"inputTokens": 1234, "outputTokens": 456, "totalTokens": 1690},
    "payload": "package main...",
    "timestamp": "2026-01-23T00:00:00Z",
}


def read(**changes: Any) -> reports.Reported:
    fields = {**GIVEN, **changes}
    return decode_report(json.dumps({key: value for key, value in fields.items() if value != ...}).encode())


def said(sender: Sender, body: Any) -> dict[str, Any]:
    data = sender.encode_event(body, 1_769_126_400.5)
    assert data is not None
    event: dict[str, Any] = json.loads(data)
    assert decode_report(data)
    return event


@pytest.mark.requirement("CPE-50", "CPE-40", "CPE-39")
def test_the_example_of_the_specification() -> None:
    event = read()
    assert (event.subagent_name, event.run_id, event.type) == ("code-review-agent", "a1b2c3d4", "tool_call")
    assert (event.tool_name, event.call_id, event.execution_timeout_seconds) == ("execute_go_code", "call_123", 10)
    assert event.payload == "package main..."
    assert event.usage == Usage(1234, 456)


@pytest.mark.requirement("CPE-35", "CPE-36")
def test_there_are_five_types_and_no_other() -> None:
    for kind in ("subagent_start", "tool_call", "tool_result", "thought_trace", "subagent_end"):
        assert read(type=kind).type == kind
    with pytest.raises(InvalidBody, match=r"tool_cal.*\$\.type"):
        read(type="tool_cal")


@pytest.mark.requirement("CPE-37")
@pytest.mark.parametrize(
    "time",
    [
        "2026-01-23T00:00:00Z",
        "2026-01-23t10:11:12z",
        "2026-01-23T10:11:12.123456789+02:00",
        "2026-01-23T10:11:12-00:30",
        1769126400000,
        1769126400000.5,
        0,
    ],
)
def test_times_are_rfc3339_or_milliseconds(time: Any) -> None:
    assert read(timestamp=time).timestamp == time


@pytest.mark.requirement("CPE-37")
@pytest.mark.parametrize("name", ["subagentName", "subagentRunID", "timestamp", "type", "toolName"])
def test_what_is_missing_is_named(name: str) -> None:
    with pytest.raises(InvalidBody, match=f"missing required field `{name}`"):
        read(**{name: ...})


@pytest.mark.requirement("CPE-37")
def test_both_spellings_of_ids_are_read() -> None:
    event = read(subagentRunID=..., subagentRunId="r1", toolCallID=..., toolCallId="c1", parentRunId="p1")
    assert (event.run_id, event.call_id, event.parent_id) == ("r1", "c1", "p1")
    with pytest.raises(InvalidBody, match="`subagentRunID` and `subagentRunId` are both given and differ"):
        read(subagentRunId="other")
    assert read(subagentRunId="a1b2c3d4").run_id == "a1b2c3d4"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"subagentName": ""}, "`subagentName` is blank"),
        ({"subagentRunID": " \t"}, "`subagentRunID` is blank"),
        ({"subagentRunID": "a\x1b[2J"}, "`subagentRunID` holds a control character"),
        ({"subagentName": "x" * 201}, "`subagentName` is longer than 200"),
        ({"subagentRunID": 7}, r"Expected `str`, got `int` - at `\$.subagentRunID`"),
        ({"toolName": "a\nb"}, "`toolName` holds a control character"),
        ({"toolName": " "}, "missing required field `toolName`, which a tool_call has"),
        ({"payload": {"a": 1}}, r"Expected `str \| null`, got `object` - at `\$.payload`"),
        ({"timestamp": "yesterday"}, "`timestamp` is neither RFC3339"),
        ({"timestamp": "2026-13-23T00:00:00Z"}, "`timestamp` is neither RFC3339"),
        ({"timestamp": "2026-01-23T00:00:00"}, "`timestamp` is neither RFC3339"),
        ({"timestamp": -1}, "`timestamp` is out of range"),
        ({"timestamp": True}, "Expected `int.*got `bool`"),
        ({"executionTimeoutSeconds": -1}, "`executionTimeoutSeconds` is out of range"),
        ({"tokenUsage": {"inputTokens": -1}}, "a number in `tokenUsage` is out of range"),
        ({"tokenUsage": {"inputTokens": "7"}}, r"got `str` - at `\$.tokenUsage.inputTokens`"),
        ({"seq": 0}, "`seq` counts from 1"),
        ({"cost": "1e9"}, "`cost` is not an amount"),
    ],
)
def test_wrong_fields_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidBody, match=words):
        read(**changes)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"type": NaN}', "NaN is not JSON"),
        (b'{"type": "tool_call", "type": "tool_result"}', "the key 'type' is given twice"),
        (b'{"payload": "\\ud800"}', "half of a character"),
        (b"\xff{}", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"seq": ' + b"9" * 5000 + b"}", "more than 18 digits"),
        (b'{"seq": -1e999}', "the number -1e999 is too large"),
    ],
)
def test_bodies_that_are_no_event(body: bytes, words: str) -> None:
    with pytest.raises(InvalidBody, match=words):
        decode_report(body)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner)
    | st.dictionaries(st.sampled_from([*GIVEN, "x"]), inner), max_leaves=8,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_bytes_are_an_event_or_an_error_in_words(body: bytes) -> None:
    try:
        event = decode_report(body)
    except InvalidBody as error:
        assert str(error)
    else:
        assert event.run_id


def test_unknown_fields_and_nulls_pass() -> None:
    event = read(somethingNew={"a": 1}, reasoningType=None, tokenUsage=None, payload=None)
    assert (event.usage, event.payload) == (None, None)


@pytest.mark.requirement("CPE-39")
@pytest.mark.parametrize(
    ("tokens", "usage"),
    [
        ({}, None),
        ({"totalTokens": 9}, Usage(9, 0)),
        ({"totalTokens": 9, "outputTokens": 4}, Usage(5, 4)),
        ({"inputTokens": 5, "cacheReadTokens": 3, "cacheWriteTokens": 1}, Usage(5, 0, 3, 1)),
    ],
)
def test_each_count_is_optional(tokens: dict[str, int], usage: Usage | None) -> None:
    assert read(tokenUsage=tokens).usage == usage


@pytest.mark.requirement("CPE-24", "CPE-37", "CPE-38", "CPE-40")
def test_every_event_of_a_run_has_its_id_and_those_above_it() -> None:
    sender = Sender("reviewer", "r2", parent_id="r1", root_id="r0")
    events = [
        said(sender, RunSpawned(None, "main", 0, "look", "", "")),
        said(sender, Thinking("hm", "reasoning.text")),
        said(sender, ToolCall("c1", "grep", {"pattern": "todo", "deep": [1, 2]})),
        said(sender, ToolResult("c1", "grep", "found", success=False)),
        said(sender, RunEnded("done", "the answer", 5)),
    ]
    types = ["subagent_start", "thought_trace", "tool_call", "tool_result", "subagent_end"]
    assert [event["type"] for event in events] == types
    for number, event in enumerate(events, 1):
        assert (event["subagentRunID"], event["parentRunID"], event["rootRunID"]) == ("r2", "r1", "r0")
        assert (event["subagentName"], event["seq"]) == ("reviewer", number)
        assert event["timestamp"] == "2026-01-23T00:00:00.500Z"
        assert datetime.fromisoformat(event["timestamp"]).utcoffset() is not None
        tool = {"toolName": "grep", "toolCallID": "c1"} if "tool" in event["type"] else {}
        assert {key: event[key] for key in ("toolName", "toolCallID") if key in event} == tool
    assert sender.encode_event(TurnStarted(1), 0.0) is None
    unnamed = said(sender, ToolCall("", "grep", {}))
    assert unnamed["toolName"] == "grep" and "toolCallID" not in unnamed  # there is none


@pytest.mark.requirement("CPE-41", "CPE-43", "CPE-64")
def test_arguments_are_compact_and_long_payloads_are_cut_with_a_mark() -> None:
    sender = Sender("reviewer", "r1")
    call = said(sender, ToolCall("c1", "grep", {"pattern": "todo", "in": ["a", "b"]}))
    assert call["payload"] == '{"pattern":"todo","in":["a","b"]}'
    assert said(sender, Thinking("hm", "reasoning.encrypted"))["reasoningType"] == "reasoning.encrypted"
    assert "reasoningType" not in said(sender, Thinking("hm"))
    long = said(sender, ToolResult("c1", "grep", "ü" * 100_000))["payload"]
    assert long.endswith(f"ü\n[... {200_000 - reports.PAYLOAD_BYTES} more bytes were cut]")
    worst = sender.encode_event(ToolResult("c1", "grep", "\x01" * 10_000_000), 0.0)
    assert worst is not None and len(worst) < reports.BODY_BYTES // 4


@pytest.mark.requirement("CPE-45", "CPE-39")
def test_usage_goes_with_the_next_event_and_is_left_out_where_there_is_none() -> None:
    sender = Sender("reviewer", "r1")
    assert "tokenUsage" not in said(sender, Thinking("hm"))
    sender.add_usage(Usage(100, 20, 30, 5), Decimal("0.01"))
    sender.add_usage(Usage(1, 1), Decimal("0.02"))
    event = said(sender, ToolCall("c1", "grep", {}))
    assert event["tokenUsage"] == {
        "inputTokens": 101, "outputTokens": 21, "totalTokens": 122, "cacheReadTokens": 30, "cacheWriteTokens": 5,
    }  # fmt: skip
    assert event["cost"] == "0.03"
    after = said(sender, ToolResult("c1", "grep", ""))
    assert "tokenUsage" not in after and "cost" not in after
    sender.add_usage(Usage(1, 1), None)
    assert "cost" not in said(sender, RunEnded("done", "", 0))


@pytest.mark.requirement("CPE-42")
def test_the_timeout_is_said_for_code_mode_only() -> None:
    sender = Sender("reviewer", "r1")
    code = said(sender, ToolCall("c1", "execute_python_code", {"code": "1"}, timeout_seconds=9.5))
    assert code["executionTimeoutSeconds"] == 10
    assert "executionTimeoutSeconds" not in said(sender, ToolCall("c2", "shell", {}, timeout_seconds=9.5))


def test_half_a_character_can_be_said() -> None:
    assert said(Sender("reviewer", "r1"), Thinking("a\ud800b"))["payload"] == "a?b"


@pytest.mark.parametrize(
    ("payload", "args", "raw"),
    [
        ('{"a": 1}', {"a": 1}, ""),
        ("", {}, ""),
        ("package main", {}, "package main"),
        ("[1, 2]", {}, "[1, 2]"),
        ('{"a": 1, "a": 2}', {}, '{"a": 1, "a": 2}'),
        ('{"a":' * 5000, {}, '{"a":' * 5000),
    ],
)
def test_a_payload_is_arguments_or_stays_as_it_is(payload: str, args: dict[str, Any], raw: str) -> None:
    assert read_arguments(payload) == (args, raw)
