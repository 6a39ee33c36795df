"""Subagents as tools of a program: a config, a tool made of it, a factory for what tools share, one result.

Thin: a config becomes a Profile, a call becomes one spawn by the supervisor, a result is ours in fewer fields. Inside a
run the subagent is that run's child. Outside any, it is the child of a client: run 0 of a tree, which does nothing but
stand for the caller, so that depth, slots and cancelling are the supervisor's there too.

    async with SubagentFactory(model="scripted:script.yaml", tools=["read", "grep"]) as factory:
        tool = factory.create(SubagentConfig("researcher").with_max_turns(10))
        outcome = await tool.execute(None, {"task": "find it"})
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Unpack

import msgspec
from msgspec import UNSET, UnsetType

from retinue.concurrency import TaskOwner
from retinue.core import events
from retinue.core.approvals import check_approver
from retinue.core.context import CURRENT, METADATA_MAX_SUBAGENT_DEPTH, METADATA_SUBAGENT_DEPTH, Context
from retinue.core.control import ClientHandle, ClientOptions, RunHandle, SpawnBelow
from retinue.core.errors import ConfigError, NoSlot, RetinueError, SpawnRefused, ToolError
from retinue.core.events import Event, ToolCall
from retinue.core.limits import Limits
from retinue.core.messages import Model, Turn
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.core.results import ToolLog as ToolCallLog
from retinue.core.usage import Usage
from retinue.log.runs import Runs, RunView
from retinue.log.summaries import describe_call
from retinue.log.threads import Thread
from retinue.surfaces import library
from retinue.surfaces.library import OpenOptions, Retinue
from retinue.tools import subagents

__all__ = [
    "METADATA_MAX_SUBAGENT_DEPTH",
    "METADATA_SUBAGENT_DEPTH",
    "AgentHooks",
    "EventStore",
    "MessageStore",
    "StateStore",
    "StoreFactories",
    "SubagentConfig",
    "SubagentFactory",
    "SubagentProgress",
    "SubagentResult",
    "SubagentTool",
    "ThreadState",
    "ToolCallLog",
    "ToolResult",
]

Folder = Callable[[], str | Path | None]
_NO_DEADLINE = Limits(seconds=None)

_log = logging.getLogger("retinue.subagent")
_log.addHandler(logging.NullHandler())


def in_memory() -> None:
    """Return the folder of a log that keeps no file. Another function names the folder that keeps the log."""


class ThreadState(msgspec.Struct, frozen=True):
    """The state of a thread after a turn. `status` is None until its run has ended."""

    turn: int
    usage: Usage
    status: str | None


class MessageStore(Protocol):
    """Takes the conversation of a thread, message by message."""

    async def append(self, thread_id: str, message: Turn) -> None: ...


class StateStore(Protocol):
    """Takes the state of a thread after each turn."""

    async def save(self, thread_id: str, state: ThreadState) -> None: ...


class EventStore(Protocol):
    """Takes the events of a subagent in its own thread, and its progress in the thread of its parent."""

    async def append(self, thread_id: str, event: Event | SubagentProgress) -> None: ...


@dataclass(frozen=True)
class StoreFactories:
    """The stores of each run, made anew for every run, inside another run too. The log is kept beside them."""

    message: Callable[[], MessageStore] | None = None
    state: Callable[[], StateStore] | None = None
    event: Callable[[], EventStore] | None = None


NO_STORES = StoreFactories()


@dataclass(frozen=True)
class SubagentConfig:
    """The configuration of a subagent. Without `max_turns` it has 100, without `timeout_ms` all the time it wants."""

    name: str
    _: KW_ONLY
    nickname: str | None = None
    system_prompt: str = ""
    max_turns: int | None = None
    timeout_ms: int | None = None
    model: str | None = None

    def with_system_prompt(self, prompt: str) -> SubagentConfig:
        return replace(self, system_prompt=prompt)

    def with_max_turns(self, turns: int) -> SubagentConfig:
        return replace(self, max_turns=turns)

    def with_timeout_ms(self, timeout: int) -> SubagentConfig:
        return replace(self, timeout_ms=timeout)

    def with_model(self, model: str) -> SubagentConfig:
        return replace(self, model=model)

    def with_nickname(self, nickname: str) -> SubagentConfig:
        return replace(self, nickname=nickname)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values; `model` only when there is one."""
        fields = asdict(self)
        if self.model is None:
            del fields["model"]
        return fields

    def profile(self, *, model: str | Model | None = None, tools: Sequence[Any] | None = ()) -> Profile[str]:
        """Return the profile this config stands for; its own model wins over `model`."""
        seconds = None if self.timeout_ms is None else self.timeout_ms / 1000
        return Profile(
            self.name,
            self.system_prompt,
            model=self.model or model,
            tools=tools,
            limits=Limits(turns=UNSET if self.max_turns is None else self.max_turns, seconds=seconds),
            nickname=self.nickname,
        )


class SubagentResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one subagent. `failed_tool` is there for old readers and never filled: an error of the model or the
    transport does not say which tool failed."""

    name: str
    final_response: str
    total_turns: int
    tool_count: int
    tool_logs: tuple[ToolCallLog, ...]
    usage: Usage
    success: bool
    duration_ms: int
    error_details: str | None = None
    failed_tool: str | None = None

    @classmethod
    def of(cls, result: Result[Any]) -> SubagentResult:
        return cls(**{name: getattr(result, name) for name in cls.__struct_fields__ if name != "failed_tool"})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values, the last two only when they say something."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return fields


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a call for its parent: `output` for its model, `data` (a SubagentResult as JSON) for programs."""

    success: bool
    output: str
    data: dict[str, Any] | None
    duration_ms: int


class SubagentProgress(msgspec.Struct, frozen=True):
    """The state of a subagent at the start (`completed` False) or end of one tool call.

    `child_thread_id` is the run as `TREE/N`, `child_root_task_id` the primary above it; `subagent_task_id` is for
    runs that are tasks of another system, which a local one is not."""

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


class Progress:
    """The fold of a tree's events into progress of one run, or without `run` of all its subagents: one value when a
    tool starts, one when it ends. The primary is nobody's subagent. Stands on the fold of runs, so its counts are those
    of the result."""

    def __init__(self, tree: str, *, run: int | None = None) -> None:
        self._run = run
        self.runs = Runs(tree)

    def apply(self, event: Event) -> SubagentProgress | None:
        """Fold one event; return the progress it means, if any."""
        if event.run == 0 or (self._run is not None and event.run != self._run):
            return None
        body = event.body
        run = self.runs.runs.get(event.run)
        is_live = run is not None and run.ended is None
        self.runs.apply(event)
        if run is None or not is_live:
            return None
        match body:
            case ToolCall(name=name, args=args):
                return self._make_progress(run, name, describe_call(name, args), success=None)
            case events.ToolResult(name=name, success=success):
                return self._make_progress(run, name, run.tool_logs[-1].context, success=success)
        return None

    def _make_progress(self, run: RunView, tool: str, about: str, *, success: bool | None) -> SubagentProgress:
        profile = events.decode_raw(run.spawned.profile)
        nickname, turns = profile.get("nickname"), (profile.get("limits") or {}).get("turns")
        told = run.describe_progress(
            self.runs.tree,
            tool,
            about,
            nickname=nickname if isinstance(nickname, str) else None,
            max_turns=turns if isinstance(turns, int) else None,
            success=success,
        )
        return SubagentProgress(**msgspec.structs.asdict(told))


class AgentHooks:
    """Code around what a subagent does; override what you need. `before_tool` and `after_tool` are those of
    `Profile.hooks`; `on_progress` hears of each tool call as it starts and ends."""

    async def before_tool(self, name: str, args: Mapping[str, Any]) -> str | None:
        return None

    async def after_tool(self, name: str, args: Mapping[str, Any], text: str, success: bool) -> None:
        pass

    def on_progress(self, progress: SubagentProgress) -> Any:
        pass


Hooks = Callable[[SubagentProgress], Any] | AgentHooks


def _check_hooks(hooks: Hooks | None) -> None:
    """Raise ConfigError for hooks that would never be called: other objects than AgentHooks and functions, and a
    function for the progress that is async."""
    told = hooks.on_progress if isinstance(hooks, AgentHooks) else hooks
    if told is not None and not callable(told):
        raise ConfigError(f"the hooks {type(hooks).__name__} are neither a function nor AgentHooks: derive from that")
    if inspect.iscoroutinefunction(told):
        raise ConfigError("the function that gets the progress is async, so it would never run: write `def`")


class SubagentTool:
    """One subagent as a tool. In a profile's tools put `tool.profile`; anywhere else call `execute`.

    Without `retinue`, calls from outside a run have a Retinue of their own each, opened with `options` (as
    `retinue.open` takes them) and the folder that `folder` gives. Inside a run its tree's log is used. `hooks` is a
    function that gets the progress, or AgentHooks. Each run gets a message, a state and an event store of its own from
    the factories that are given."""

    tier: str = "confirm"

    def __init__(
        self,
        config: SubagentConfig,
        /,
        *,
        model: str | Model | None = None,
        tools: Sequence[Any] | None = (),
        hooks: Hooks | None = None,
        folder: Folder = in_memory,
        stores: StoreFactories = NO_STORES,
        retinue: Retinue | None = None,
        **options: Unpack[OpenOptions],
    ) -> None:
        approver = options.get("approver")
        if approver is not None:
            check_approver(approver)
        self.config: SubagentConfig = config
        self.profile: Profile[str] = config.profile(model=model, tools=tools)
        _check_hooks(hooks)
        if isinstance(hooks, AgentHooks):
            self.profile = replace(self.profile, hooks=hooks)
        spec = subagents.SubagentTool(self.profile).spec
        self.name: str = spec.name
        self.display_name: str = spec.display_name
        self.description: str = spec.description
        task = spec.schema["properties"]["task"]
        self.input_schema: dict[str, Any] = {"type": "object", "properties": {"task": task}, "required": ["task"]}
        self._hooks = hooks
        self._stores = stores
        self._options = options
        self._client: Callable[[], AbstractAsyncContextManager[RunHandle]]
        if retinue is None:
            self._client = lambda: _opened(folder, self.profile.tools, options)
        else:
            self._client = lambda: _client_of(retinue, self.profile.tools, _NO_DEADLINE)

    def with_hooks(self, hooks: Hooks) -> SubagentTool:
        """Return the same tool with these hooks instead."""
        _check_hooks(hooks)
        changed = copy.copy(self)
        changed._hooks = hooks
        around = hooks if isinstance(hooks, AgentHooks) else None
        if around is not self.profile.hooks:
            changed.profile = replace(self.profile, hooks=around)
        return changed

    def with_stores(
        self, message_factory: Callable[[], MessageStore], state_factory: Callable[[], StateStore]
    ) -> SubagentTool:
        """Return the same tool, whose runs have message and state stores from these factories."""
        changed = copy.copy(self)
        changed._stores = replace(self._stores, message=message_factory, state=state_factory)
        return changed

    def with_event_store(self, event_factory: Callable[[], EventStore]) -> SubagentTool:
        """Return the same tool, whose runs have event stores from this factory."""
        changed = copy.copy(self)
        changed._stores = replace(self._stores, event=event_factory)
        return changed

    def with_folder(self, folder: Folder) -> SubagentTool:
        """Return the same tool, whose calls from outside a run each keep their log where `folder` says."""
        changed = copy.copy(self)
        changed._client = lambda: _opened(folder, self.profile.tools, self._options)
        return changed

    async def execute(
        self, ctx: Context | None, input: Mapping[str, Any], *, cancel: asyncio.Event | None = None
    ) -> ToolResult:
        """Run the subagent to its ending, below `ctx`, the run around this call, or a client.

        A failed run is a ToolResult; what makes no run is a ToolError, except a full tree, which is a ToolResult too.
        Setting `cancel` cancels the subagent, and so does cancelling this call or the run it belongs to."""
        task = input.get("task") if isinstance(input, Mapping) else None
        if not isinstance(task, str):
            raise ToolError("Missing 'task' parameter")
        around = ctx or CURRENT.get()
        if around is not None:
            return await self._run(around.handle, task, cancel)
        async with self._client() as client:
            return await self._run(client, task, cancel)

    async def _run(self, parent: RunHandle, task: str, cancel: asyncio.Event | None) -> ToolResult:
        below = SpawnBelow(tree=parent.tree, run=parent.number, queue=False)
        try:
            run = await parent.control.spawn(self.profile, Task(task), below=below)
        except NoSlot as full:
            return ToolResult(False, str(full), None, 0)
        except SpawnRefused as refused:
            raise ToolError(str(refused)) from None
        if cancel is not None and cancel.is_set():
            await run.cancel()
        async with TaskOwner() as owner:
            is_observed = self._hooks is not None or self._stores != NO_STORES
            observer = _Observer(run, f"{parent.tree}/{parent.number}", self._hooks, self._stores)
            observing = owner.start(observer.observe()) if is_observed else None
            if cancel is not None:
                owner.start(_cancel_on(cancel, run))
            try:
                result = SubagentResult.of(await run.result())
                if observing is not None:
                    await observing
            finally:
                await run.cancel()  # one that nobody waits for has no reason to go on; one that has ended is left alone
        return ToolResult(result.success, result.final_response, result.to_json(), result.duration_ms)


class SubagentFactory:
    """The parts that subagents share: one open Retinue, a model, tools, hooks, and the limits of one tree.

    Enter it with `async with`; leaving cancels what still runs. With `retinue` that one is used and left open."""

    def __init__(
        self,
        *,
        model: str | Model | None = None,
        tools: Sequence[Any] | None = (),
        hooks: Hooks | None = None,
        folder: Folder = in_memory,
        stores: StoreFactories = NO_STORES,
        retinue: Retinue | None = None,
        max_concurrent: int | UnsetType | None = UNSET,
        max_depth: int | UnsetType = UNSET,
        **options: Unpack[OpenOptions],
    ) -> None:
        self._retinue = retinue
        self._shared: dict[str, Any] = {"model": model, "tools": tools, "hooks": hooks, "stores": stores, **options}
        self._options = options
        self._folder = folder
        self._limits = Limits(seconds=None, depth=max_depth, concurrent=max_concurrent)
        self._stack = AsyncExitStack()
        self._client: ClientHandle | None = None

    async def __aenter__(self) -> SubagentFactory:
        async with AsyncExitStack() as stack:
            retinue = self._retinue
            if retinue is None:
                retinue = await stack.enter_async_context(library.open(self._folder(), **self._options))
            client = _client_of(retinue, self._shared["tools"], self._limits)
            self._client = await stack.enter_async_context(client)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client = None
        await self._stack.aclose()

    def create(self, config: SubagentConfig) -> SubagentTool:
        """Return a tool of this factory: its calls from outside a run are children of the factory's one client."""
        tool = SubagentTool(config, **self._shared)
        tool._client = self._here
        return tool

    @asynccontextmanager
    async def _here(self) -> AsyncIterator[RunHandle]:
        if self._client is None:
            raise RetinueError("this SubagentFactory is not open: use `async with SubagentFactory(...) as factory:`")
        yield self._client


@asynccontextmanager
async def _opened(folder: Folder, tools: Sequence[Any] | None, options: OpenOptions) -> AsyncIterator[RunHandle]:
    async with library.open(folder(), **options) as retinue, _client_of(retinue, tools, _NO_DEADLINE) as client:
        yield client


@asynccontextmanager
async def _client_of(retinue: Retinue, tools: Sequence[Any] | None, limits: Limits) -> AsyncIterator[ClientHandle]:
    """Run 0 of a tree that stands for a caller who is no run. It has the tools its children may have."""
    options = ClientOptions(name="client", task="subagents called from outside", tools=tools, limits=limits)
    async with await retinue.control.open_client(options) as client:
        yield client


async def _cancel_on(event: asyncio.Event, run: RunHandle) -> None:
    await event.wait()
    await run.cancel()


class _Observer:
    """One subagent as its hooks and stores see it, as it happens. An error there is logged and never hurts the run."""

    def __init__(self, run: RunHandle, parent: str, hooks: Hooks | None, stores: StoreFactories) -> None:
        self._run, self._parent = run, parent
        self._thread = f"{run.tree}/{run.number}"
        self._on_progress = hooks.on_progress if isinstance(hooks, AgentHooks) else hooks
        self._messages = None if stores.message is None else stores.message()
        self._states = None if stores.state is None else stores.state()
        self._events = None if stores.event is None else stores.event()
        self._conversation = Thread(())
        self._told = 0

    async def observe(self) -> None:
        progress = Progress(self._run.tree, run=self._run.number)
        async for event in self._run.events():
            if event.run != self._run.number:
                continue
            update = progress.apply(event)
            if self._events is not None:
                await self._guard(self._events.append(self._thread, event))
            if update is not None:
                if self._on_progress is not None:
                    self._tell(update)
                if self._events is not None:
                    await self._guard(self._events.append(self._parent, update))
            self._conversation.apply(event.body)
            if isinstance(event.body, events.TurnEnded | events.RunEnded):
                await self._store_turn(progress.runs.runs[event.run])

    async def _store_turn(self, view: RunView) -> None:
        turns = self._conversation.turns()
        for turn in turns[self._told :] if self._messages is not None else ():
            await self._guard(self._messages.append(self._thread, turn))  # type: ignore[union-attr]
        self._told = len(turns)
        if self._states is not None:
            await self._guard(self._states.save(self._thread, ThreadState(view.turns, view.usage, view.status)))

    def _tell(self, update: SubagentProgress) -> None:
        try:
            assert self._on_progress is not None
            self._on_progress(update)
        except Exception as error:  # noqa: BLE001 - the boundary to somebody else's hooks
            _log.warning("Failed to emit subagent progress event: %s", error)

    async def _guard(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the boundary to somebody else's stores
            _log.warning("a store of the subagent failed: %s: %s", type(error).__name__, error)
