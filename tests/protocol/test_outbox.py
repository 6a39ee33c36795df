"""Tests of the requests of the outbox, and of the answers to invalid ones."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.core.caller import Caller
from retinue.core.errors import RetinueError
from retinue.core.profiles import NAME_PATTERN
from retinue.protocol import outbox

FINE = {"task": "look", "profile": "explorer", "workspace": "/shared/x"}


def parse(**fields: Any) -> outbox.OutboxRequest:
    return outbox.parse_request(json.dumps({**FINE, **fields}).encode(), "a-1")


def test_what_is_asked_comes_back_as_it_was() -> None:
    asked = outbox.OutboxRequest(
        id="a-1",
        task="lo\u00f6k",
        profile="explorer",
        workspace="/w",
        context_paths=("/w/a",),
        timeout_seconds=5.0,
        limits=Caller(depth=2, tokens=9, cost=Decimal("0.5")),
    )
    assert outbox.parse_request(outbox.encode_request(asked), "a-1") == asked


@pytest.mark.requirement("P34")
def test_what_is_not_said_is_narrow() -> None:
    request = parse()
    assert (request.limits, request.context_paths, request.timeout_seconds) == (Caller(depth=0), (), None)


@pytest.mark.requirement("MASS-12", "MASS-17")
@pytest.mark.parametrize(
    "key",
    [
        "image", "network", "network_mode", "networkMode", "mounts", "volumes", "env", "ENV", "environment",
        "extra_env", "user", "user_id", "uid", "privileged", "config", "yaml_config", "command",
        "command_line_docker_image", "command_line_execution_mode", "commandLineDockerImage", "cap_add",
        "security_opt", "runtime", "Runtime", "run-time", "subagent_runtime_mode", "tools", "allowed_tools", "model",
        "mode", "approvals", "limits", "max_cost", "api_key", "APIKey", "ports", "mcp_servers", "expose_paths",
        "orchestrator", "docker.image", "", "--", "\u200b",
    ],
)  # fmt: skip
def test_a_key_that_says_how_to_launch_refuses_the_whole_request(key: str) -> None:
    with pytest.raises(outbox.RequestError, match="may not set"):
        parse(**{key: None})


@pytest.mark.requirement("MASS-17")
@pytest.mark.parametrize(
    "key",
    [
        "color", "answer_format", "caption", "keywords", "key_points", "planet", "escape", "modern", "envelope",
        "costume", "hostess", "tool_hint", "model_answer", "priority", "labels", "created_at", "trace", "wall_clock",
        "requested_by", "note", "\u0446\u0432\u0435\u0442", "x-request-id", "delimiter",
    ],
)  # fmt: skip
def test_a_key_that_nobody_knows_is_ignored_and_named(key: str) -> None:
    assert parse(**{key: {"image": "x"}, "task": "look"}).ignored == (key,)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"[]", "Expected `object`"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b'{"task": NaN}', "NaN"),
        (b'{"task": -Infinity}', "-Infinity"),
        (b'{"task": "a", "task": "b"}', "given twice"),
        (b'{"x": {"y": 1, "y": 2}}', "given twice"),
        (b'{"task": "\\ud800"}', "half of a character"),
        (b'{"profile": "p", "task": "a\\u0000b"}', "NUL"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"depth": ' + b"9" * 5000 + b"}", "more than 18 digits"),
        (b'{"task": "x"} {}', "not JSON"),
    ],
)  # fmt: skip
def test_what_is_no_plain_json_is_refused_in_one_line(data: bytes, said: str) -> None:
    with pytest.raises(outbox.RequestError, match=said) as refused:
        outbox.parse_request(data, "a-1")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", ""), ("task", 3), ("task", None), ("profile", "../x"), ("profile", ["a"]), ("profile", "a" * 65),
        ("workspace", "relative"), ("workspace", "/a/../b"), ("workspace", "/a//b"), ("workspace", "/a/./b"),
        ("workspace", "/a/"), ("workspace", "/" + "a" * 5000), ("workspace", None), ("context_paths", "/a"),
        ("context_paths", ["a"]), ("context_paths", [3]), ("context_paths", ["/a"] * 65), ("timeout_seconds", -1),
        ("timeout_seconds", 0), ("timeout_seconds", "9"), ("timeout_seconds", True), ("depth", -1), ("depth", 1.5),
        ("depth", True), ("depth", "3"), ("version", 2), ("id", "b"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_named(field: str, value: Any) -> None:
    with pytest.raises(outbox.RequestError) as refused:
        parse(**{field: value})
    assert field.rstrip("s") in str(refused.value).replace("another version", "version")


@pytest.mark.requirement("P34")
@pytest.mark.parametrize(
    "file",
    ["request_.json", "request_a b.json", "request_a.b.json", "request_../x.json", f"request_{'a' * 129}.json",
     "request_a.json\n", "request_\u0430.json", ".request_a.json", "request_a.json.tmp", "request_a"],
)  # fmt: skip
def test_only_plain_ids_are_names_of_requests(file: str) -> None:
    assert outbox.parse_request_name(file) is None
    assert outbox.parse_request_name("request_a-1.json") == "a-1"


@pytest.mark.finding("S11")
@given(st.from_regex(NAME_PATTERN.replace("(?!\\n)", ""), fullmatch=True), st.integers(0, 2**64 - 1))
def test_every_id_that_our_own_format_gives_is_the_id_of_a_request(agent: str, number: int) -> None:
    name = f"{agent.strip()}_{number:x}"
    assert (
        outbox.parse_request_name(outbox.request_name(name))
        == outbox.parse_cancel_name(outbox.cancel_name(name))
        == name
    )
    assert outbox.parse_steer_name(outbox.steer_name(name, 3)) == name


def test_a_steer_carries_words_or_a_cancel_for_one_run() -> None:
    assert outbox.parse_steer(outbox.encode_steer(3, "left")) == (3, "left")
    assert outbox.parse_steer(outbox.encode_steer(3, None)) == (3, None)
    for wrong in (b'{"run": 3}', b'{"run": 3, "cancel": "yes"}', b'{"run": true, "cancel": true}'):
        with pytest.raises(outbox.RequestError):
            outbox.parse_steer(wrong)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_break_the_parsers(data: bytes) -> None:
    for parsing in (outbox.parse_request, outbox.parse_response):
        try:
            parsing(data, "a-1")
        except RetinueError as refused:
            assert "\n" not in str(refused).replace("\\n", "")


def test_a_response_is_for_its_request_only() -> None:
    data = outbox.encode_response(outbox.OutboxResponse(id="a-1", status="done", final_response="x"))
    assert outbox.parse_response(data, "a-1").final_response == "x"
    for wrong in (data.replace(b"a-1", b"b-1"), data.replace(b"done", b"gone"), data[:-1], b"[" * 100_000):
        with pytest.raises(outbox.RequestError):
            outbox.parse_response(wrong, "a-1")


def test_half_of_a_character_is_replaced_and_the_rest_arrives() -> None:
    response = outbox.OutboxResponse(id="a", status="done", final_response="so\ud83d", structured={"n": ["\udc00"]})
    read = outbox.parse_response(outbox.encode_response(response), "a")
    assert (read.final_response, read.structured) == ("so?", {"n": ["?"]})
    assert outbox.parse_steer(outbox.encode_steer(3, "so\ud83d")) == (3, "so?")


def test_a_response_that_is_too_long_is_cut_and_says_so() -> None:
    data = outbox.encode_response(
        outbox.OutboxResponse(id="a", status="done", final_response="x" * (outbox.RESPONSE_BYTES + 1))
    )
    assert len(data) <= outbox.RESPONSE_BYTES
    response = outbox.parse_response(data, "a")
    assert response.final_response.endswith("[... cut ...]") and response.warning == "the answer was cut"


NOTES = {
    "final_response": "the answer was cut",
    "error_details": "the error was cut",
    "partial": "the partial answer was cut",
    "warning": "a warning was cut",
    "structured": "the structured answer was left out",
}
SHORT = {"final_response": "f", "error_details": "e", "partial": "p", "warning": "seen", "structured": {"n": 1}}


@pytest.mark.parametrize("unit", ["x", '\0\x1b"\u20ac\U0001f600'])
@pytest.mark.parametrize("field", ["final_response", "error_details", "partial", "warning"])
def test_only_the_text_that_is_too_long_is_cut(field: str, unit: str) -> None:
    long = unit * (outbox.RESPONSE_BYTES // (len(msgspec.json.encode(unit)) - 2) + 1)
    data = outbox.encode_response(outbox.OutboxResponse(id="a" * 128, status="failed", **{**SHORT, field: long}))
    assert outbox.RESPONSE_BYTES - 8192 < len(data) <= outbox.RESPONSE_BYTES
    response = msgspec.structs.asdict(outbox.parse_response(data, "a" * 128))
    beginning, mark, rest = response[field].partition("\n[... cut ...]")
    assert beginning and long.startswith(beginning) and mark
    if field == "warning":
        assert rest == "; a warning was cut"
    else:
        assert (rest, response["warning"]) == ("", f"seen; {NOTES[field]}")
    assert all(response[name] == SHORT[name] for name in SHORT if name not in (field, "warning"))


def test_a_structured_answer_that_is_too_long_is_left_out_and_the_text_stays() -> None:
    rows = ["x" * 1024] * (outbox.RESPONSE_BYTES // 1024)
    data = outbox.encode_response(outbox.OutboxResponse(id="a", status="done", final_response="whole", structured=rows))
    assert len(data) <= outbox.RESPONSE_BYTES
    response = outbox.parse_response(data, "a")
    assert (response.final_response, response.structured) == ("whole", None)
    assert response.warning == "the structured answer was left out"


SIZES = st.sampled_from((8, 2**20, outbox.EVENT_BYTES, 2 * outbox.EVENT_BYTES))
REPEATED = st.tuples(st.text(min_size=1, max_size=8), SIZES)  # not the text itself, which would be reported whole


@settings(max_examples=8, deadline=None)
@given(st.fixed_dictionaries(dict.fromkeys(NOTES, REPEATED)))
def test_no_response_is_longer_than_the_other_side_reads(repeated: dict[str, tuple[str, int]]) -> None:
    fields = {name: unit * (size // len(unit)) for name, (unit, size) in repeated.items()}
    data = outbox.encode_response(outbox.OutboxResponse(id="a", status="failed", **fields))
    assert len(data) <= outbox.RESPONSE_BYTES
    response = msgspec.structs.asdict(outbox.parse_response(data, "a"))
    cut = {name for name, text in fields.items() if response[name] != text}
    notes = set(response["warning"][-200:].split("; "))
    assert notes.issuperset(NOTES[name] for name in cut - {"warning"})


def test_the_ending_of_a_primary_there_is_that_of_a_subagent_here() -> None:
    text, error = "Run reached its limit", "Run 'explorer' stopped: limit of 2 turns reached"
    response = outbox.OutboxResponse(id="a", status="limited", final_response=text, error_details=error, is_named=True)
    assert outbox.make_ending(response, agent="explorer", primary=True).error == error
    ending = outbox.make_ending(response, agent="explorer", primary=False)
    assert (ending.text, ending.error) == ("Subagent reached its limit", error.replace("Run '", "Subagent '"))
    own_words = outbox.OutboxResponse(id="a", status="failed", final_response="Run it", error_details="Run it yourself")
    assert outbox.make_ending(own_words, agent="explorer", primary=False).error == "Run it yourself"


def test_the_code_of_a_response_says_that_there_was_nobody_to_ask() -> None:
    text = "Run requires confirmation"
    response = outbox.OutboxResponse(
        id="a", status="failed", final_response=text, error_details=text, code="unconfirmed"
    )
    ending = outbox.make_ending(response, agent="explorer", primary=False)
    assert (ending.status, ending.text, ending.code) == ("failed", "Subagent requires confirmation", "unconfirmed")
    strange = outbox.OutboxResponse(id="a", status="done", final_response="x", code="unconfirmed")
    assert outbox.make_ending(strange, agent="explorer", primary=False).code == ""
