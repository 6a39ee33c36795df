"""Profiles (agents) and tasks, as plain values. Other packages decide how they run."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypedDict, get_args, overload

import msgspec

from retinue.core.caller import ClientRequest
from retinue.core.errors import ConfigError
from retinue.core.limits import Limits
from retinue.core.messages import Model, ToolSpec
from retinue.core.network import parse_hosts
from retinue.core.remote_agents import A2aAgent
from retinue.core.results import OutputT_co
from retinue.core.rounds import Rounds
from retinue.core.rules import CODE_MODE, Rules
from retinue.core.sendable import repair_text
from retinue.core.teams import MAX_NEW_ANSWERS, MEMBERS_MAX, STRATEGIES, Member, Strategy

if TYPE_CHECKING:
    from types import UnionType
    from typing import Unpack, _SpecialForm

RuntimeName = Literal["inherited", "isolated", "container", "delegated"]
WorkspaceName = Literal["scratch", "shared", "copy", "worktree"]
RUNTIMES: tuple[RuntimeName, ...] = get_args(RuntimeName)  # the laxest first
DEFAULT_RUNTIME: RuntimeName = "isolated"  # of runs that a command starts
WORKSPACES: tuple[WorkspaceName, ...] = get_args(WorkspaceName)
COPIES: tuple[WorkspaceName, ...] = ("copy", "worktree")  # a command applies their changes to the project
LOCAL_TOOLS = ("read", "write", "edit", "glob", "grep", "shell", CODE_MODE)
WEB_TOOLS = ("web_fetch", "web_search")
SPAWN_TOOLS = (
    "spawn_subagents", "spawn_agent", "list_agents", "get_agent", "apply_subagent", "list_subagents",
    "continue_subagent", "send_message_to_subagent", "custom_tool__get_background_tool_status",
    "custom_tool__get_background_tool_result",
    "custom_tool__wait_for_background_tool", "custom_tool__cancel_background_tool",
    "custom_tool__list_background_tools",
)  # fmt: skip
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$(?!\n)"  # in Python and in a JSON schema
_NAME = re.compile(NAME_PATTERN)


def explain_useless_fallback(fallback: RuntimeName, runtimes: Sequence[RuntimeName]) -> str:
    """Return why a fallback can never take effect for runs with these runtimes; empty if it can."""
    strictest = max(runtimes, key=RUNTIMES.index)
    if RUNTIMES.index(fallback) < RUNTIMES.index(strictest):
        return ""
    if strictest == "inherited":
        return "it has no effect with runtime 'inherited', which needs no sandbox: leave it out"
    laxer = ", ".join(RUNTIMES[: RUNTIMES.index(strictest)])
    return (
        f"'{fallback}' is not laxer than the runtime '{strictest}', so it has no effect: use {laxer}, or leave it out"
    )


def check_name(name: object, *, what: str = "profile name") -> str:
    """Return `name` if it is valid in paths, headers and tool names; else raise ConfigError."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(
            f"{what} {name!r} must be 1 to 64 letters, digits, '-' or '_', and start with a letter or digit"
        )
    return name


HOOKS = ("before_tool", "after_tool")


class ToolHooks(Protocol):
    """Code of a program that runs around each approved tool call of a run."""

    async def before_tool(self, name: str, args: Mapping[str, Any], /) -> str | None:
        """Return None to let the call run, or a text that the model gets instead. An exception also refuses the
        call."""

    async def after_tool(self, name: str, args: Mapping[str, Any], text: str, success: bool, /) -> None:
        """Receive the result of the call. An exception is logged and changes nothing."""


class ToolFunction(Protocol):
    """A Python function turned into a tool by `@tool`."""

    @property
    def spec(self) -> ToolSpec: ...

    async def run(self, args: dict[str, Any], context: Any, /) -> Any: ...


class ProfileFields(TypedDict, total=False):
    """The fields of a Profile except its name, instructions and output, for type checkers."""

    model: str | Model | None
    tools: Sequence[str | ToolFunction | Profile] | None
    limits: Limits
    runtime: RuntimeName | None
    workspace: WorkspaceName | None
    call: Callable[[str, Any], Any] | None
    description: str
    expected_input: Sequence[str]
    skills: Sequence[str]
    leaf: bool
    nickname: str | None
    source: str
    approvals: Rules | None
    network: Sequence[str] | None
    wants: Sequence[str]
    hooks: ToolHooks | None
    a2a: A2aAgent | None
    subagent_agents: Sequence[Member]


@dataclass(frozen=True, eq=False)
class Profile(Generic[OutputT_co]):
    """An agent: its name, instructions, model, tools, limits and more. Runs of a `Profile[Finding]` return a
    `Finding`; a profile without an output type is a `Profile[str]`.

    `tools` are names, functions made by `@tool`, or other profiles (each offered as `subagent_{name}`); None means the
    parent's tools. `output` is a type or a JSON schema for the answer, given through `final_answer`. `call` makes
    `async fn(task, ctx)` the agent instead of a model. `approvals` are rules for its runs and all runs below them, in
    addition to inherited rules: they make approval stricter, never laxer. `runtime` is the runtime of its runs, at
    least as strict as the parent's; None means the mode chosen for all runs. `network` is the part of the parent's
    network that its runs may reach: hosts, "none" or "full"; None means all of it. `wants` are tools it works better
    with: a run that gets none of them says so. `hooks` are called before and after each of its tool calls, but not
    those of its subagents; the log does not store them. `a2a` makes it a remote agent: its runs are tasks of that
    agent, with the agent's own model and tools. `subagent_agents` are the members of each subagent that its runs
    spawn, if teams are enabled."""

    name: str
    instructions: str = ""
    _: KW_ONLY
    model: str | Model | None = None
    tools: Sequence[str | ToolFunction | Profile] | None = None
    output: Any = None
    limits: Limits = field(default_factory=Limits)
    runtime: RuntimeName | None = None
    workspace: WorkspaceName | None = None
    call: Callable[[str, Any], Any] | None = None
    description: str = ""
    expected_input: Sequence[str] = ()
    skills: Sequence[str] = ()
    leaf: bool = False
    nickname: str | None = None
    source: str = "python"
    approvals: Rules | None = None
    network: Sequence[str] | None = None
    wants: Sequence[str] = ()
    hooks: ToolHooks | None = None
    a2a: A2aAgent | None = None
    subagent_agents: Sequence[Member] = ()

    @property
    def has_model(self) -> bool:
        """Return True if its runs ask a model of ours."""
        return self.call is None and self.a2a is None

    if TYPE_CHECKING:  # for type checkers, which infer the output type; the dataclass makes the constructor

        @overload
        def __init__(
            self: Profile[str],
            name: str,
            instructions: str = "",
            *,
            output: None = None,
            **fields: Unpack[ProfileFields],
        ) -> None: ...
        @overload
        def __init__(
            self, name: str, instructions: str = "", *, output: type[OutputT_co], **fields: Unpack[ProfileFields]
        ) -> None: ...
        @overload
        def __init__(
            self: Profile[Any],
            name: str,
            instructions: str = "",
            *,
            output: Mapping[str, Any] | UnionType | _SpecialForm,
            **fields: Unpack[ProfileFields],
        ) -> None: ...
        def __init__(self, name: str, instructions: str = "", *, output: Any = None, **fields: Any) -> None: ...

    def __post_init__(self) -> None:
        check_name(self.name)
        parse_hosts(self.network or ())
        for what, value, known in (("runtime", self.runtime, RUNTIMES), ("workspace", self.workspace, WORKSPACES)):
            if value is not None and value not in known:
                raise ConfigError(f"profile {self.name!r}: unknown {what} {value!r}; available: {', '.join(known)}")
        if len(self.subagent_agents) > MEMBERS_MAX:
            count = len(self.subagent_agents)
            raise ConfigError(f"profile {self.name!r} has {count} subagent_agents; the maximum is {MEMBERS_MAX}")
        for method in HOOKS if self.hooks is not None else ():
            if not inspect.iscoroutinefunction(getattr(self.hooks, method, None)):
                kind = type(self.hooks).__name__
                raise ConfigError(f"profile {self.name!r}: the hooks {kind} have no `async def {method}`")


@dataclass(frozen=True, eq=False)
class Team(Profile[str]):
    """Several agents behind one name. The members work on the same task, each in its own workspace, and their answers
    become one. A team can be used wherever a profile can.

    A member is a profile, the name of a model, or a `Member`. The team's instructions, tools, runtime, workspace,
    network and hooks apply to all members that do not set them, and so do its `turns` and `stall` limits; its other
    limits are for all members together. `strategy` is how the final answer is made: `synthesize` combines all answers,
    `winner_present` has the winner of the vote present its own, `winner_reuse` takes the winner's answer as it stands.
    With `refine` the members see each other's answers, give up to `max_new_answers` each, and continue until all have
    voted."""

    members: Sequence[Member | Profile | str] = ()
    strategy: Strategy | None = None
    refine: bool = False
    max_new_answers: int = MAX_NEW_ANSWERS

    if TYPE_CHECKING:

        def __init__(
            self,
            name: str,
            instructions: str = "",
            *,
            members: Sequence[Member | Profile | str],
            strategy: Strategy | None = None,
            refine: bool = False,
            max_new_answers: int = MAX_NEW_ANSWERS,
            **fields: Unpack[ProfileFields],
        ) -> None: ...

    @property
    def has_model(self) -> bool:
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= len(self.members) <= MEMBERS_MAX:
            raise ConfigError(f"team {self.name!r} must have 2 to {MEMBERS_MAX} members, has {len(self.members)}")
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ConfigError(
                f"team {self.name!r}: unknown strategy {self.strategy!r}; available: {', '.join(STRATEGIES)}"
            )
        if self.max_new_answers < 1:
            raise ConfigError(f"team {self.name!r}: max_new_answers must be at least 1, is {self.max_new_answers}")
        if self.output is not None or self.call is not None or self.a2a is not None:
            raise ConfigError(f"team {self.name!r} answers in text: it can have no output type, call or a2a")
        for member in self.members:
            if isinstance(member, Profile) and (not member.has_model or member.output is not None):
                raise ConfigError(
                    f"team {self.name!r}: '{member.name}' cannot be its member: that needs a model and no output type"
                )


def make_team(
    profile: Profile, members: Sequence[Member], *, strategy: Strategy | None, refine: bool, max_new_answers: int
) -> Team:
    """Return a team with the fields of `profile` and these members."""
    given = {each.name: getattr(profile, each.name) for each in dataclasses.fields(Profile)}
    return Team(**given, members=members, strategy=strategy, refine=refine, max_new_answers=max_new_answers)


class Task(msgspec.Struct, frozen=True, gc=False):
    """A task for an agent.

    `context` goes into the system prompt. `context_paths` are readable, never writable. `files` are copied into the
    workspace before the run begins. `request` is the request of the client that gave the task. A `conversation` does
    not end with its answer: its run waits for the next message until the conversation is ended. With `refine` the
    members of a team continue until all have voted. With `rounds` a primary answers several times."""

    text: str
    context: str = ""
    context_paths: Sequence[str] = ()
    include_parent_workspace: bool = True
    include_temp_workspace: bool = True
    subagent_id: str | None = None
    label: str | None = None
    model: str | None = None
    timeout_seconds: float | None = None
    files: Sequence[str] = ()
    request: ClientRequest | None = None
    conversation: bool = False
    refine: bool = False
    rounds: Rounds | None = None

    def __post_init__(self) -> None:
        if self.subagent_id or self.label or not (self.text.isascii() and self.context.isascii()):
            for name in ("text", "context", "subagent_id", "label"):
                text = getattr(self, name)
                if isinstance(text, str):
                    msgspec.structs.force_setattr(self, name, repair_text(text))
        if self.timeout_seconds is not None and self.timeout_seconds != self.timeout_seconds:
            raise ConfigError("timeout_seconds must be a number, got nan")
