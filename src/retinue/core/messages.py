"""The port of models, and its values: the thread of one run, requests to a model and its replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from retinue.core.limits import OUTPUT_TOKENS
from retinue.core.usage import NO_USAGE, Usage


class RunRef(msgspec.Struct, frozen=True, gc=False):
    """The names of one run; made by the supervisor, and read from the log."""

    tree: str
    run: int
    path: str
    label: str
    agent: str
    subagent_id: str

    @property
    def name(self) -> str:
        """The run as `TREE/N`."""
        return f"{self.tree}/{self.run}"


class Call(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One tool call a model asks for, complete. A call with a `problem` never runs: the model reads the problem.
    One that a program made names the call of that program in `within`."""

    id: str
    name: str
    args: dict[str, Any]
    problem: str = ""
    within: str = ""


class Thought(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A thinking block, kept with what the provider `origin` needs to read it again: its signature and its own id.

    The first one of a reply has its `layout`, if that is not the usual one (models/providers.py): a signature
    is valid for a thought in its place only."""

    text: str
    type: str = ""
    signature: str = ""
    id: str = ""
    origin: str = ""
    layout: str = ""


class Native(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A call that ran at the provider while it answered. `result` is for people; `content` is what the provider
    `origin` needs to read its own result again."""

    id: str
    name: str
    args: dict[str, Any]
    result: str
    success: bool = True
    content: Any = None
    origin: str = ""


ASKER = "asker"  # the source of words of the side that asked for the run
TASK = "task"
USER_WORDS = ("user", ASKER)  # sources of words that begin a new answer
REMINDER = "reminder"  # the source of words by which the loop asks once for a missing answer


NOTICE = "notice"
INTERRUPTED_TURN = "The user interrupted you here."


class UserTurn(msgspec.Struct, frozen=True, gc=False, tag="user"):
    """Text for the model: the task, a steer, a notice. `source` says whose words these are: `task`, `user`, `asker`,
    `notice`, or `reminder` for the loop's own."""

    text: str
    source: str = "task"


class AssistantTurn(msgspec.Struct, frozen=True, gc=False, tag="assistant"):
    """One complete reply of the model."""

    text: str
    calls: tuple[Call, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    natives: tuple[Native, ...] = ()


class ToolTurn(msgspec.Struct, frozen=True, gc=False, tag="tool"):
    """The result of one tool call."""

    call_id: str
    name: str
    text: str
    success: bool = True


Turn = UserTurn | AssistantTurn | ToolTurn


USERS_OWN = "user"


class ToolSpec(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tool as a model sees it, and what the supervisor has to know of it.

    `tier` is `observe` (never asks), `confirm` (asks), `none` (a call that cannot work, so nothing will run), `user`
    (the user's own command, about which nobody is asked) or `provider` (runs at the model's provider, with `schema` for
    its settings: nobody here is asked or runs it). `repeatable` says that running it twice does no harm. `waits` marks
    the tools that only wait for children: while one runs, the run gives its slot back. `spawns` marks those that start
    runs of the profiles that the user made available: only mode `strict` or a rule asks about them. `host` marks what a
    host-side function asks about: no tool of the model's. `server` is the MCP server a tool comes from, `seal` stands
    for what that server says of it, `output` is the JSON schema of its structured content. Of `exclusive` tools a reply
    may call one, once; such a call may end the run."""

    name: str
    description: str
    schema: dict[str, Any]
    tier: str = "confirm"
    display_name: str = ""
    repeatable: bool = False
    waits: bool = False
    spawns: bool = False
    host: bool = False
    server: str = ""
    output: dict[str, Any] = {}
    seal: str = ""
    exclusive: bool = False


class CallAgain(Protocol):
    """A function that a model awaits before it makes a call once more, with what its attempts have spent so far.
    `estimated` says that a provider did not report a part of that. Raises Limited if the budget does not allow it."""

    async def __call__(self, spent: Usage, *, estimated: bool = False) -> None: ...


class Request(msgspec.Struct, frozen=True, gc=False):
    """One model call: who asks, in which turn, with which thread and tools. A reply is never longer than
    `max_output_tokens`: budgets count on it. `attempt` is how often the provider has answered it with an error.
    Whoever makes the call once more awaits `again` with what it has spent so far: Limited when nothing is left."""

    ref: RunRef
    turn: int
    model: str
    system: str
    thread: list[Turn]
    tools: tuple[ToolSpec, ...]
    max_output_tokens: int = OUTPUT_TOKENS
    attempt: int = 0
    again: CallAgain | None = None

    @property
    def key(self) -> str:
        """The same for a call that is made again because no answer was seen: where the provider knows such keys, it
        has one effect."""
        return f"retinue-{self.ref.tree}-{self.ref.run}-{self.turn}-{self.attempt}"


OnDelta = Callable[[str, str], None]


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The whole answer of one model call. `refused` says the text is a refusal, `estimated` that the provider did not
    report the usage, which is an estimate. Input or output tokens of zero count as not reported and are estimated,
    unless the usage is `counted`: right as it is, as for a reply from a cache."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    usage: Usage = NO_USAGE
    refused: bool = False
    natives: tuple[Native, ...] = ()
    estimated: bool = False
    counted: bool = False


class Model(Protocol):
    """Answers one request. `on_delta(kind, text)` shows text as it arrives; it never blocks. The kind is `text`,
    `thinking`, or `retry`: words for a person, when the provider failed and will be asked again.

    A `name` attribute is the model's name in the log and for prices, instead of the name of the class."""

    async def complete(self, request: Request, on_delta: OnDelta, /) -> Reply: ...


def join_replies(thread: list[Turn]) -> str:
    """Return the answer of a run: all its replies without tool calls since the user's last words, in order."""
    texts: list[str] = []
    for turn in thread:
        if type(turn) is AssistantTurn:
            if turn.text and not turn.calls:
                texts.append(turn.text)
        elif type(turn) is UserTurn and (turn.source == TASK or turn.source in USER_WORDS):
            texts.clear()
    return "\n\n".join(texts)


def last_text(thread: list[Turn]) -> str | None:
    """Return the newest assistant message that has text; None when there is none."""
    for turn in reversed(thread):
        if isinstance(turn, AssistantTurn) and turn.text:
            return turn.text
    return None
