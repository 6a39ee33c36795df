"""Frames between two processes: what is sent arrives whole, whatever is in it and however it is cut."""

import msgspec
import pytest

from retinue.protocol.frames import FrameReader, ProtocolError, encode_frame
from retinue.protocol.tool_server import ToolReturned, make_frame_reader


def test_frames_arrive_whole_however_they_are_cut() -> None:
    sent = [{"text": "x" * 300}, {}, {"text": "é"}]
    data = b"".join(map(encode_frame, sent))
    for size in (1, 2, 5, len(data)):
        reader = FrameReader(msgspec.json.Decoder(), limit=1000)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [frame for piece in pieces for frame in reader.feed(piece)] == sent


def test_half_a_character_in_one_field_changes_no_other_field() -> None:
    frame = ToolReturned(1, 2, value=msgspec.Raw(b'{"rows":[1,2]}'), note="half \ud800")
    [found] = make_frame_reader("host").feed(encode_frame(frame))
    assert msgspec.json.decode(found.value) == {"rows": [1, 2]}
    assert found.note == "half ?"


@pytest.mark.parametrize("data", [b"\0\0\3\xe9", b"\0\0\0\2}{", b"\0\0\0\1\xff"])
def test_a_frame_that_is_too_large_or_no_json_is_a_violation(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        FrameReader(msgspec.json.Decoder(), limit=1000).feed(data)
