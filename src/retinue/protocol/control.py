"""The commands of Control between processes: their routes, and the types of their requests and replies. Does no I/O.

To add a command: its request and reply types and a Command (or StreamCommand) here, a handler in `control/commands`, a
method in `control/client`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from retinue.core.approvals import Allow, Answered, Approval, Deny
from retinue.core.caller import NOBODY, Caller
from retinue.core.control import Changes, SpawnBelow, TreeInfo
from retinue.core.errors import ConfigError, LogError, NoSlot, NotFound, RetinueError, SpawnRefused, ToolError
from retinue.core.events import Delta, Event, decode_event
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Receipt, Row
from retinue.core.profiles import Task
from retinue.core.results import ChangedFile, Result
from retinue.protocol.strict_json import InvalidBody, encode_body

VERSION = 1
KEY_HEADER = "Idempotency-Key"
MAX_KEY = 64
MAX_NAME = 200
_MAX_SEQ = 10**18
_DELTA = b'{"delta":'
Q = TypeVar("Q")
R = TypeVar("R")
TreeId = Annotated[str, msgspec.Meta(min_length=1)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_SEQ)]


class Address(msgspec.Struct, frozen=True):
    """The port of a process's control server, and the token that its requests need."""

    version: int
    pid: int
    port: int
    token: str


# Requests


class TreesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class PendingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the open questions of one tree, or of all."""

    tree: str | None = None


class WatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: TreeId
    after: Seq = 0
    deltas: bool = False


class CancelRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: str
    run: int = 0


class SendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: str
    run: int
    text: str


class ResumeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`unattended` accepts a process that was started with --yes and asks nobody."""

    tree: str
    model: str | None = None
    unattended: bool = False


class ContinueRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Starts a new run from the conversation of an old one. `unattended` as in ResumeRequest."""

    tree: str
    run: int
    text: str
    model: str | None = None
    seconds: float | None = None
    files: bool = False
    unattended: bool = False


class PrepareRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    profile: str | None = None


class SpawnRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Starts a run of a profile of that process. `limits` only narrow those that the run would have there."""

    profile: str
    task: Task
    limits: Limits | None = None
    below: SpawnBelow | None = None
    caller: Caller | None = None


class ClientRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Starts a run that stands for this client as long as the stream is open. `tools` are names."""

    name: str
    task: str
    description: str = ""
    tools: list[str] | None = None
    limits: Limits = Limits()
    caller: Caller = NOBODY


class AttendRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counts this client as an approver of one tree, or of all, as long as the stream is open."""

    tree: str | None = None


class RunRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: TreeId
    run: int = 0


class TreeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: TreeId


class ListRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    live: bool = False


class FindRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class AnswerRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest` is that of the question as it was shown; an answer to any other question is stale."""

    approval_id: str
    decision: Allow | Deny
    by: str = ""
    digest: str | None = None


# Replies


class CancelReply(msgspec.Struct, frozen=True):
    cancelled: bool


class AnswerReply(msgspec.Struct, frozen=True):
    outcome: Answered


class DoneReply(msgspec.Struct, frozen=True):
    """The reply of a command that has nothing to say."""


class ResultReply(msgspec.Struct, frozen=True):
    """The result of a run; None while it has not ended."""

    result: Result[Any] | None


class DiffReply(msgspec.Struct, frozen=True):
    diff: str


class ApplyReply(msgspec.Struct, frozen=True):
    files: list[ChangedFile]


class PendingQuestion(msgspec.Struct, frozen=True):
    """An open question, and the digest that an answer to it is bound to."""

    approval: Approval
    digest: str


class LiveRun(msgspec.Struct, frozen=True):
    run: int
    parent: int | None
    path: str
    label: str
    agent: str
    state: str


class LiveTree(msgspec.Struct, frozen=True):
    tree: str
    runs: list[LiveRun]


class ProcessInfo(msgspec.Struct, frozen=True):
    """The process of a control server, and the trees that live there."""

    version: int
    pid: int
    trees: list[LiveTree]


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every error. `code` names the exception that the client raises."""

    error: str
    code: str = ""


# The table


@dataclass(frozen=True)
class Command(Generic[Q, R]):
    """A request with one reply. One that only `reads` is a GET with its request in the address. Any other is a POST
    with a JSON body, and takes effect once however often it is sent with the same key."""

    path: str
    request: type[Q]
    reply: type[R]
    reads: bool = False


@dataclass(frozen=True)
class StreamCommand(Generic[Q]):
    """A request that is answered with lines, until there are no more or one side leaves. An empty line is a heartbeat.
    One that only `reads` is a GET, any other a POST whose effect lasts as long as its connection."""

    path: str
    request: type[Q]
    reads: bool = True


TREES = Command("/v1/trees", TreesRequest, ProcessInfo, reads=True)
PENDING = Command("/v1/pending", PendingRequest, list[PendingQuestion], reads=True)
CANCEL = Command("/v1/cancel", CancelRequest, CancelReply)
SEND = Command("/v1/send", SendRequest, Receipt)
ANSWER = Command("/v1/answer", AnswerRequest, AnswerReply)
PREPARE = Command("/v1/prepare", PrepareRequest, DoneReply)
SPAWN = Command("/v1/spawn", SpawnRequest, RunRef)
RESUME = Command("/v1/resume", ResumeRequest, RunRef)
CONTINUE = Command("/v1/continue", ContinueRequest, RunRef)
KILL = Command("/v1/kill", TreeRequest, DoneReply)
RESULT = Command("/v1/result", RunRequest, ResultReply, reads=True)
DESCRIBE = Command("/v1/run", RunRequest, Row, reads=True)
LIST = Command("/v1/list", ListRequest, list[TreeInfo], reads=True)
FIND = Command("/v1/find", FindRequest, RunRef, reads=True)
CHANGES = Command("/v1/changes", RunRequest, Changes, reads=True)
DIFF = Command("/v1/diff", RunRequest, DiffReply, reads=True)
APPLY = Command("/v1/apply", RunRequest, ApplyReply)
OPEN_CLIENT = StreamCommand("/v1/client", ClientRequest, reads=False)
ATTEND = StreamCommand("/v1/attend", AttendRequest, reads=False)
WATCH = StreamCommand("/v1/watch", WatchRequest)


def decode_query(query: dict[str, str], shape: type[Q]) -> Q:
    """Decode the parameters of an address as a request. Raises InvalidBody."""
    try:
        return msgspec.convert(query, shape, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidBody(f"the parameters of the address are wrong: {error}") from None


def encode_query(request: Any) -> dict[str, str]:
    """Encode a request as parameters of an address. What is None is left out."""
    fields: dict[str, Any] = msgspec.to_builtins(request)
    return {
        name: str(int(value) if isinstance(value, bool) else value)
        for name, value in fields.items()
        if value is not None
    }


# Errors

_ERRORS: dict[str, type[RetinueError]] = {
    "not_found": NotFound,
    "config": ConfigError,
    "log": LogError,
    "no_slot": NoSlot,
    "spawn_refused": SpawnRefused,
    "tool": ToolError,
}


def to_error_reply(error: RetinueError) -> ErrorReply:
    code = next((code for code, kind in _ERRORS.items() if isinstance(error, kind)), "")
    return ErrorReply(error=str(error), code=code)


def from_error_reply(reply: ErrorReply) -> RetinueError:
    return _ERRORS.get(reply.code, RetinueError)(reply.error)


# Lines of a watch


class _DeltaLine(msgspec.Struct, frozen=True):
    delta: Delta


def encode_delta(delta: Delta) -> bytes:
    return encode_body(_DeltaLine(delta))


def is_delta(line: bytes) -> bool:
    """Return whether a line of a watch is a delta, not an event."""
    return line.startswith(_DELTA)


def decode_item(line: bytes) -> Event | Delta:
    """Decode one line of a watch: an event as it is stored, or `{"delta": ...}`."""
    if is_delta(line):
        return msgspec.json.decode(line, type=_DeltaLine).delta
    return decode_event(line)
