"""The port of models and its values: the thread of one run, requests to a model, and replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from retinue.core.limits import OUTPUT_TOKENS
from retinue.core.usage import NO_USAGE, Usage


class RunRef(msgspec.Struct, frozen=True, gc=False):
    """The names of one run, as created by the supervisor or read from the log."""

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
    """One complete tool call of a model. A call with a `problem` never runs: the model reads the problem instead. A
    call made by a program names the call of the program in `within`."""

    id: str
    name: str
    args: dict[str, Any]
    problem: str = ""
    within: str = ""


class Thought(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A thinking block, with the signature and id for the provider `origin` to read it again.

    The first thought of a reply has the reply's `layout`, unless it is the usual layout (models/providers.py): a
    signature is valid only for a thought in its place."""

    text: str
    type: str = ""
    signature: str = ""
    id: str = ""
    origin: str = ""
    layout: str = ""


class ProviderToolCall(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tool call that ran at the provider during its answer. `result` is for people. `content` is the same in the
    provider's own format, for the provider `origin` to read again."""

    id: str
    name: str
    args: dict[str, Any]
    result: str
    success: bool = True
    content: Any = None
    origin: str = ""


ASKER = "asker"  # the source of messages from the side that asked for the run
TASK = "task"
USER_WORDS = ("user", ASKER)  # sources of messages that begin a new answer
REMINDER = "reminder"  # the source of the message in which the loop asks once for a missing answer


NOTICE = "notice"  # the source of messages from the supervisor itself
INTERRUPTED_TURN = "The user interrupted you here."


class UserTurn(msgspec.Struct, frozen=True, gc=False, tag="user"):
    """Text for the model: the task, a steering message, a notice. `source` says where the text comes from: `task`,
    `user`, `asker`, `notice`, or `reminder` for the loop itself."""

    text: str
    source: str = "task"


class AssistantTurn(msgspec.Struct, frozen=True, gc=False, tag="assistant"):
    """One complete reply of the model."""

    text: str
    calls: tuple[Call, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    natives: tuple[ProviderToolCall, ...] = ()


class ToolTurn(msgspec.Struct, frozen=True, gc=False, tag="tool"):
    """The result of one tool call."""

    call_id: str
    name: str
    text: str
    success: bool = True


Turn = UserTurn | AssistantTurn | ToolTurn


# Tiers of calls that no policy judges: of the user, and without a tool to run.
USERS_OWN = "user"
NOTHING_TO_RUN = "none"
# Tiers of calls whose answers never come from an allow rule.
QUESTION = "question"
FOREIGN = "foreign"


class ToolSpec(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A tool as a model sees it, with the properties needed by the supervisor.

    `tier` is `observe` (never asks), `confirm` (asks), `none` (a call that cannot work, so nothing will run), `user`
    (the user's own command, which needs no approval), `question` (only a person can answer it, whatever the rules and
    the mode say), `provider` (runs at the model's provider, with its settings in `schema`; nothing is asked or run
    here) or `foreign` (runs at a peer that asks here: it is another tool than ours of the same name, so no rule
    allows it). `repeatable` means running the tool twice does no harm. `waits` marks tools that only wait for
    children: meanwhile the run gives its slot back. `spawns` marks tools that start runs of the profiles the user
    made available: only mode `strict` or a rule asks about them. `host` marks a question of a host-side function,
    which is not a tool of the model. `server` is the MCP server of the tool, `seal` a digest of the server's
    description, and `output` the JSON schema of its structured content. A reply may contain only a single call of an
    `exclusive` tool; such a call may end the run."""

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


class BeforeRetry(Protocol):
    """A function that a model awaits before retrying a call. `spent` is the usage of all attempts so far; `estimated`
    means a provider did not report a part. Raises Limited if the budget does not allow a retry."""

    async def __call__(self, spent: Usage, *, estimated: bool = False) -> None: ...


class SystemPrompt(msgspec.Struct, frozen=True, gc=False):
    """The system prompt of a run. `folders` is its last paragraph, about the folders of the run, or empty: they belong
    to one machine and one tree, so a recording leaves them out."""

    text: str
    folders: str = ""


class Request(msgspec.Struct, frozen=True, gc=False):
    """A model call: the run, its turn, thread and tools. A reply is never longer than `max_output_tokens`; budgets
    rely on this limit. `attempt` is the number of errors received from the provider so far. Before a retry, `again` is
    awaited with the usage so far; it raises Limited if nothing is left. `folders` is the paragraph at the end of
    `system` that a recording leaves out (see SystemPrompt)."""

    ref: RunRef
    turn: int
    model: str
    system: str
    thread: list[Turn]
    tools: tuple[ToolSpec, ...]
    max_output_tokens: int = OUTPUT_TOKENS
    attempt: int = 0
    again: BeforeRetry | None = None
    folders: str = ""

    @property
    def key(self) -> str:
        """The idempotency key: the same for a call that is repeated because no answer was seen. A provider that
        supports such keys runs the call only once."""
        return f"retinue-{self.ref.tree}-{self.ref.run}-{self.turn}-{self.attempt}"


OnDelta = Callable[[str, str], None]


class Reply(msgspec.Struct, frozen=True, gc=False):
    """The whole answer of one model call. `refused` means the text is a refusal. `estimated` means the provider did
    not report the usage. Zero input or output tokens count as not reported and are estimated, unless the usage is
    `counted`: correct as it is, as for a reply from a cache."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    thoughts: tuple[Thought, ...] = ()
    usage: Usage = NO_USAGE
    refused: bool = False
    natives: tuple[ProviderToolCall, ...] = ()
    estimated: bool = False
    counted: bool = False


class Model(Protocol):
    """A model that answers requests. `on_delta(kind, text)` shows text as it arrives and never blocks. The kind is
    `text`, `thinking`, or `retry`: a message for a person when the provider failed and will be asked again.

    A model may have three more attributes, which only the functions below read:
    - `name`: its name in the log and for prices, instead of the class name.
    - `can_search_web(*, domains: bool) -> bool`: True if the model searches the web by itself; with `domains`, if it
      can restrict the search to given hosts.
    - `async aclose()`: closes its connections. The next call opens new ones."""

    async def complete(self, request: Request, on_delta: OnDelta, /) -> Reply: ...


def get_model_name(model: Model) -> str:
    """Return the name of a model: its `name`, or else the name of its class."""
    name: str = getattr(model, "name", type(model).__name__)
    return name


def can_search_web(model: Model, *, domains: bool) -> bool:
    """Return True if a model searches the web by itself; with `domains`, if it can restrict the search to given
    hosts."""
    ask = getattr(model, "can_search_web", None)
    return ask is not None and bool(ask(domains=domains))


async def close_model(model: Model) -> None:
    """Close the connections of a model, if it has any."""
    close = getattr(model, "aclose", None)
    if close is not None:
        await close()


def join_replies(thread: list[Turn]) -> str:
    """Return the answer of a run: all replies without tool calls since the user's last message, in order."""
    texts: list[str] = []
    for turn in reversed(thread):
        if type(turn) is AssistantTurn:
            if turn.text and not turn.calls:
                texts.append(turn.text)
        elif type(turn) is UserTurn and (turn.source == TASK or turn.source in USER_WORDS):
            break
    return "\n\n".join(reversed(texts)) if len(texts) > 1 else "".join(texts)


def find_last_text(thread: list[Turn]) -> str:
    """Return the text of the newest assistant message that has text; empty if there is none."""
    return next((turn.text for turn in reversed(thread) if isinstance(turn, AssistantTurn) and turn.text), "")
