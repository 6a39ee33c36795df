"""Subagents as tools of a program: `SubagentConfig`, `SubagentTool`, `SubagentFactory` and `SubagentResult`.

A thin layer: a config becomes a Profile, a call spawns one run, and the result has a part of the fields of `Result`.
Inside a run, the subagent is a child of that run. Outside, it is a child of a client: run 0 of a tree, which does no
work and stands for the caller, so that the supervisor enforces depth, slots and cancellation there too.

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
from retinue.protocol.subagents import make_subagent_spec
from retinue.surfaces import library
from retinue.surfaces.library import OpenOptions, Retinue

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
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
_NO_DEADLINE = Limits(seconds=None)

_log = logging.getLogger("retinue.subagent")
_log.addHandler(logging.NullHandler())


def in_memory() -> None:
    """Return None, which keeps the log in memory. A `Folder` function that returns a path keeps the log there."""


class ThreadState(msgspec.Struct, frozen=True):
    """The state of a thread after a turn. `status` is None until the run has ended."""

    turn: int
    usage: Usage
    status: str | None


class MessageStore(Protocol):
    """A store for the conversation of a thread, message by message."""

    async def append(self, thread_id: str, message: Turn) -> None: ...


class StateStore(Protocol):
    """A store for the state of a thread after each turn."""

    async def save(self, thread_id: str, state: ThreadState) -> None: ...


class EventStore(Protocol):
    """A store for the events of a subagent in its own thread, and for its progress in the thread of its parent."""

    async def append(self, thread_id: str, event: Event | SubagentProgress) -> None: ...


@dataclass(frozen=True)
class StoreFactories:
    """Factories of stores. Each run, nested or not, gets stores of its own. The log is written as well."""

    message: Callable[[], MessageStore] | None = None
    state: Callable[[], StateStore] | None = None
    event: Callable[[], EventStore] | None = None


NO_STORES = StoreFactories()


@dataclass(frozen=True)
class SubagentConfig:
    """The configuration of a subagent. `max_turns` of None means 100, `timeout_ms` of None means no timeout."""

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
        """Return the fields as plain values, without `model` if it is None."""
        fields = asdict(self)
        if self.model is None:
            del fields["model"]
        return fields

    def profile(self, *, model: str | Model | None = None, tools: Sequence[Any] | None = ()) -> Profile[str]:
        """Return the profile of this config. The model of the config wins over `model`."""
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
    """The result of one subagent.

    `failed_tool` exists for old readers and is always None: an error of the model or the transport names no tool."""

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
        """Return the fields as plain values, without `error_details` and `failed_tool` if they are None."""
        fields: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return fields


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a call: `output` for the model of the parent, `data` (a SubagentResult as JSON) for programs."""

    success: bool
    output: str
    data: dict[str, Any] | None
    duration_ms: int


class SubagentProgress(events.ProgressReported, frozen=True, tag=False):
    """The state of a subagent at the start (`completed` False) or end of one tool call: the fields of the event
    `subagent.progress`, as JSON without its `kind`. Counters stop at the maximum of their type.

    `child_thread_id` is the run as `TREE/N`, `child_root_task_id` the primary above it. `subagent_task_id` is set only
    for runs that are tasks of another system."""


class Progress:
    """A fold of a tree's events into the progress of the subagent `run`, or of all subagents if `run` is None.

    Gives one value when a tool call starts and one when it ends, none for the primary. Uses the fold `Runs`, so its
    counts agree with those of the result."""

    def __init__(self, tree: str, *, run: int | None = None) -> None:
        self._run = run
        self.runs = Runs(tree)

    def apply(self, event: Event) -> SubagentProgress | None:
        """Fold one event, and return the progress if the event starts or ends a tool call."""
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
        max_turns = turns if isinstance(turns, int) else None
        told = run.describe_progress(
            self.runs.tree, tool, about, success, nickname if isinstance(nickname, str) else None, max_turns
        )
        counts = {
            "max_turns": None if max_turns is None else min(max_turns, U32_MAX),
            "current_turn": min(told.current_turn, U32_MAX),
            "tool_count": min(told.tool_count, U32_MAX),
            "total_tokens": min(told.total_tokens, U64_MAX),
        }
        return SubagentProgress(**msgspec.structs.asdict(told) | counts)


class AgentHooks:
    """Hooks around the tool calls of a subagent, to be overridden.

    `before_tool` and `after_tool` work as in `Profile.hooks`. `on_progress` is called when a tool call starts and when
    it ends."""

    async def before_tool(self, name: str, args: Mapping[str, Any]) -> str | None:
        return None

    async def after_tool(self, name: str, args: Mapping[str, Any], text: str, success: bool) -> None:
        pass

    def on_progress(self, progress: SubagentProgress) -> Any:
        pass


Hooks = Callable[[SubagentProgress], Any] | AgentHooks


def _check_hooks(hooks: Hooks | None) -> None:
    """Raise ConfigError for hooks that are neither AgentHooks nor a function, or whose progress function is async."""
    told = hooks.on_progress if isinstance(hooks, AgentHooks) else hooks
    if told is not None and not callable(told):
        raise ConfigError(f"the hooks {type(hooks).__name__} are neither a function nor AgentHooks: derive from that")
    if inspect.iscoroutinefunction(told):
        raise ConfigError("the function that gets the progress is async, so it would never run: write `def`")


class SubagentTool:
    """One subagent as a tool. In a profile's tools put `tool.profile`; anywhere else call `execute`.

    A call inside a run uses the log of its tree. A call outside a run uses `retinue`, or without it opens a Retinue for
    this call, with the `options` of `retinue.open` and the state folder that `folder` returns. `hooks` is AgentHooks or
    a function that gets each SubagentProgress. Each run gets its own stores from the factories in `stores`."""

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
        spec = make_subagent_spec(self.profile)
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
            self._client = lambda: _open_own_client(folder, self.profile.tools, options)
        else:
            self._client = lambda: _open_client(retinue, self.profile.tools, _NO_DEADLINE)

    def with_hooks(self, hooks: Hooks) -> SubagentTool:
        """Return a copy of this tool with these hooks."""
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
        """Return a copy of this tool whose runs get message and state stores from these factories."""
        changed = copy.copy(self)
        changed._stores = replace(self._stores, message=message_factory, state=state_factory)
        return changed

    def with_event_store(self, event_factory: Callable[[], EventStore]) -> SubagentTool:
        """Return a copy of this tool whose runs get event stores from this factory."""
        changed = copy.copy(self)
        changed._stores = replace(self._stores, event=event_factory)
        return changed

    def with_folder(self, folder: Folder) -> SubagentTool:
        """Return a copy of this tool. Its calls outside a run keep their logs in the folder that `folder` returns."""
        changed = copy.copy(self)
        changed._client = lambda: _open_own_client(folder, self.profile.tools, self._options)
        return changed

    async def execute(
        self, ctx: Context | None, input: Mapping[str, Any], *, cancel: asyncio.Event | None = None
    ) -> ToolResult:
        """Run the subagent until it has ended. Its parent is `ctx`, else the current run, else a client.

        A failed run gives a ToolResult with `success` False, as does a tree without a free slot. Any other refusal to
        start a run raises ToolError. Setting `cancel` cancels the subagent, as does cancelling this call or the
        parent."""
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
                await run.cancel()  # stops a run that no caller waits for; no effect after the end
        return ToolResult(result.success, result.final_response, result.to_json(), result.duration_ms)


class SubagentFactory:
    """A factory of tools that share one open Retinue, a model, tools, hooks, and the limits of one tree.

    Enter it with `async with`. Leaving it cancels all subagents that have not ended. If `retinue` is given, the factory
    uses it and leaves it open."""

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
            client = _open_client(retinue, self._shared["tools"], self._limits)
            self._client = await stack.enter_async_context(client)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client = None
        await self._stack.aclose()

    def create(self, config: SubagentConfig) -> SubagentTool:
        """Return a tool of this factory. Its calls outside a run are children of the factory's client."""
        tool = SubagentTool(config, **self._shared)
        tool._client = self._lend_client
        return tool

    @asynccontextmanager
    async def _lend_client(self) -> AsyncIterator[RunHandle]:
        if self._client is None:
            raise RetinueError("this SubagentFactory is not open: use `async with SubagentFactory(...) as factory:`")
        yield self._client


@asynccontextmanager
async def _open_own_client(
    folder: Folder, tools: Sequence[Any] | None, options: OpenOptions
) -> AsyncIterator[RunHandle]:
    """Open a Retinue for one call of a tool, and a client in it."""
    async with library.open(folder(), **options) as retinue, _open_client(retinue, tools, _NO_DEADLINE) as client:
        yield client


@asynccontextmanager
async def _open_client(retinue: Retinue, tools: Sequence[Any] | None, limits: Limits) -> AsyncIterator[ClientHandle]:
    """Open run 0 of a new tree, which stands for a caller outside any run. `tools` are those its children may have."""
    options = ClientOptions(name="client", task="subagents called from outside", tools=tools, limits=limits)
    async with await retinue.control.open_client(options) as client:
        yield client


async def _cancel_on(event: asyncio.Event, run: RunHandle) -> None:
    await event.wait()
    await run.cancel()


class _Observer:
    """An observer that feeds the events of one subagent to its hooks and stores, live. Errors there are only logged."""

    def __init__(self, run: RunHandle, parent: str, hooks: Hooks | None, stores: StoreFactories) -> None:
        self._run, self._parent = run, parent
        self._thread = f"{run.tree}/{run.number}"
        self._on_progress = hooks.on_progress if isinstance(hooks, AgentHooks) else hooks
        self._messages = None if stores.message is None else stores.message()
        self._states = None if stores.state is None else stores.state()
        self._events = None if stores.event is None else stores.event()
        self._conversation = Thread(())
        self._stored_turns = 0

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
        for turn in turns[self._stored_turns :] if self._messages is not None else ():
            await self._guard(self._messages.append(self._thread, turn))  # type: ignore[union-attr]
        self._stored_turns = len(turns)
        if self._states is not None:
            await self._guard(self._states.save(self._thread, ThreadState(view.turns, view.usage, view.status)))

    def _tell(self, update: SubagentProgress) -> None:
        try:
            assert self._on_progress is not None
            self._on_progress(update)
        except Exception as error:  # noqa: BLE001 - the boundary to hooks of the user
            _log.warning("Failed to emit subagent progress event: %s", error)

    async def _guard(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the boundary to stores of the user
            _log.warning("a store of the subagent failed: %s: %s", type(error).__name__, error)
