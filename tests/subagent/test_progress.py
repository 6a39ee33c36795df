"""Folding events into progress and results: what each kind adds, what is ignored, and where counting stops."""

import msgspec
import pytest

import retinue
from retinue import Profile, Usage
from retinue.core.events import (
    Body,
    Message,
    RunEnded,
    RunSpawned,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    UsageReported,
)
from retinue.log.runs import Runs
from retinue.subagent import U32_MAX, U64_MAX, Progress, SubagentConfig, SubagentFactory, SubagentProgress
from retinue.testing import scripted
from tests.subagent.agents import calls, echo
from tests.subagent.events import spawned, stream

READ = ToolCall("c1", "read", {"path": "a.py"}, display_name="Read")


def fold(*bodies: Body, run: int = 1) -> list[SubagentProgress]:
    progress = Progress("t")
    return [update for event in stream(*bodies, run=run) if (update := progress.apply(event)) is not None]


@pytest.mark.requirement("SDK-45")
def test_the_fields_of_progress() -> None:
    body = spawned(model="scripted:x", max_turns=7, profile=msgspec.Raw(b'{"nickname":"Zara","limits":{"turns":7}}'))
    usage = UsageReported("scripted:x", Usage(30, 12, cache_read_tokens=5))
    [update] = fold(body, TurnStarted(1), TurnEnded(1), TurnStarted(2), usage, READ)
    assert msgspec.to_builtins(update) == {
        "subagent_id": "worker_1f",
        "subagent_name": "worker",
        "nickname": "Zara",
        "child_thread_id": "t/1",
        "child_root_task_id": "t/0",
        "subagent_task_id": None,
        "max_turns": 7,
        "current_turn": 1,
        "model": "scripted:x",
        "tool_name": "read",
        "tool_context": "a.py",
        "completed": False,
        "success": False,
        "tool_count": 1,
        "total_tokens": 42,
    }


@pytest.mark.requirement("SDK-39", "SDK-40")
@pytest.mark.parametrize("success", [True, False])
def test_a_tool_call_is_told_at_its_start_and_at_its_end(success: bool) -> None:
    second = ToolCall("c2", "shell", {"command": "make"})
    started, _, ended = fold(spawned(), READ, second, ToolResult("c1", "read", "x\ny\n", success, 4))
    assert (started.completed, started.success, started.tool_count) == (False, False, 1)
    assert (ended.completed, ended.success, ended.tool_count) == (True, success, 2)
    assert (ended.tool_name, ended.tool_context) == ("read", "a.py")


@pytest.mark.requirement("SDK-40")
def test_a_result_without_a_call_has_no_context() -> None:
    bodies = (spawned(), READ, ToolResult("c1", "read", "x\ny\n", True, 4), ToolResult("c9", "read", "no", False, 5))
    matched, unmatched = Runs.of("t", stream(*bodies)).runs[1].tool_logs
    assert msgspec.structs.astuple(matched) == ("read", "Read", "a.py", "2 lines", True, 4)
    assert msgspec.structs.astuple(unmatched) == ("read", "read", "", "no", False, 5)
    assert [update.tool_context for update in fold(*bodies)] == ["a.py", "a.py", ""]


@pytest.mark.requirement("SDK-41")
def test_turns_and_usage_add_up() -> None:
    one, two = UsageReported("m", Usage(10, 20)), UsageReported("m", Usage(1, 2))
    bodies = (TurnStarted(1), one, TurnEnded(1), TurnStarted(2), two, TurnEnded(2), RunEnded("done", "ok", 9))
    late = (TurnStarted(3), UsageReported("m", Usage(500, 500)))
    result = Runs.of("t", stream(spawned(), *bodies, *late)).runs[1].result("t")
    assert (result.total_turns, result.usage) == (2, Usage(11, 22))


@pytest.mark.requirement("SDK-43")
def test_nothing_that_follows_an_error_changes_anything() -> None:
    error = RunEnded("failed", "subagent boom", 9, "subagent boom")
    late = (
        Message("should not be appended", final=True),
        READ,
        ToolResult("c1", "read", "x"),
        RunEnded("done", "y", 1),
    )
    result = Runs.of("t", stream(spawned(), error, *late)).runs[1].result("t")
    assert (result.success, result.final_response, result.error_details) == (False, "subagent boom", "subagent boom")
    assert (result.tool_count, result.tool_logs) == (0, ())
    assert fold(spawned(), error, *late) == []


@pytest.mark.requirement("SDK-46")
def test_counters_stop_at_the_maximum_of_their_type() -> None:
    progress = Progress("t", run=1)
    huge = UsageReported("m", Usage(2**64 - 5, 2**64))
    events = stream(spawned(profile={"limits": {"turns": 2**40}}), TurnEnded(2**40), huge, READ, READ)
    for event in events[:3]:
        progress.apply(event)
    progress.runs.runs[1].tool_count = U32_MAX - 1
    for event in events[3:]:
        update = progress.apply(event)
        assert update is not None
        assert (update.max_turns, update.current_turn, update.tool_count) == (U32_MAX, U32_MAX, U32_MAX)
        assert update.total_tokens == U64_MAX == 18446744073709551615
    assert U32_MAX == 4294967295


def test_the_primary_is_nobodys_subagent() -> None:
    assert fold(spawned(run=0), READ, run=0) == []


def test_no_limit_no_model_and_no_nickname() -> None:
    [update] = fold(spawned(profile={"nickname": 7}), READ)
    assert (update.max_turns, update.model, update.nickname, update.total_tokens) == (None, None, None, 0)


@pytest.mark.requirement("SDK-39", "SDK-40", "SDK-45", "SDK-47")
async def test_hooks_hear_of_their_own_subagent_while_it_runs() -> None:
    seen: list[SubagentProgress] = []
    usage = {"usage": {"input_tokens": 5, "output_tokens": 2}}
    model = scripted(
        {
            "worker": [{**calls("echo", message="x"), **usage}, calls("subagent_kid", task="go"), {"text": "over"}],
            "kid": [calls("echo", message="deep")],
        }
    )
    kid = Profile("kid", tools=[echo])
    async with SubagentFactory(model=model, tools=[echo, kid], hooks=seen.append, mode="yes") as factory:
        config = SubagentConfig("worker", nickname="Zara", max_turns=9)
        outcome = await factory.create(config).execute(None, {"task": "go"})
    assert outcome.data is not None
    assert [(u.tool_name, u.completed, u.success, u.tool_count, u.current_turn) for u in seen] == [
        ("echo", False, False, 1, 0),  # no turn is complete yet
        ("echo", True, True, 1, 0),
        ("subagent_kid", False, False, 2, 1),
        ("subagent_kid", True, True, 2, 1),
    ]
    assert {(u.nickname, u.max_turns, u.total_tokens) for u in seen} == {("Zara", 9, 7)}


async def test_all_subagents_of_a_tree_can_be_followed_from_its_log() -> None:
    model = scripted({"main": [calls("subagent_kid", task="go")], "kid": [calls("echo", message="x")]})
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=model, tools=[Profile("kid", tools=[echo], nickname="K")]), "go")
        progress = Progress(run.tree)
        seen = [update async for event in run.events() if (update := progress.apply(event)) is not None]
        first = (await r.control.log.read(run.tree))[0].body
    assert isinstance(first, RunSpawned)
    assert [(u.subagent_name, u.nickname, u.tool_name, u.completed) for u in seen] == [
        ("kid", "K", "echo", False),
        ("kid", "K", "echo", True),
    ]
