"""Events: every fact about a run as a frozen value, and its encoding as a line of JSON.

An Event is an envelope (which run, which place in the tree's order, when) around a body (what happened). Kinds are
only ever added: a body of an unknown kind becomes an `Unknown` with all its fields, so that old readers pass new facts
on unchanged. Deltas are not events: they are shown at once, have no place in the order and are never replayed.
Before an event is written, `redact` replaces the known secrets in the texts of its body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from retinue.core import secrets
from retinue.core.caller import ClientRequest
from retinue.core.limits import Limits
from retinue.core.results import ChangedFile, Ending
from retinue.core.rounds import Basis, NextStep, Rounds
from retinue.core.usage import Usage


class Body(msgspec.Struct, frozen=True, gc=False, tag_field="kind", omit_defaults=True):
    """Base of all bodies."""

    kind: ClassVar[str] = ""


class RunSpawned(Body, frozen=True, tag="run.spawned"):
    """The supervisor created a run.

    `parent` is None for the primary. `call_id` is the parent's tool call that asked for the run. `limits` were given
    with the task. `continues` is the run whose thread is continued here, and `origin` its tree if different.
    `traceparent` names the span of another program that the tree belongs to, and `baggage` comes with the span.
    `remote_id` is the peer's id for a remote run that we did not start; `server` is the reporting MCP server, if any.
    `reported` is the run id under which our own tree is reported to another process. `request` is the client request
    that a primary answers. `files` are copied into the workspace before the run begins. A `conversation` waits for the
    next message after each answer. With `rounds` the run answers several times. `workspace_kind` says what `workspace`
    is, which a profile may leave open. A `client` is a program that spawns the other runs of the tree, and does no work
    itself."""

    parent: int | None
    label: str
    depth: int
    task: str
    subagent_id: str
    workspace: str
    profile: msgspec.Raw | dict[str, Any] = {}
    tools: msgspec.Raw | list[Any] = []
    task_context: str = ""
    model: str = ""
    call_id: str = ""
    background: bool = False
    queued: bool = False
    timeout_seconds: float | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    max_cost: Decimal | None = None
    stall_seconds: float | None = None
    trace_id: str = ""
    span_id: str = ""
    limits: Limits | None = None
    context_paths: tuple[str, ...] = ()
    include_parent_workspace: bool = True
    include_temp_workspace: bool = True
    continues: int | None = None
    origin: str = ""
    traceparent: str = ""
    baggage: str = ""
    server: str = ""
    reported: str = ""
    remote_id: str = ""
    request: ClientRequest | None = None
    files: tuple[str, ...] = ()
    conversation: bool = False
    rounds: Rounds | None = None
    workspace_kind: str = ""
    client: bool = False


class RunStarted(Body, frozen=True, tag="run.started"):
    """The run has its slot and begins. `sandbox` names the protections that a sandbox for its tools
    will have, as probed."""

    runtime: str = "inherited"
    sandbox: tuple[str, ...] = ()


class RunRemote(Body, frozen=True, tag="run.remote"):
    """A remote run was requested from a peer. `reference` lets another process find the run again. `cursor` is the
    place in the peer's stream up to which everything is in this log."""

    adapter: str
    reference: str
    cursor: str = ""


class RunResumed(Body, frozen=True, tag="run.resumed"):
    """A run without an ending resumes in a new process."""


TurnOutcome = Literal["answered", "interrupted", "failed", "refused", "limited"]


class RunWaiting(Body, frozen=True, tag="run.waiting"):
    """A conversation waits for the next message. Its timeout is paused until the next turn. `after` is the outcome of
    its newest turn; `text` is the reason if the turn gave no answer."""

    after: TurnOutcome = "answered"
    text: str = ""


class ModelChanged(Body, frozen=True, tag="run.model"):
    """A person chose another model for a conversation, starting at the next turn."""

    model: str


class TurnStarted(Body, frozen=True, tag="turn.started"):
    """A turn begins. The model sees everything before this event."""

    turn: int


class Thinking(Body, frozen=True, tag="thinking"):
    """A thinking block of the model. `file` has the whole text if `text` was cut. The provider `origin` needs the
    `signature` and `block_id` to read the block again. The first block of a reply also has the reply's `layout`."""

    text: str
    type: str = ""
    signature: str = ""
    file: str = ""
    block_id: str = ""
    origin: str = ""
    layout: str = ""


class Message(Body, frozen=True, tag="message"):
    """The text of a model reply. `final` means no tool call came with the text, so it is for the user; `replies_to`
    then names the message it answers: `task`, `user`, `asker` or `agent:N`. `file` has the whole text if `text` was
    cut. `host` marks text of a host-side function, which the model never saw."""

    text: str
    final: bool = False
    file: str = ""
    host: bool = False
    replies_to: str = ""


class ToolCall(Body, frozen=True, tag="tool.call"):
    """A tool call is about to run, or a person is about to be asked about it. `host` marks calls that the model did
    not make: a question of a host-side function, or a call made by the program of the call `within`. `raw` has the
    arguments reported by a remote run if they are not a JSON object."""

    call_id: str
    name: str
    args: dict[str, Any]
    tier: str = "confirm"
    display_name: str = ""
    waits: bool = False
    timeout_seconds: float | None = None
    host: bool = False
    within: str = ""
    raw: str = ""


class ToolStarted(Body, frozen=True, tag="tool.started"):
    """A call that a person was asked about starts now. From here on the answer has taken effect."""

    call_id: str


UNKNOWN_AFTER_CRASH = "unknown_after_crash"
_UNKNOWN_TEXT = (
    "{code}: {what} while this call was being made, so nobody knows whether it took effect. It was not repeated. Look "
    "at how things are before you make it again."
)
UNKNOWN_AFTER_CRASH_TEXT = _UNKNOWN_TEXT.format(code=UNKNOWN_AFTER_CRASH, what="the process died")
LOST_SANDBOX_TEXT = _UNKNOWN_TEXT.format(code=UNKNOWN_AFTER_CRASH, what="the sandbox was lost")


INTERRUPTED = "interrupted"


class ToolResult(Body, frozen=True, tag="tool.result"):
    """The outcome of a tool call as the model sees it. `file` has the whole text if `text` was cut. The `outcome`
    `unknown_after_crash` means nobody knows whether the call ran, `interrupted` that the user interrupted it.
    `sandbox` names the sandbox's protections, with its first call. `content` is the result of a tool that ran at the
    provider `origin`, in the provider's format. `gives` are the background runs whose answers the text contains."""

    call_id: str
    name: str
    text: str
    success: bool = True
    duration_ms: int = 0
    file: str = ""
    outcome: str = ""
    content: Any = None
    origin: str = ""
    sandbox: tuple[str, ...] = ()
    gives: tuple[int, ...] = ()


class ApprovalAsked(Body, frozen=True, tag="approval.asked"):
    """A person is asked about a call. `label` is None for the primary. `rule` holds the rules that an answer with
    scope `project` would save. `digest` identifies exactly this action; without one, the question is answered at the
    peer of a remote run."""

    approval_id: str
    call_id: str
    tool: str
    args: dict[str, Any]
    label: str | None = None
    preview: str = ""
    rule: str = ""
    digest: str = ""


class ApprovalDecided(Body, frozen=True, tag="approval.decided"):
    """The answer that took effect, from a person or a rule. `by` is user, function, expiry, peer (given at the peer
    of a remote run) or `rule: ...`. `surface` is where a person answered. `rule` is the rule or earlier answer that
    decided. `scope` is call, run, tool, project, or pending (all pending questions of the run). `args` are edited
    arguments. `seal` is the seal of an MCP server's tool. `key` identifies the answer for its sender."""

    approval_id: str
    call_id: str
    allowed: bool
    reason: str = ""
    by: str = ""
    tool: str = ""
    scope: str = "call"
    args: dict[str, Any] | None = None
    seal: str = ""
    rule: str = ""
    surface: str = ""
    key: str = ""


class Inbox(Body, frozen=True, tag="inbox"):
    """A message for the run, delivered at its next turn: a steering message, a notice that the background child
    `about` ended, or a reminder of a missing answer. `source` has the values of `UserTurn.source`. `message_id` is the
    id given by a client of a surface, so that repeated messages count once."""

    text: str
    source: str = "notice"
    about: int | None = None
    message_id: str = ""


class UsageReported(Body, frozen=True, tag="usage"):
    """The usage of one model call. `cost` is in US dollars, or None if the price is unknown. `estimated` marks a call
    whose usage the provider did not fully report: it was cancelled or cut off, or the provider reports no usage."""

    model: str
    usage: Usage
    cost: Decimal | None = None
    estimated: bool = False


class TurnEnded(Body, frozen=True, tag="turn.ended"):
    """The model's reply and all its tool calls are done."""

    turn: int


class Warned(Body, frozen=True, tag="warning"):
    """A warning for a person; the run continues. `code` is for programs."""

    text: str
    code: str = ""


class Gap(Body, frozen=True, tag="gap"):
    """Events are missing here; `reason` says why. The code `damaged` marks stored events that cannot be read: the log
    yields this event in their place and never stores it."""

    count: int
    reason: str
    code: str = ""


class RunEnded(Body, frozen=True, tag="run.ended"):
    """The only ending of a run. `final_response` is the text for the parent. `partial` is text salvaged from an
    unfinished run. `structured` is the payload of `final_answer`. `changed_files` are the first of the `changed_count`
    files changed in the run's copied workspace. `code` is `Ending.code`."""

    status: str
    final_response: str
    duration_ms: int
    error_details: str | None = None
    partial: str = ""
    structured: Any = None
    file: str = ""
    changed_files: tuple[ChangedFile, ...] = ()
    changed_count: int = 0
    code: str = ""

    @classmethod
    def from_ending(cls, ending: Ending, *, duration_ms: int = 0, partial: str = "") -> RunEnded:
        """Return the event of an ending. Only an unfinished run keeps `partial`."""
        return cls(
            status=ending.status,
            final_response=ending.text,
            duration_ms=duration_ms,
            error_details=ending.error,
            partial="" if ending.status == "done" else partial,
            structured=ending.structured,
            code=ending.code,
        )

    @property
    def ending(self) -> Ending:
        """The `Ending` described by this event."""
        return Ending(
            status=self.status,  # type: ignore[arg-type]
            text=self.final_response,
            error=self.error_details,
            structured=self.structured,
            code=self.code,  # type: ignore[arg-type]
        )


class ProgressReported(Body, frozen=True, tag="subagent.progress"):
    """A subagent of this run, started with `subagent_NAME`, begins a tool call or has `completed` one. The subagent's
    own events are in its own thread."""

    subagent_id: str
    subagent_name: str
    nickname: str | None
    child_thread_id: str
    child_root_task_id: str
    subagent_task_id: str | None
    max_turns: int | None
    current_turn: int
    model: str | None
    tool_name: str
    tool_context: str
    completed: bool
    success: bool
    tool_count: int
    total_tokens: int


class AnswerGiven(Body, frozen=True, tag="team.answered"):
    """The `member` of this team gives an answer named `label`. `file` has the whole text if `text` was cut. `snapshot`
    is a copy of the member's files for the other members. `member_run` and `call_id` name the call that gave the
    answer."""

    member: str
    label: str
    member_run: int
    call_id: str
    text: str
    file: str = ""
    snapshot: str = ""


class AnswersShown(Body, frozen=True, tag="team.asked"):
    """The `member` is shown these `answers` and asked to vote. `missed` is the call or turn in which the member did
    not vote when asked before."""

    member: str
    answers: tuple[str, ...]
    missed: str = ""


class VoteCast(Body, frozen=True, tag="team.voted"):
    """The `member` votes for the answer `choice`, or abstains if `choice` is empty."""

    member: str
    member_run: int
    call_id: str
    choice: str = ""
    reason: str = ""


class MemberLost(Body, frozen=True, tag="team.lost"):
    """The run of the `member` ended without being done. Its answers no longer count."""

    member: str
    member_run: int
    status: str
    reason: str = ""


class TeamDecided(Body, frozen=True, tag="team.decided"):
    """The team decides for the answer `winner`. `votes` has the number of votes for each answer. The run `presenter`
    makes the final answer from the winning answer; None means the winning answer is used unchanged."""

    winner: str
    member: str
    member_run: int
    strategy: str
    presenter: int | None = None
    votes: dict[str, int] = {}
    reason: str = ""


class RoundAnswered(Body, frozen=True, tag="round.answered"):
    """The run ends round `round` with an answer named `label`. `file` has the whole text if `text` was cut. `snapshot`
    is a copy of the run's files at this point."""

    round: int
    label: str
    call_id: str
    text: str
    file: str = ""
    snapshot: str = ""


class RoundEvaluated(Body, frozen=True, tag="round.evaluated"):
    """The evaluator has ended with `status`, and round `round` begins. `basis` is the starting point of the round: the
    evaluator's `tasks`, its `packet` alone, or the run's own checklist. `problems` lists the faults in the evaluator's
    files. `evaluator_run` is None if the evaluator could not be started."""

    round: int
    basis: Basis
    evaluator_run: int | None = None
    status: str = ""
    packet: str = ""
    tasks: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()


class ChecklistAccepted(Body, frozen=True, tag="round.checked"):
    """The run has scored its newest answer by the criteria. `below` are the criteria it does not meet. The verdict
    `iterate` asks for another answer."""

    round: int
    call_id: str
    verdict: NextStep
    scores: dict[str, float]
    below: tuple[str, ...] = ()


class ImprovementsProposed(Body, frozen=True, tag="round.proposed"):
    """The run proposes improvements for its next answer. Each has a `description` and an `impact`."""

    round: int
    call_id: str
    improvements: tuple[dict[str, Any], ...]


class RoundVoted(Body, frozen=True, tag="round.voted"):
    """The run decides for its answer `choice` and ends."""

    call_id: str
    choice: str
    reason: str = ""


class Unknown:
    """A body of a kind that this version does not know. `fields` has all fields of the line. Not a dataclass: the
    encoder would not pass a dataclass to our hook."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind: str = kind
        self.fields: dict[str, Any] = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and (self.kind, self.fields) == (other.kind, other.fields)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Unknown(kind={self.kind!r}, fields={self.fields!r})"


EventBody = (
    RunSpawned
    | RunStarted
    | RunRemote
    | RunResumed
    | RunWaiting
    | ModelChanged
    | TurnStarted
    | Thinking
    | Message
    | ToolCall
    | ToolStarted
    | ToolResult
    | ApprovalAsked
    | ApprovalDecided
    | Inbox
    | UsageReported
    | TurnEnded
    | Warned
    | Gap
    | RunEnded
    | ProgressReported
    | AnswerGiven
    | AnswersShown
    | VoteCast
    | MemberLost
    | TeamDecided
    | RoundAnswered
    | RoundEvaluated
    | ChecklistAccepted
    | ImprovementsProposed
    | RoundVoted
    | Unknown
)
"""A body of any kind. `match event.body` narrows it by class."""

KINDS: dict[str, type[Body]] = {str(cls.__struct_config__.tag): cls for cls in Body.__subclasses__()}
for _kind, _body in KINDS.items():
    _body.kind = _kind
B = TypeVar("B", bound=Body)


class Event(msgspec.Struct, frozen=True, gc=False):
    """A fact about a run. `seq` is its place in the tree's order."""

    seq: int
    tree: str
    run: int
    path: str
    agent: str
    at: float
    body: EventBody

    @property
    def kind(self) -> str:
        return self.body.kind


class Delta(msgspec.Struct, frozen=True, gc=False):
    """A piece of text while a model speaks or a tool runs. `kind` is `text` or `thinking`, `output` of a tool, or
    `dropped` if a watcher was too slow for `dropped` deltas. `turn` is the turn of the reply; `offset` is the number
    of characters of the reply's text before this piece. `call_id` is the call that printed the output."""

    tree: str
    run: int
    path: str
    agent: str
    text: str
    kind: str = "text"
    dropped: int = 0
    turn: int = 0
    offset: int = 0
    call_id: str = ""


# The fields of each kind of event that hold text of users, models, tools or peers. Other kinds hold none. A profile
# and its tools are redacted when the plan is made, once for all its runs.
_TEXT_FIELDS: dict[type[Body], tuple[str, ...]] = {
    RunSpawned: ("label", "task", "subagent_id", "task_context", "context_paths", "call_id"),
    Thinking: ("text",),
    Message: ("text",),
    ToolCall: ("args", "raw", "name", "display_name", "call_id", "within"),
    ToolStarted: ("call_id",),
    ToolResult: ("text", "content", "name", "call_id"),
    ApprovalAsked: ("args", "preview", "label", "rule", "tool", "call_id"),
    ApprovalDecided: ("reason", "by", "rule", "args", "tool", "call_id"),
    Inbox: ("text",),
    ProgressReported: ("nickname", "tool_name", "tool_context"),
    AnswerGiven: ("text", "call_id"),
    AnswersShown: ("missed",),
    VoteCast: ("reason", "call_id"),
    MemberLost: ("reason",),
    RoundAnswered: ("text", "call_id"),
    RoundEvaluated: ("packet", "tasks", "problems"),
    ChecklistAccepted: ("call_id",),
    ImprovementsProposed: ("improvements", "call_id"),
    RoundVoted: ("reason", "call_id"),
    Warned: ("text",),
    Gap: ("reason",),
    RunWaiting: ("text",),
    RunEnded: ("final_response", "error_details", "partial", "structured", "changed_files"),
}


def redact(body: B) -> B:
    """Return `body`, or a copy without known secrets if it contains any."""
    names = _TEXT_FIELDS.get(type(body))
    if names is None:
        return body
    changes = None
    for name in names:
        value = getattr(body, name)
        if value:
            cleaned = secrets.clean_text(value) if type(value) is str else secrets.clean_value(value)
            if cleaned is not value:
                changes = {**(changes or {}), name: cleaned}
    return body if changes is None else msgspec.structs.replace(body, **changes)


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    seq: int
    tree: str
    run: int
    path: str
    agent: str
    at: float
    kind: str


def _encode_foreign(value: object) -> object:
    """Encode a value that the encoder does not know: an `Unknown` body by its fields, a value of a host or provider by
    its text."""
    return {"kind": value.kind, **value.fields} if isinstance(value, Unknown) else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_foreign)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_BODIES = {kind: msgspec.json.Decoder(cls) for kind, cls in KINDS.items()}
_ENVELOPE_FIELDS = frozenset(_Envelope.__struct_fields__)
_BODY = b',"body":{'  # cannot occur inside a JSON string, where quotes are escaped


def encode_event(event: Event) -> bytes:
    """Encode an event as a line of JSON, without the newline: the fields of the envelope, then the fields of the
    body."""
    return make_line(_encode_stored(event))


def encode_events(events: Sequence[Event]) -> bytes:
    """Encode events as lines of JSON, each with its newline."""
    return b"".join([make_line(line) + b"\n" for line in encode_stored_events(events).split(b"\n")])


def encode_stored_events(events: Sequence[Event]) -> bytes:
    """Encode events as the log stores them, a line each. The body stays a nested object, which is six times as
    fast."""
    try:
        return _ENCODER.encode_lines(events)[:-1]
    except Exception:  # noqa: BLE001 - one event cannot be encoded; the others must still be
        return b"\n".join(map(_encode_stored, events))


def make_line(kept: bytes) -> bytes:
    """Return the line of `encode_event` for `kept`, a line as the log stores it."""
    head, _, body = kept.partition(_BODY)
    return b"%b,%b" % (head, body[:-1])


def _encode_stored(event: Event) -> bytes:
    """Encode an event as the log stores it. Never fails: lone surrogates are replaced, and a body that cannot be
    encoded becomes a `gap` with the reason."""
    try:
        try:
            return _ENCODER.encode(event)
        except UnicodeEncodeError:
            body = event.body
            fields = body.fields if isinstance(body, Unknown) else msgspec.structs.asdict(body)
            return _ENCODER.encode(
                replace_half_characters({**msgspec.structs.asdict(event), "body": {"kind": body.kind, **fields}})
            )
    except Exception as error:  # noqa: BLE001 - foreign values can raise anything, and every `seq` needs a line
        gap = Gap(1, f"an event of kind {event.kind} could not be written: {type(error).__name__}")
        path, agent = replace_half_characters(event.path), replace_half_characters(event.agent)
        return _ENCODER.encode(msgspec.structs.replace(event, path=path, agent=agent, body=gap))


def replace_half_characters(value: Any) -> Any:
    """Return a JSON value with every lone surrogate in its texts replaced."""
    return map_texts(value, lambda text: text.encode("utf-8", "replace").decode())


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to every text in it, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(key, change): map_texts(inner, change) for key, inner in value.items()}
    return [map_texts(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def decode_raw(value: msgspec.Raw | Any) -> Any:
    """Return the value of a field that is kept as raw JSON (`profile` and `tools` of `run.spawned`)."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def decode_event(line: bytes) -> Event:
    """Decode the event of one line. Raises `msgspec.MsgspecError` for an invalid line."""
    try:
        head = _ENVELOPE.decode(line)
        decoder = _BODIES.get(head.kind)
        body: EventBody
        if decoder is None:
            fields = msgspec.json.decode(line)
            body = Unknown(head.kind, {k: v for k, v in fields.items() if k not in _ENVELOPE_FIELDS})
        else:
            body = decoder.decode(line)  # type: ignore[assignment] # one of KINDS
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
    return Event(seq=head.seq, tree=head.tree, run=head.run, path=head.path, agent=head.agent, at=head.at, body=body)


def decode_event_or_gap(line: bytes) -> Event:
    """Decode the event of one line. Return a gap in its place if only the body is invalid."""
    try:
        return decode_event(line)
    except msgspec.MsgspecError:
        head = _ENVELOPE.decode(line)
        gap = Gap(1, f"an event of kind {head.kind} cannot be read")
        return Event(seq=head.seq, tree=head.tree, run=head.run, path=head.path, agent=head.agent, at=head.at, body=gap)
