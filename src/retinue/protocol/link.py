"""What goes over a link between two processes: the frames, and how bytes become frames. Pure; who reads and writes
the bytes is somebody else.

On the wire a frame is four bytes of length and so many bytes of JSON: `[number, acknowledged, frame]`. Numbers count
from 1 without a gap in each direction; `acknowledged` is the last number taken from the other side. The host holds
the thread, the calls and their arguments: a worker names them and cannot make them up. What a program wants called is
the worker's to say (`Make`), and the host's to judge like any call of the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from retinue.core.approvals import Allow, Deny
from retinue.core.errors import RetinueError
from retinue.core.events import Inbox, ToolCall, ToolResult, TurnEnded, TurnStarted, Warned, whole
from retinue.core.limits import EVENT_BYTES, Caps
from retinue.core.messages import Call, RunRef, ToolSpec
from retinue.core.plans import Setup

VERSION = 2
HEAD = 4
FRAME_BYTES = EVENT_BYTES + 64 * 1024
ACK_FRAMES = 64
ACK_BYTES = 256 * 1024
WINDOW_BYTES = 1024 * 1024


class LinkError(RetinueError):
    """The other end does not speak as it must; the text says what was wrong."""


class Frame(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all frames."""


class Ack(Frame, frozen=True, gc=False, tag="ack"):
    """Nothing but the acknowledgement every frame carries."""


# Up: from the worker


class Hello(Frame, frozen=True, gc=False, tag="hello"):
    """The worker is there; its first frame."""

    version: int


class Fact(Frame, frozen=True, gc=False, tag="fact"):
    """What a run may say about itself. Everything else there is to know of it the host sees and writes."""

    body: TurnStarted | TurnEnded | Inbox | Warned | ToolCall | ToolResult


class Ask(Frame, frozen=True, gc=False, tag="ask"):
    """The model's next reply is wanted."""

    id: int


class Begin(Frame, frozen=True, gc=False, tag="begin"):
    """May this call run? `works` is False for one that cannot: then nothing will."""

    id: int
    call: str
    works: bool
    preview: str = ""


class Lend(Frame, frozen=True, gc=False, tag="lend"):
    """The host should run this call, which it allowed."""

    id: int
    call: str


class Finish(Frame, frozen=True, gc=False, tag="finish"):
    """What the model sees of a call's outcome."""

    call: str
    text: str
    success: bool
    duration_ms: int
    file: str = ""


class Make(Frame, frozen=True, gc=False, tag="make"):
    """The program of this call wants a tool of the host to be called: by name, with arguments of its own."""

    id: int
    call: str
    name: str
    args: dict[str, Any]


class Idle(Frame, frozen=True, gc=False, tag="idle"):
    """The worker has nothing to do while children of the run work."""

    id: int


class End(Frame, frozen=True, gc=False, tag="end"):
    """The worker's last frame. What a run that is done has said, the host knows."""

    status: Literal["done", "refused", "failed", "limited", "crashed"]
    text: str = ""


# Down: from the host


class Stopped(Frame, frozen=True, gc=False, tag="stopped"):
    """Where a run that goes on stopped, as far as the worker needs it. `calls` is None when the turn is begun again;
    `known` are those that have an outcome, and whether it was a success."""

    turn: int
    calls: tuple[Call, ...] | None
    known: dict[str, bool]
    ended: bool
    reminded: bool


class Start(Frame, frozen=True, gc=False, tag="start"):
    """The job: which tools there are, which of them run behind the wall, and the folders they see. An earlier process
    has left `spilled` files in `outputs`. `proxy` is the socket through which hosts are reached, if any may be;
    programs can call the tools `lent`."""

    version: int
    ref: RunRef
    tools: tuple[str, ...]
    walled: tuple[str, ...]
    max_turns: int | None
    workspace: str
    searched: tuple[str, ...]
    roots: tuple[str, ...]
    outputs: str
    caps: Caps
    limit_memory: bool
    setup: Setup | None = None
    past: Stopped | None = None
    spilled: int = 0
    proxy: str = ""
    lent: tuple[ToolSpec, ...] = ()


class Replied(Frame, frozen=True, gc=False, tag="replied"):
    """The model has answered; the worker needs its calls, not its words."""

    id: int
    calls: tuple[Call, ...]
    refused: bool = False


class Decided(Frame, frozen=True, gc=False, tag="decided"):
    """The answer to `Begin`. The call is on disk by then, if it must be."""

    id: int
    decision: Allow | Deny


class Lent(Frame, frozen=True, gc=False, tag="lent"):
    """The outcome of a call the host ran; with `error` the tool's own no."""

    id: int
    text: str
    success: bool = True
    file: str = ""
    error: bool = False


class Made(Frame, frozen=True, gc=False, tag="made"):
    """What became of a call that a program made, for the program."""

    id: int
    value: msgspec.Raw
    error: str | None = None
    note: str = ""


class Person(Frame, frozen=True, gc=False, tag="person"):
    """Somebody is asked, or was, while the program of this call runs: its time stands still meanwhile."""

    call: str
    waits: bool


class News(Frame, frozen=True, gc=False, tag="news"):
    """The answer to `Idle`: whether there is something new to look at."""

    id: int
    more: bool


class Stop(Frame, frozen=True, gc=False, tag="stop"):
    """End what is running and leave."""


Up = Hello | Fact | Ask | Begin | Lend | Finish | Make | Idle | End | Ack
Down = Start | Replied | Decided | Lent | Made | Person | News | Stop | Ack


class _UpEnvelope(msgspec.Struct, frozen=True, gc=False, array_like=True):
    number: int
    acknowledged: int
    frame: Up


class _DownEnvelope(msgspec.Struct, frozen=True, gc=False, array_like=True):
    number: int
    acknowledged: int
    frame: Down


_ENCODER = msgspec.json.Encoder(enc_hook=str)
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "up": msgspec.json.Decoder(_UpEnvelope),
    "down": msgspec.json.Decoder(_DownEnvelope),
}


class Wire:
    """One end: numbers what goes out, checks what comes in. `incoming` says which way the frames come from."""

    def __init__(self, incoming: Literal["up", "down"]) -> None:
        self._decoder = _DECODERS[incoming]
        self._buffer = bytearray()
        self._sent = 0
        self._sizes: deque[tuple[int, int]] = deque()
        self._received = 0
        self._unsaid_frames = self._unsaid_bytes = 0
        self.unacknowledged = 0

    def pack(self, frame: Frame) -> bytes:
        """The bytes of a frame; raises LinkError for one that is too large."""
        envelope = (self._sent + 1, self._received, frame)
        try:
            body = _ENCODER.encode(envelope)
        except UnicodeEncodeError:  # half a character: it goes as a replacement mark
            body = _ENCODER.encode(whole(msgspec.to_builtins(envelope, enc_hook=str)))
        if len(body) > FRAME_BYTES:
            raise LinkError(f"a frame of {len(body)} bytes is larger than {FRAME_BYTES}")
        self._sent += 1
        self._unsaid_frames = self._unsaid_bytes = 0
        self._sizes.append((self._sent, len(body)))
        self.unacknowledged += len(body)
        return len(body).to_bytes(HEAD, "big") + body

    def feed(self, data: bytes) -> Sequence[Frame]:
        """The frames that are complete now; raises LinkError at the first byte that is wrong."""
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        at = 0
        while len(buffer) - at >= HEAD:
            size = int.from_bytes(buffer[at : at + HEAD], "big")
            if size > FRAME_BYTES:
                raise LinkError(f"a frame of {size} bytes is larger than {FRAME_BYTES}")
            if len(buffer) - at < HEAD + size:
                break
            frame = self._decode(bytes(buffer[at + HEAD : at + HEAD + size]))
            if not isinstance(frame, Ack):
                frames.append(frame)
            at += HEAD + size
        del buffer[:at]
        return frames

    @property
    def owes_ack(self) -> bool:
        """So much has come in that the other end should hear of it."""
        return self._unsaid_frames >= ACK_FRAMES or self._unsaid_bytes >= ACK_BYTES

    def _decode(self, body: bytes) -> Frame:
        try:
            envelope = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise LinkError(f"a frame that cannot be read: {error}") from None
        if envelope.number != self._received + 1:
            raise LinkError(f"frame {envelope.number} came where {self._received + 1} was due")
        if not 0 <= envelope.acknowledged <= self._sent:
            raise LinkError(f"frame {envelope.acknowledged} was acknowledged and never sent")
        self._received += 1
        while self._sizes and self._sizes[0][0] <= envelope.acknowledged:
            self.unacknowledged -= self._sizes.popleft()[1]
        if not isinstance(envelope.frame, Ack):  # acknowledging those would never end
            self._unsaid_frames += 1
            self._unsaid_bytes += len(body)
        frame: Frame = envelope.frame
        return frame
