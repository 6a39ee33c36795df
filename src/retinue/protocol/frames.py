"""Frames on a channel between two processes: a four-byte length and as many bytes of JSON. Pure: no I/O.

The script of a program of code mode imports nothing from retinue. It has its own few lines for the same frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.core.errors import RetinueError
from retinue.protocol.strict_json import encode_body

HEAD = 4


class ProtocolError(RetinueError):
    """The peer violates the protocol; the text says how."""


def encode_frame(value: Any) -> bytes:
    """Return the bytes of a frame with a JSON value or a Struct."""
    body = encode_body(value)
    return len(body).to_bytes(HEAD, "big") + body


class FrameReader:
    """A decoder that cuts the bytes of a peer into frames, none larger than `limit`."""

    def __init__(self, decoder: msgspec.json.Decoder[Any], *, limit: int) -> None:
        self._decoder, self._limit = decoder, limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Sequence[Any]:
        """Return the frames that are complete now. Raises ProtocolError for an invalid frame."""
        buffer = self._buffer
        buffer += data
        frames: list[Any] = []
        at = 0
        while len(buffer) - at >= HEAD:
            size = int.from_bytes(buffer[at : at + HEAD], "big")
            if size > self._limit:
                raise ProtocolError(f"a frame of {size} bytes is larger than {self._limit}")
            if len(buffer) - at < HEAD + size:
                break
            try:
                frames.append(self._decoder.decode(bytes(buffer[at + HEAD : at + HEAD + size])))
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
                raise ProtocolError(f"a frame that cannot be read: {error}") from None
            at += HEAD + size
        del buffer[:at]
        return frames
