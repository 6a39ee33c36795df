"""Progress in the parent's thread, hooks around the tools of the loop, and stores of each run."""

from collections.abc import Mapping
from typing import Any

import pytest

import retinue
from retinue import ConfigError, Profile
from retinue.core.context import Context
from retinue.core.events import Event, ProgressReported, RunEnded, RunSpawned, ToolCall
from retinue.core.messages import AssistantTurn, ToolTurn, Turn, UserTurn
from retinue.subagent import (
    AgentHooks,
    StoreFactories,
    SubagentConfig,
    SubagentFactory,
    SubagentProgress,
    SubagentTool,
    ThreadState,
)
from retinue.testing import scripted
from tests.subagent.agents import calls, echo

pytestmark = pytest.mark.finding("S8")
WORKER = SubagentConfig("worker")
ECHOES: dict[str, Any] = {"worker": [calls("echo", message="hi"), {"text": "said {{last_result}}"}]}


@pytest.mark.requirement("SDK-45", "SDK-47")
async def test_the_parent_s_thread_gets_progress_and_the_child_s_thread_everything_else() -> None:
    script = {"main": [calls("subagent_worker", task="x"), "end"], **ECHOES}
    worker = SubagentTool(WORKER, tools=[echo]).profile
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=scripted(script), tools=[worker]), "go")
        events = [event async for event in run.events()]
    told = [event.body for event in events if isinstance(event.body, ProgressReported)]
    assert {event.run for event in events if isinstance(event.body, ProgressReported)} == {0}
    spawned = next(event.body for event in events if event.run == 1 and isinstance(event.body, RunSpawned))
    assert [(p.tool_name, p.completed, p.success, p.current_turn) for p in told] == [
        ("echo", False, False, 0),
        ("echo", True, True, 0),
    ]
    assert {(p.subagent_id, p.subagent_name, p.child_thread_id) for p in told} == {
        (spawned.subagent_id, "worker", f"{run.tree}/1")
    }
    assert {p.max_turns for p in told} == {None}  # the config says none; the loop's own guard is no limit of it
    assert spawned.max_turns == 100
    assert [b.name for e in events if e.run == 0 and isinstance(b := e.body, ToolCall)] == ["subagent_worker"]


async def test_children_that_are_asked_for_together_have_no_progress_in_their_parent() -> None:
    step = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "x", "subagent_type": "worker"}]}}]}
    worker = SubagentTool(WORKER, tools=[echo]).profile
    async with retinue.open(mode="yes", profiles=[worker]) as r:
        run = await r.spawn(Profile("main", model=scripted({"main": [step, "end"], **ECHOES})), "go")
        events = [event async for event in run.events()]
    assert any(event.run == 1 and isinstance(event.body, RunEnded) for event in events)
    assert not [event for event in events if isinstance(event.body, ProgressReported)]


class Watching(AgentHooks):
    """Notes every call; refuses or breaks as told."""

    def __init__(self, refuse: str | None = None, *, breaks: str = "") -> None:
        self.refuse, self.breaks = refuse, breaks
        self.seen: list[Any] = []

    async def before_tool(self, name: str, args: Mapping[str, Any]) -> str | None:
        self.seen.append(("before", name, dict(args)))
        if self.breaks == "before":
            raise OSError("no policy server")
        return self.refuse

    async def after_tool(self, name: str, args: Mapping[str, Any], text: str, success: bool) -> None:
        self.seen.append(("after", name, text, success))
        if self.breaks == "after":
            raise OSError("no audit server")

    def on_progress(self, progress: SubagentProgress) -> None:
        self.seen.append(("progress", progress.tool_name, progress.completed))


@pytest.mark.requirement("SDK-59")
async def test_hooks_stand_before_and_after_each_tool() -> None:
    hooks = Watching()
    tool = SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo]).with_hooks(hooks)
    assert (await tool.execute(None, {"task": "go"})).output == "said hi"
    assert [each for each in hooks.seen if each[0] != "progress"] == [
        ("before", "echo", {"message": "hi"}),
        ("after", "echo", "hi", True),
    ]
    assert [each for each in hooks.seen if each[0] == "progress"] == [
        ("progress", "echo", False),
        ("progress", "echo", True),
    ]


@pytest.mark.parametrize(
    ("hooks", "text"),
    [
        (Watching("not today"), "said not today"),
        (Watching(breaks="before"), "said echo failed: OSError: no policy server"),
    ],
)
async def test_a_hook_refuses_a_call_and_one_that_fails_refuses_too(hooks: Watching, text: str) -> None:
    tool = SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo], hooks=hooks)
    outcome = await tool.execute(None, {"task": "go"})
    assert outcome.output == text
    assert outcome.data is not None and outcome.data["tool_logs"][0]["success"] is False
    assert not [each for each in hooks.seen if each[0] == "after"]  # it did not run


async def test_a_hook_that_fails_afterwards_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    tool = SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo], hooks=Watching(breaks="after"))
    assert (await tool.execute(None, {"task": "go"})).output == "said hi"
    assert "the hook after echo failed: OSError: no audit server" in caplog.text


class Kept:
    """All three stores in one; `kept` has what each got, by thread."""

    def __init__(self, kept: list[tuple[str, Any]]) -> None:
        self.kept = kept

    async def append(self, thread_id: str, what: Turn | Event | SubagentProgress) -> None:
        self.kept.append((thread_id, what))

    async def save(self, thread_id: str, state: ThreadState) -> None:
        self.kept.append((thread_id, state))


class Broken:
    async def append(self, thread_id: str, what: object) -> None:
        raise OSError("full")

    async def save(self, thread_id: str, state: object) -> None:
        raise OSError("full")


@pytest.mark.requirement("SDK-1", "SDK-47", "SDK-59")
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside a run"])
async def test_each_run_has_stores_of_its_own_from_three_factories(inside: bool) -> None:
    messages: list[list[Any]] = []
    states: list[list[Any]] = []
    stored: list[list[Any]] = []

    def make(kept: list[list[Any]]) -> Kept:
        kept.append([])
        return Kept(kept[-1])

    tool = SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo]).with_event_store(lambda: make(stored))
    tool = tool.with_stores(lambda: make(messages), lambda: make(states))

    async def boss(task: str, ctx: Context) -> str:
        return (await tool.execute(ctx, {"task": task})).output

    async with retinue.open(mode="yes") as r:
        for task in ("first", "second"):
            if inside:
                await r.run(Profile("boss", call=boss, tools=[echo]), task)
            else:
                await tool.execute(None, {"task": task})
    assert (len(messages), len(states), len(stored)) == (2, 2, 2)
    for task, said, saved, happened in zip(("first", "second"), messages, states, stored, strict=True):
        [thread] = {thread for thread, _ in said} | {thread for thread, _ in saved}
        assert [type(turn) for _, turn in said] == [UserTurn, AssistantTurn, ToolTurn, AssistantTurn]
        assert said[0][1] == UserTurn(task) and said[-1][1].text == "said hi"
        assert [(state.turn, state.status) for _, state in saved] == [(1, None), (2, None), (2, "done")]
        own = [each for where, each in happened if where == thread]
        above = [each for where, each in happened if where != thread]
        assert isinstance(own[0].body, RunSpawned) and isinstance(own[-1].body, RunEnded)
        assert [type(each) for each in above] == [SubagentProgress, SubagentProgress]
    assert len({thread for kept in messages for thread, _ in kept}) == 2


async def test_a_store_that_fails_does_not_hurt_the_run(caplog: pytest.LogCaptureFixture) -> None:
    stores = StoreFactories(message=Broken, state=Broken, event=Broken)
    async with SubagentFactory(model=scripted(ECHOES), tools=[echo], stores=stores) as factory:
        assert (await factory.create(WORKER).execute(None, {"task": "go"})).output == "said hi"
    assert "a store of the subagent failed: OSError: full" in caplog.text


class SyncHooks:
    """Hooks that forget to be async."""

    def before_tool(self, name: str, args: Any) -> None: ...

    def after_tool(self, name: str, args: Any, text: str, success: bool) -> None: ...


class LateProgress(AgentHooks):
    async def on_progress(self, progress: SubagentProgress) -> None: ...


@pytest.mark.finding("S8")
def test_hooks_that_would_never_run_raise_where_they_are_given() -> None:
    """A guard of a program that is silently left out would let everything pass."""
    sync: Any = SyncHooks()
    with pytest.raises(ConfigError, match="profile 'x': the hooks SyncHooks have no `async def before_tool`"):
        Profile("x", hooks=sync)
    config = SubagentConfig("x")
    with pytest.raises(ConfigError, match="the hooks SyncHooks are neither a function nor AgentHooks"):
        SubagentTool(config, hooks=sync)
    for late in (LateProgress(), LateProgress().on_progress):
        with pytest.raises(ConfigError, match="the function that gets the progress is async"):
            SubagentTool(config).with_hooks(late)
