"""Bodies of any bytes are read or refused with words; nothing else ever comes out."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.core.approvals import Allow, Approval, Deny
from retinue.core.errors import (
    Ambiguous,
    ConfigError,
    LogDamaged,
    LogError,
    LogHeld,
    LogLost,
    LogVersionError,
    NoSlot,
    NotFound,
    RetinueError,
    SpawnRefused,
    ToolError,
)
from retinue.core.events import Delta
from retinue.protocol import control
from retinue.protocol.strict_json import InvalidBody, decode_body, encode_body

SHAPES = (control.RunRequest, control.SendRequest, control.AnswerRequest)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["tree", "run", "text"]), inner),
)


@given(st.binary(), st.sampled_from(SHAPES))
def test_any_bytes(body: bytes, shape: type[Any]) -> None:
    try:
        decode_body(body, shape)
    except InvalidBody as error:
        assert str(error)


@given(JSON, st.sampled_from(SHAPES))
def test_any_json(value: Any, shape: type[Any]) -> None:
    try:
        assert isinstance(decode_body(json.dumps(value).encode(), shape), shape)
    except InvalidBody as error:
        assert str(error)


@pytest.mark.parametrize(
    "value",
    [
        control.RunRequest("t", 3),
        control.SendRequest("t", 0, "x\n\u2028"),
        control.AnswerRequest("a", Deny("no"), "me"),
        control.AnswerRequest("a", Allow()),
    ],
)
def test_what_is_written_is_read(value: Any) -> None:
    assert decode_body(encode_body(value), type(value)) == value


def test_half_characters_travel_as_marks() -> None:
    delta = Delta("t", 0, "/main", "main", "a\ud83d")
    assert control.decode_item(control.encode_delta(delta)) == Delta("t", 0, "/main", "main", "a?")
    asked = Approval("i", "t", 0, "/main", "main", "write", {"content": "\udc00", "n": float("inf")}, "c")
    [question] = msgspec.json.decode(encode_body([asked]), type=list[Approval])
    assert question.args == {"content": "?", "n": None}


@pytest.mark.parametrize(
    "error",
    [
        LogHeld("held", writer="7-1"),
        Ambiguous("a", ["a is one", "another"]),
        *(
            kind("why")
            for kind in (
                ConfigError, LogDamaged, LogError, LogLost, LogVersionError, NoSlot, NotFound, RetinueError,
                SpawnRefused, ToolError,
            )
        ),
    ],
)  # fmt: skip
def test_an_error_keeps_its_type_and_its_fields(error: RetinueError) -> None:
    reply = msgspec.json.decode(encode_body(control.to_error_reply(error)), type=control.ErrorReply)
    there = control.from_error_reply(reply)
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
