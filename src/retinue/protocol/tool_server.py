"""The frames between the host and the tool server in a sandbox, and their encoding. Pure: no I/O.

The host numbers its requests. The tool server answers each
request once, with the same number. It learns the tools of its run and the arguments of their calls, and nothing else
about the run.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from retinue.core.limits import EVENT_BYTES, ResourceLimits
from retinue.core.messages import ToolSpec
from retinue.protocol import frames
from retinue.protocol.frames import FrameReader, ProtocolError

VERSION = 5
FRAME_BYTES = EVENT_BYTES + 64 * 1024
ARGUMENT_BYTES = FRAME_BYTES // 2
OUTPUT_BYTES = 16 * 1024


class Frame(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    """Base of all frames."""


# From the tool server


class Hello(Frame, frozen=True, gc=False, tag="hello"):
    """The first frame: the tool server is running."""

    version: int


class Previewed(Frame, frozen=True, gc=False, tag="previewed"):
    """The answer to `Preview`. With `failed`, the text says why the call cannot work."""

    id: int
    text: str
    failed: bool = False


class Accepted(Frame, frozen=True, gc=False, tag="accepted"):
    """The tool server has read `CallFrame` and runs it now. A call without this frame has had no effect."""

    id: int


class Output(Frame, frozen=True, gc=False, tag="output"):
    """A piece of a running call's output, for the screens. `is_cut` says that lines before it were dropped."""

    id: int
    text: str
    is_cut: bool = False


class ResultFrame(Frame, frozen=True, gc=False, tag="result"):
    """The answer to `CallFrame`. `file` names a file in the run's outputs folder with the whole text."""

    id: int
    text: str
    success: bool = True
    file: str = ""


class CallTool(Frame, frozen=True, gc=False, tag="call_tool"):
    """A request by the program of call `id` to call an MCP tool on the host. The tool server chooses `number`."""

    id: int
    number: int
    name: str
    args: dict[str, Any]


# From the host


class Pin(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A path, with the device and inode of the file or folder that the host has checked there."""

    path: str
    device: int
    inode: int


class Start(Frame, frozen=True, gc=False, tag="start"):
    """The first frame of the host: the tools, the folders they see, and the limits that the tool server sets itself.

    `path` is the path of the run. `outputs` already holds `spilled` files of earlier calls. `proxy` is the socket of
    the proxy to the allowed hosts, or empty. Programs can call the `program_tools`. Searches skip the
    `hidden_paths`. The tool server ends if a path of `pinned` shows something else: another run has replaced it while
    the sandbox was made."""

    version: int
    path: str
    tools: tuple[str, ...]
    workspace: str
    search_roots: tuple[str, ...]
    roots: tuple[str, ...]
    outputs: str
    resource_limits: ResourceLimits
    limit_memory: bool
    spilled: int = 0
    proxy: str = ""
    program_tools: tuple[ToolSpec, ...] = ()
    hidden_paths: tuple[str, ...] = ()
    pinned: tuple[Pin, ...] = ()


class Preview(Frame, frozen=True, gc=False, tag="preview"):
    """A request to show what a call would change."""

    id: int
    tool: str
    name: str
    args: dict[str, Any]


class CallFrame(Frame, frozen=True, gc=False, tag="call"):
    """A request to run a call of `tool`. `name` is the name for texts and files."""

    id: int
    tool: str
    name: str
    args: dict[str, Any]


class Cancel(Frame, frozen=True, gc=False, tag="cancel"):
    """A request to end a call. After a `timeout` the result has the output so far; after a `stop` nobody reads it."""

    id: int
    reason: Literal["timeout", "stop"]


class ToolReturned(Frame, frozen=True, gc=False, tag="tool_returned"):
    """The answer to `CallTool`: a `value`, or an `error` text. `note` is for the model."""

    id: int
    number: int
    value: msgspec.Raw
    error: str | None = None
    note: str = ""


FromServer = Hello | Previewed | Accepted | Output | ResultFrame | CallTool
FromHost = Start | Preview | CallFrame | Cancel | ToolReturned
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {
    "server": msgspec.json.Decoder(FromServer),
    "host": msgspec.json.Decoder(FromHost),
}


def encode_tool_frame(frame: Frame) -> bytes:
    """Return the bytes of a frame. Raises ProtocolError for a frame that is too large."""
    data = frames.encode_frame(frame)
    if len(data) - frames.HEAD > FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(data) - frames.HEAD} bytes is larger than {FRAME_BYTES}")
    return data


def make_frame_reader(sender: Literal["server", "host"]) -> FrameReader:
    """Make the reader of the frames from `sender`."""
    return FrameReader(_DECODERS[sender], limit=FRAME_BYTES)
