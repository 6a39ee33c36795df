"""Every fact there is about a run, as one frozen value each, and the line that carries it.

An Event is an envelope (which run, which place in the tree's order, when) around a body (what happened).
Kinds only grow: a body of an unknown kind is an `Unknown` that keeps all its fields, so that old readers
pass new facts on untouched. Deltas are not events: they are shown at once, have no place and are never replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal

import msgspec

from retinue.core.caller import ClientRequest
from retinue.core.limits import Limits
from retinue.core.results import ChangedFile, Ending
from retinue.core.rounds import Basis, Rounds, Verdict
from retinue.core.usage import Usage


class Body(msgspec.Struct, frozen=True, gc=False, tag_field="kind", omit_defaults=True):
    """Base of all bodies."""

    kind: ClassVar[str] = ""


class RunSpawned(Body, frozen=True, tag="run.spawned"):
    """The supervisor made a run. `parent` is None for the primary; `call_id` is the parent's tool call that asked.
    `limits` are those given with the task. It goes on with the thread of run `continues`, of the tree `origin` where
    that is another one. `traceparent` names the span of another program that the tree belongs to, `baggage` comes with
    it. A remote run that we did not start
    has the id that its peer gave it (`remote_id`), and the MCP `server` if one reports it; a tree of our
    own that is reported to another process has the run id under which it is `reported` there. A primary that answers
    a client of a surface has the `request`; `files` are copied into the workspace before the run begins. A
    `conversation` waits for the next message when it has answered; with `rounds` it answers several times."""

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


class RunStarted(Body, frozen=True, tag="run.started"):
    """It has its slot and begins. `sandbox` names the protections of the sandbox that its tools will use, as it
    was probed."""

    runtime: str = "inherited"
    sandbox: tuple[str, ...] = ()


class RunRemote(Body, frozen=True, tag="run.remote"):
    """A remote run is asked of a peer. `reference` finds it again in another process, `cursor` is the place in the
    peer's stream up to which everything is in this log."""

    adapter: str
    reference: str
    cursor: str = ""


class RunResumed(Body, frozen=True, tag="run.resumed"):
    """A run without an ending goes on in a new process."""


TurnOutcome = Literal["answered", "interrupted", "failed", "refused", "limited"]


class RunWaiting(Body, frozen=True, tag="run.waiting"):
    """The run of a conversation waits for the next message; its clock stands still until the next turn. `after` is how
    its newest turn went, `text` the reason where that is no answer."""

    after: TurnOutcome = "answered"
    text: str = ""


class ModelChanged(Body, frozen=True, tag="run.model"):
    """A person chose another model for a conversation; the next turn asks it."""

    model: str


class TurnStarted(Body, frozen=True, tag="turn.started"):
    """A turn begins. The model sees in it what came before this event."""

    turn: int


class Thinking(Body, frozen=True, tag="thinking"):
    """A thinking block of the model; `file` has the whole where `text` was cut. What the provider `origin` needs to
    read it again is its `signature` and `block_id`, and the `layout` of the reply if it is the first of it."""

    text: str
    type: str = ""
    signature: str = ""
    file: str = ""
    block_id: str = ""
    origin: str = ""
    layout: str = ""


class Message(Body, frozen=True, tag="message"):
    """The text of one model reply; `final` when no tool call came with it: then it is words to the user, and
    `replies_to` says to what: `task`, `user`, `asker` or `agent:N`. `file` has the whole where it was cut. `host` marks
    words of a host-side function, which the model never saw."""

    text: str
    final: bool = False
    file: str = ""
    host: bool = False
    replies_to: str = ""


class ToolCall(Body, frozen=True, tag="tool.call"):
    """A tool is about to run (or to be asked about). `host` marks what is no call of the model's: a host-side
    function's own question, or a call that the program of the call `within` makes. `raw` is what a run elsewhere says
    of the arguments where that is no JSON object."""

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
    """A call that a person was asked about runs now: from here on the answer has taken effect."""

    call_id: str


UNKNOWN_AFTER_CRASH = "unknown_after_crash"
UNKNOWN_AFTER_CRASH_TEXT = (
    f"{UNKNOWN_AFTER_CRASH}: the process died while this call was being made, so nobody knows whether it took effect. "
    "It was not repeated. Look at how things are before you make it again."
)


INTERRUPTED = "interrupted"


class ToolResult(Body, frozen=True, tag="tool.result"):
    """The outcome of a tool as the model sees it; `file` has the whole text where `text` was cut. The `outcome`
    `unknown_after_crash` says that nobody knows whether it ran, `interrupted` that the user interrupted it. `sandbox`
    names the protections, with the first call of a sandbox. Of a tool that ran at the provider, `content` is what
    `origin` gave it. `gives` are the background runs whose answers the text has."""

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
    """A person is asked; `label` is None for the primary. `rule` is what an answer for the project would write,
    `digest` stands for exactly this action."""

    approval_id: str
    call_id: str
    tool: str
    args: dict[str, Any]
    label: str | None = None
    preview: str = ""
    rule: str = ""
    digest: str = ""


class ApprovalDecided(Body, frozen=True, tag="approval.decided"):
    """The one answer that took effect, asked or by a rule. `by` is user, function, expiry or `rule: ...`; `surface` is
    where a person answered; `rule` is the rule or earlier answer that decided; `scope` is how far it goes (call, run,
    tool, project, or pending for all a run had asked); `args` are edited arguments; `seal` is that of the tool, where
    it is an MCP server's."""

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


class Inbox(Body, frozen=True, tag="inbox"):
    """Words for the run, delivered at its next turn: a steer, a notice that a background child ended, or the reminder
    that its answer is missing. `source` is that of `UserTurn`; `message_id` is the id that a client of a surface gave
    the words, so that they count once."""

    text: str
    source: str = "notice"
    about: int | None = None
    message_id: str = ""


class UsageReported(Body, frozen=True, tag="usage"):
    """The usage of one model call; `cost` is in US dollars and absent where the price is not known. `estimated` marks a
    call whose provider did not tell all: it was cancelled or cut off, or the provider reports no usage."""

    model: str
    usage: Usage
    cost: Decimal | None = None
    estimated: bool = False


class TurnEnded(Body, frozen=True, tag="turn.ended"):
    """The model's reply and all its tools are done."""

    turn: int


class Warned(Body, frozen=True, tag="warning"):
    """Something a person should know; the run goes on. `code` is for programs."""

    text: str
    code: str = ""


class Gap(Body, frozen=True, tag="gap"):
    """Events are missing here, and why. The code `damaged` marks those that were written and cannot be read: the log
    gives this event in their place, and it is never stored."""

    count: int
    reason: str
    code: str = ""


class RunEnded(Body, frozen=True, tag="run.ended"):
    """The one ending of a run. `final_response` is what the parent gets; `partial` is text salvaged from a run
    that did not finish; `structured` is the payload of `final_answer`. `changed_files` are the first of the
    `changed_count` files that it changed in its copy of a folder. `code` is that of `Ending`."""

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

    @property
    def ending(self) -> Ending:
        """The ending that the event tells of."""
        return Ending(
            status=self.status,  # type: ignore[arg-type]
            text=self.final_response,
            error=self.error_details,
            structured=self.structured,
            code=self.code,  # type: ignore[arg-type]
        )


class ProgressReported(Body, frozen=True, tag="subagent.progress"):
    """A subagent of this run, asked for with `subagent_NAME`, begins or has `completed` a tool call. The events of the
    subagent itself are in its own thread."""

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
    """The `member` of this team gives an answer, called `label`; `file` has the whole where `text` was cut, and
    `snapshot` is a copy of its files for the others. `member_run` and `call_id` are those of its call."""

    member: str
    label: str
    member_run: int
    call_id: str
    text: str
    file: str = ""
    snapshot: str = ""


class AnswersShown(Body, frozen=True, tag="team.asked"):
    """The `member` is shown these `answers` and asked to vote. `missed` is the call or turn by which it did not
    vote when it was asked before."""

    member: str
    answers: tuple[str, ...]
    missed: str = ""


class VoteCast(Body, frozen=True, tag="team.voted"):
    """The `member` votes for the answer `choice`; for none if it abstains."""

    member: str
    member_run: int
    call_id: str
    choice: str = ""
    reason: str = ""


class MemberLost(Body, frozen=True, tag="team.lost"):
    """The run of the `member` ended without being done; its answers do not count any more."""

    member: str
    member_run: int
    status: str
    reason: str = ""


class TeamDecided(Body, frozen=True, tag="team.decided"):
    """The team decides for the answer `winner`, by so many `votes` for each. The run `presenter` makes the final answer
    of it; None gives it as it stands."""

    winner: str
    member: str
    member_run: int
    strategy: str
    presenter: int | None = None
    votes: dict[str, int] = {}
    reason: str = ""


class RoundAnswered(Body, frozen=True, tag="round.answered"):
    """The run ends its round `round` with an answer, called `label`; `file` has the whole where `text` was cut, and
    `snapshot` is a copy of its files as they are then."""

    round: int
    label: str
    call_id: str
    text: str
    file: str = ""
    snapshot: str = ""


class RoundEvaluated(Body, frozen=True, tag="round.evaluated"):
    """The evaluator, run `evaluator_run`, has ended with `status`, and round `round` begins. Its `basis` are the
    evaluator's `tasks`, its `packet` alone, or the run's own checklist. `problems` say what was wrong with its files;
    `evaluator_run` is None if it could not be started."""

    round: int
    basis: Basis
    evaluator_run: int | None = None
    status: str = ""
    packet: str = ""
    tasks: dict[str, Any] | None = None
    problems: tuple[str, ...] = ()


class ChecklistAccepted(Body, frozen=True, tag="round.checked"):
    """The run has scored its newest answer by the criteria; those `below` are not met. `iterate` asks for another
    answer."""

    round: int
    call_id: str
    verdict: Verdict
    scores: dict[str, float]
    below: tuple[str, ...] = ()


class ImprovementsProposed(Body, frozen=True, tag="round.proposed"):
    """The run proposes improvements for its next answer. Each has a `description` and an `impact`."""

    round: int
    call_id: str
    improvements: tuple[dict[str, Any], ...]


class RoundVoted(Body, frozen=True, tag="round.voted"):
    """The run decides for its answer `choice`, and ends."""

    call_id: str
    choice: str
    reason: str = ""


class Unknown:
    """A kind this version does not know; `fields` has everything the line said. No dataclass: the encoder would not
    leave it to our hook."""

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


class Event(msgspec.Struct, frozen=True, gc=False):
    """One fact about one run, in its place in the tree's order."""

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
    `dropped` where a watcher was too slow for `dropped` of them. `turn` is the turn of the reply that a text belongs
    to, `offset` the number of characters of that text before it. `call_id` is the call whose output it is."""

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


class _Envelope(msgspec.Struct, frozen=True, gc=False):
    seq: int
    tree: str
    run: int
    path: str
    agent: str
    at: float
    kind: str


def _encode_foreign(value: object) -> object:
    """Encode what the encoder does not know: a body of an unknown kind, or a value of a host or provider, by its
    text."""
    return {"kind": value.kind, **value.fields} if isinstance(value, Unknown) else str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_foreign)
_ENVELOPE = msgspec.json.Decoder(_Envelope)
_BODIES = {kind: msgspec.json.Decoder(cls) for kind, cls in KINDS.items()}
_ENVELOPE_FIELDS = frozenset(_Envelope.__struct_fields__)
_BODY = b',"body":{'  # never inside a text, where quotes are escaped


def encode_event(event: Event) -> bytes:
    """Encode an event as one line of JSON, without the newline: the envelope's fields, then the body's own."""
    return make_line(_encode_stored(event))


def encode_events(events: Sequence[Event]) -> bytes:
    """Encode events as lines, each with its newline."""
    return b"".join([make_line(line) + b"\n" for line in encode_stored_events(events).split(b"\n")])


def encode_stored_events(events: Sequence[Event]) -> bytes:
    """Encode events as the log keeps them: a line each, with the body in one piece, which is six times as fast."""
    try:
        return _ENCODER.encode_lines(events)[:-1]
    except Exception:  # noqa: BLE001 - one of them is not as it should be; the others must not suffer
        return b"\n".join(map(_encode_stored, events))


def make_line(kept: bytes) -> bytes:
    """Return the line of an event as `encode_event` makes it, from what the log keeps."""
    head, _, body = kept.partition(_BODY)
    return b"%b,%b" % (head, body[:-1])


def _encode_stored(event: Event) -> bytes:
    """Never fails: half a character becomes a replacement mark, a body that is no JSON at all a `gap` that says so."""
    try:
        try:
            return _ENCODER.encode(event)
        except UnicodeEncodeError:
            body = event.body
            fields = body.fields if isinstance(body, Unknown) else msgspec.structs.asdict(body)
            return _ENCODER.encode(
                replace_half_characters({**msgspec.structs.asdict(event), "body": {"kind": body.kind, **fields}})
            )
    except Exception as error:  # noqa: BLE001 - values of hosts and providers; the order must not lose its place
        gap = Gap(1, f"an event of kind {event.kind} could not be written: {type(error).__name__}")
        path, agent = replace_half_characters(event.path), replace_half_characters(event.agent)
        return _ENCODER.encode(msgspec.structs.replace(event, path=path, agent=agent, body=gap))


def replace_half_characters(value: Any) -> Any:
    """Return the value with every half of a character pair in it replaced."""
    return map_texts(value, lambda text: text.encode("utf-8", "replace").decode())


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_texts(key, change): map_texts(inner, change) for key, inner in value.items()}
    return [map_texts(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def decode_raw(value: msgspec.Raw | Any) -> Any:
    """Return the value of a field that is kept as the JSON it came as (`profile` and `tools` of `run.spawned`)."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def decode_event(line: bytes) -> Event:
    """Decode the event of one line; raises `msgspec.MsgspecError` for what is not one."""
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
    return Event(head.seq, head.tree, head.run, head.path, head.agent, head.at, body)


def decode_event_or_gap(line: bytes) -> Event:
    """Decode the event of one line, or return a gap in its place if only its body cannot be decoded."""
    try:
        return decode_event(line)
    except msgspec.MsgspecError:
        head = _ENVELOPE.decode(line)
        gap = Gap(1, f"an event of kind {head.kind} cannot be read")
        return Event(head.seq, head.tree, head.run, head.path, head.agent, head.at, gap)
