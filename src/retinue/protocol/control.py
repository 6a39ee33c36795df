"""The commands of Control between processes: their routes, and the types of their requests and replies. Does no I/O.

To add a command, add its request type and a Command here, and a method in `control/client`. The server calls the
method of Control with the fields of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from retinue.core.approvals import Allow, Answered, Approval, Deny, QuestionChange, QuestionClosed
from retinue.core.caller import NOBODY, Caller
from retinue.core.changes import ApplyPlan, ChangedLines, Changes, RunCopy
from retinue.core.control import SpawnBelow, TreeInfo
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
from retinue.core.events import Delta, Event, decode_event
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Receipt, RunSummary
from retinue.core.profiles import Task
from retinue.core.results import ChangedFile, Result
from retinue.protocol.strict_json import InvalidBody, encode_body

VERSION = 1
KEY_HEADER = "Idempotency-Key"
MAX_KEY = 64
DEFAULT_ANSWERER = "control"
REPLY_SECONDS = 15.0
FILES_SECONDS = 300.0  # for commands that read or write the files of a whole project
PLAN_SECONDS = 60.0  # a person waits for the plan
_MAX_SEQ = 10**18
_DELTA = b'{"delta":'
Q = TypeVar("Q")
R = TypeVar("R")
TreeId = Annotated[str, msgspec.Meta(min_length=1)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Key = Annotated[str, msgspec.Meta(max_length=MAX_KEY)]
Seq = Annotated[int, msgspec.Meta(ge=0, lt=_MAX_SEQ)]


class Address(msgspec.Struct, frozen=True):
    """The port of a process's control server, and the token that its requests need. `writer` is the id of the process
    in the log."""

    version: int
    pid: int
    port: int
    token: str
    writer: str


# Requests. The fields of a request are the arguments of the Control method that it calls.


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request without arguments, and the base of the others."""


class TreeRequest(Arguments, frozen=True):
    tree: TreeId


class RunRequest(Arguments, frozen=True):
    tree: TreeId
    run: int = 0


class CopiesRequest(Arguments, frozen=True):
    """A request about the copied workspaces of `run`; None means all runs of the tree."""

    tree: TreeId
    run: int | None = None


class DiffRequest(Arguments, frozen=True):
    tree: TreeId
    run: int = 0
    stat_columns: int | None = None


class PlanApplyRequest(Arguments, frozen=True):
    tree: TreeId
    runs: list[int]


class ApplyPlannedRequest(Arguments, frozen=True):
    """A request to apply a plan. `digest` is the digest of the plan as shown."""

    tree: TreeId
    runs: list[int]
    digest: str


class QuestionsRequest(Arguments, frozen=True):
    """A request about the questions of `tree`; None means all trees."""

    tree: str | None = None


class WatchRequest(Arguments, frozen=True):
    tree: TreeId
    after: Seq = 0
    deltas: bool = False


class SendRequest(Arguments, frozen=True):
    tree: str
    run: int
    text: str


class ModelRequest(Arguments, frozen=True):
    tree: TreeId
    run: int
    model: str


class ResumeRequest(Arguments, frozen=True):
    """A request to resume a tree. `unattended` accepts a process that was started with --yes and asks nobody."""

    tree: str
    model: str | None = None
    unattended: bool = False


class ContinueRequest(Arguments, frozen=True):
    """A request to start a new run from the conversation of an old run. `unattended` is as in ResumeRequest."""

    tree: str
    run: int
    text: str
    model: str | None = None
    seconds: float | None = None
    files: bool = False
    unattended: bool = False
    conversation: bool = False


class PrepareRequest(Arguments, frozen=True):
    profile: str | None = None


class SpawnRequest(Arguments, frozen=True):
    """A request to start a run of a profile of the serving process. `narrow` can only narrow the run's limits there."""

    profile: str
    task: Task
    narrow: Limits | None = None
    below: SpawnBelow | None = None
    caller: Caller | None = None


class OpenClientRequest(Arguments, frozen=True):
    """A request to start a run that stands for this client while the stream is open. `tools` are names. `narrow` can
    only narrow the run's limits."""

    name: str
    task: str
    description: str = ""
    tools: list[str] | None = None
    narrow: Limits | None = None
    caller: Caller = NOBODY


class ListRequest(Arguments, frozen=True):
    live: bool = False


class FindRequest(Arguments, frozen=True):
    name: str


class AnswerRequest(Arguments, frozen=True):
    """An answer to a question. `digest` is that of the question as shown. An answer to any other question is stale.
    `key` identifies the answer in the log."""

    approval_id: str
    decision: Allow | Deny
    by: Name = DEFAULT_ANSWERER
    digest: str = ""
    surface: Name = ""
    key: Key = ""


class ErrorReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of every error. `code` names the exception that the client raises: `writer` is that of LogHeld, `name`
    and `candidates` those of Ambiguous."""

    error: str
    code: str = ""
    writer: str = ""
    name: str = ""
    candidates: Sequence[str] = ()


# The table


@dataclass(frozen=True)
class Command(Generic[R]):
    """A `method` of Control that other processes call, and the type of its reply.

    A command that only `reads` is a GET with its request in the query string. Any other command is a POST with a JSON
    body. The client sends a command again if the reply is lost, and a POST with the same key, so that it takes effect
    once. A POST that is not `repeated` has no key, so the server does not keep its reply. `seconds` is the time to
    wait for the reply."""

    path: str
    method: str
    request: type[Arguments]
    reply: type[R]
    reads: bool = False
    repeated: bool = True
    seconds: float = REPLY_SECONDS


@dataclass(frozen=True)
class StreamCommand:
    """A request answered with lines until there are no more or one side disconnects. An empty line is a heartbeat.

    A command that only `reads` is a GET. Any other command is a POST whose effect lasts as long as its connection."""

    path: str
    request: type[Arguments]
    reads: bool = False


TREES = Command("/v1/trees", "list_trees", ListRequest, list[TreeInfo], reads=True)
PENDING = Command("/v1/pending", "pending", QuestionsRequest, list[Approval], reads=True)
CANCEL = Command("/v1/cancel", "cancel", RunRequest, bool)
INTERRUPT = Command("/v1/interrupt", "interrupt_turn", RunRequest, bool)
END_CONVERSATION = Command("/v1/end-conversation", "end_conversation", RunRequest, bool)
CHANGE_MODEL = Command("/v1/model", "change_model", ModelRequest, str)
KILL = Command("/v1/kill", "kill", TreeRequest, NoneType)
SEND = Command("/v1/send", "send", SendRequest, Receipt)
ANSWER: Command[Answered] = Command("/v1/answer", "answer", AnswerRequest, Answered)  # type: ignore[arg-type]
PREPARE = Command("/v1/prepare", "prepare", PrepareRequest, NoneType)
SPAWN = Command("/v1/spawn", "spawn", SpawnRequest, RunRef)
RESUME = Command("/v1/resume", "resume", ResumeRequest, RunRef)
CONTINUE = Command("/v1/continue", "continue_run", ContinueRequest, RunRef)
RESULT: Command[Result[Any] | None] = Command("/v1/result", "result", RunRequest, Result[Any] | None, reads=True)  # type: ignore[arg-type]
DESCRIBE = Command("/v1/run", "describe_run", RunRequest, RunSummary, reads=True)
FIND = Command("/v1/find", "find_run", FindRequest, RunRef, reads=True)
COPIES = Command("/v1/copies", "list_copies", CopiesRequest, list[RunCopy], reads=True)
CHANGES = Command("/v1/changes", "changes", RunRequest, Changes, reads=True, seconds=FILES_SECONDS)
DIFF = Command("/v1/diff", "diff", DiffRequest, str, reads=True, seconds=FILES_SECONDS)
CHANGED_LINES = Command(
    "/v1/changed-lines", "count_changed_lines", RunRequest, list[ChangedLines], reads=True, seconds=FILES_SECONDS
)
PLAN_APPLY = Command(  # changes nothing, but its list of runs fits in no query string
    "/v1/plan-apply", "plan_apply", PlanApplyRequest, ApplyPlan, repeated=False, seconds=PLAN_SECONDS
)
APPLY_PLANNED = Command("/v1/apply-planned", "apply_planned", ApplyPlannedRequest, NoneType, seconds=FILES_SECONDS)
UNDO_APPLY = Command("/v1/undo-apply", "undo_interrupted_apply", Arguments, bool, seconds=FILES_SECONDS)
APPLY = Command("/v1/apply", "apply", RunRequest, list[ChangedFile], seconds=FILES_SECONDS)
OPEN_CLIENT = StreamCommand("/v1/client", OpenClientRequest)
ATTEND = StreamCommand("/v1/attend", QuestionsRequest)  # the client is an approver as long as the stream is open
WATCH = StreamCommand("/v1/watch", WatchRequest, reads=True)
WATCH_QUESTIONS = StreamCommand("/v1/questions", QuestionsRequest, reads=True)
ROUTES: dict[str, Command[Any] | StreamCommand] = {  # all of the above
    each.path: each for each in list(vars().values()) if isinstance(each, Command | StreamCommand)
}


def decode_query(query: dict[str, str], shape: type[Q]) -> Q:
    """Decode query parameters as a request. Raises InvalidBody."""
    try:
        return msgspec.convert(query, shape, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidBody(f"the parameters of the address are wrong: {error}") from None


def encode_query(request: Arguments) -> dict[str, str]:
    """Encode a request as query parameters. Fields that are None are left out."""
    fields: dict[str, Any] = msgspec.to_builtins(request)
    return {
        name: str(int(value) if isinstance(value, bool) else value)
        for name, value in fields.items()
        if value is not None
    }


# Errors

_ERRORS: dict[str, type[RetinueError]] = {  # a class comes before its base
    "not_found": NotFound,
    "ambiguous": Ambiguous,
    "config": ConfigError,
    "log_held": LogHeld,
    "log_lost": LogLost,
    "log_version": LogVersionError,
    "log_damaged": LogDamaged,
    "log": LogError,
    "no_slot": NoSlot,
    "spawn_refused": SpawnRefused,
    "tool": ToolError,
}


def to_error_reply(error: RetinueError) -> ErrorReply:
    code = next((code for code, kind in _ERRORS.items() if isinstance(error, kind)), "")
    match error:
        case LogHeld(writer=writer):
            return ErrorReply(error=str(error), code=code, writer=writer)
        case Ambiguous(name=name, candidates=candidates):
            return ErrorReply(error=str(error), code=code, name=name, candidates=candidates)
    return ErrorReply(error=str(error), code=code)


def from_error_reply(reply: ErrorReply) -> RetinueError:
    match reply.code:
        case "log_held":
            return LogHeld(reply.error, writer=reply.writer)
        case "ambiguous":
            return Ambiguous(reply.name, reply.candidates)
    return _ERRORS.get(reply.code, RetinueError)(reply.error)


# Lines of a watch


class _QuestionLine(msgspec.Struct, frozen=True, omit_defaults=True):
    asked: Approval | None = None
    closed: QuestionClosed | None = None


def encode_question(change: QuestionChange) -> bytes:
    return encode_body({"closed" if isinstance(change, QuestionClosed) else "asked": change})


def decode_question(line: bytes) -> QuestionChange:
    """Decode one line of a watch of questions: `{"asked": ...}` or `{"closed": ...}`."""
    read = msgspec.json.decode(line, type=_QuestionLine)
    change = read.closed or read.asked
    if change is None:
        raise InvalidBody("a line of a watch of questions has neither a question nor a closing")
    return change


class _DeltaLine(msgspec.Struct, frozen=True):
    delta: Delta


def encode_delta(delta: Delta) -> bytes:
    return encode_body(_DeltaLine(delta))


def is_delta(line: bytes) -> bool:
    """Return True if a line of a watch is a delta, not an event."""
    return line.startswith(_DELTA)


def decode_item(line: bytes) -> Event | Delta:
    """Decode one line of a watch: an event as it is stored, or `{"delta": ...}`."""
    if is_delta(line):
        return msgspec.json.decode(line, type=_DeltaLine).delta
    return decode_event(line)
