"""The line of an event: every text survives it, unknown kinds and fields pass through, a damaged line is no event."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.core.events import KINDS, Event, Message, TurnStarted, Unknown, decode_event, encode_event
from tests.log.kit import make_event


@pytest.mark.requirement("P9")
def test_unknown_kinds_and_fields_pass_through() -> None:
    line = (
        b'{"seq":1,"tree":"t","run":0,"path":"/main","agent":"a","at":1.0,"kind":"run.dreamt","depth":{"x":[1,null]}}'
    )
    unknown = decode_event(line)
    assert unknown.kind == "run.dreamt" and isinstance(unknown.body, Unknown)
    assert msgspec.json.decode(encode_event(unknown)) == msgspec.json.decode(line)
    known = decode_event(line.replace(b"run.dreamt", b"turn.started").replace(b'"depth"', b'"turn":4,"new"'))
    assert known.body == TurnStarted(4)


def test_the_kinds_are_the_agreed_ones() -> None:
    assert set(KINDS) == {
        "run.spawned", "run.started", "run.resumed", "run.waiting", "run.model", "turn.started", "thinking", "message",
        "tool.call", "tool.started", "tool.result", "run.remote", "subagent.progress",
        "approval.asked", "approval.decided", "inbox", "usage", "turn.ended", "warning", "gap", "run.ended",
        "team.answered", "team.asked", "team.voted", "team.lost", "team.decided",
        "round.answered", "round.evaluated", "round.checked", "round.proposed", "round.voted",
    }  # fmt: skip


def test_no_field_of_a_body_hides_one_of_the_envelope() -> None:
    """A line has both side by side: a body with a `run` of its own would become an event of that run."""
    for kind, body in KINDS.items():
        assert not set(body.__struct_fields__) & set(Event.__struct_fields__), kind


@given(text=st.text(), label=st.text(min_size=1))
def test_any_text_survives_the_line(text: str, label: str) -> None:
    text, label = (t.encode("utf-8", "replace").decode() for t in (text, label))
    before = Event(3, "t", 2, "/main/" + label, label, 12.5, Message(text))
    line = encode_event(before)
    assert b"\n" not in line
    assert decode_event(line) == before


@pytest.mark.parametrize("place", [b"/main", b"turn.started", b'"at"'])
def test_a_line_with_flipped_bytes_is_no_event_whatever_was_hit(place: bytes) -> None:
    line = encode_event(make_event(1))
    assert decode_event(line) == make_event(1)
    for broken in (line.replace(place, b"\xff" + place[1:]), line[: line.index(place)] + b"[" * 100_000):
        with pytest.raises(msgspec.MsgspecError):
            decode_event(broken)
