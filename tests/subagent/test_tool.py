"""Tests of `SubagentTool` and `SubagentFactory`: a call, its token, its result, and the replaceable parts."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Context, Profile, RetinueError, ToolError
from retinue.core.events import RunSpawned
from retinue.log.runs import Runs
from retinue.subagent import SubagentConfig, SubagentFactory, SubagentProgress, SubagentTool
from retinue.testing import ManualClock, scripted
from tests.subagent.agents import calls, echo, spy

WORKER = SubagentConfig("worker")
ECHOES = {"worker": [calls("echo", message="hi"), {"text": "said {{last_result}}"}]}


@pytest.mark.requirement("SDK-17")
@pytest.mark.parametrize("given", [{}, {"task": None}, {"task": 7}, {"task": ["go"]}, {"Task": "go"}])
async def test_a_missing_task(given: dict[str, Any]) -> None:
    tool = SubagentTool(WORKER, model=scripted({}))
    with pytest.raises(ToolError) as raised:
        await tool.execute(None, given)
    assert str(raised.value) == "Missing 'task' parameter"


@pytest.mark.requirement("SDK-17")
async def test_a_model_that_forgets_the_task_reads_the_same_words() -> None:
    model = scripted({"main": [calls("subagent_worker", text="x"), {"text": "{{last_result}}"}]})
    async with retinue.open(mode="yes") as r:
        result = await r.run(Profile("main", model=model, tools=[SubagentTool(WORKER).profile]), "go")
    assert result.final_response == "Missing 'task' parameter"
    assert result.tool_logs[0].success is False
    assert result.children == ()


@pytest.mark.requirement("SDK-11", "SDK-25")
async def test_what_a_call_gives_back() -> None:
    outcome = await SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo]).execute(None, {"task": "go"})
    assert (outcome.success, outcome.output) == (True, "said hi")
    assert outcome.data is not None
    assert outcome.duration_ms == outcome.data["duration_ms"]
    log = outcome.data["tool_logs"][0]
    assert (log["name"], log["result"], log["success"], type(log["duration_ms"])) == ("echo", "1 lines", True, int)
    assert {
        "name": "worker",
        "final_response": "said hi",
        "total_turns": 2,
        "tool_count": 1,
        "success": True,
    }.items() <= (outcome.data.items())
    assert list(outcome.data) == [
        "name", "final_response", "total_turns", "tool_count", "tool_logs", "usage", "success", "duration_ms",
    ]  # fmt: skip


@pytest.mark.requirement("SDK-23")
async def test_a_subagents_id_is_its_name_and_the_time() -> None:
    seen: list[SubagentProgress] = []
    before = time.time_ns()
    tool = SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo], hooks=seen.append)
    for _ in range(3):
        await tool.execute(None, {"task": "go"})
    ids = list(dict.fromkeys(update.subagent_id for update in seen))
    assert len(ids) == 3
    for subagent_id in ids:
        name, _, stamp = subagent_id.rpartition("_")
        assert name == "worker"
        assert before <= int(stamp, 16) <= time.time_ns()
        assert stamp == stamp.lower()


@pytest.mark.requirement("SDK-24", "SDK-58")
async def test_a_token_cancelled_beforehand_gives_no_answer() -> None:
    model = spy({"worker": [{"text": "Too late"}]})
    token = asyncio.Event()
    token.set()
    outcome = await SubagentTool(WORKER, model=model).execute(None, {"task": "go"}, cancel=token)
    assert (outcome.success, outcome.output) == (False, "Subagent cancelled")
    assert outcome.data is not None
    assert outcome.data["error_details"] == "Subagent 'worker' was cancelled"
    assert model.requests == []


@pytest.mark.requirement("SDK-24")
async def test_one_token_cancels_all_that_were_given_it_and_nobody_else() -> None:
    model = spy({"worker": [{"hang": True}], "other": [{"hang": True}]})
    token, others = asyncio.Event(), asyncio.Event()
    async with SubagentFactory(model=model) as factory:
        worker, other = factory.create(WORKER), factory.create(SubagentConfig("other"))
        pair = [asyncio.create_task(worker.execute(None, {"task": "go"}, cancel=token)) for _ in range(2)]
        spared = asyncio.create_task(other.execute(None, {"task": "go"}, cancel=others))
        await model.reached["other", 1].wait()
        token.set()
        assert [outcome.output for outcome in await asyncio.gather(*pair)] == ["Subagent cancelled"] * 2
        assert model.aborted == ["worker", "worker"]
        others.set()
        assert (await spared).output == "Subagent cancelled"


@pytest.mark.requirement("SDK-24")
async def test_cancelling_the_parent_cancels_the_child() -> None:
    model = spy({"worker": [{"hang": True}]})
    tool = SubagentTool(WORKER, model=model)

    async def boss(task: str, ctx: Context) -> str:
        return (await tool.execute(ctx, {"task": "go"})).output

    async with retinue.open() as r:
        run = await r.spawn(Profile("boss", call=boss), "go")
        await model.reached["worker", 1].wait()
        await run.cancel()
        result = await run.result()
    assert (result.final_response, result.children[0].final_response) == ("Run cancelled", "Subagent cancelled")
    assert model.aborted == ["worker"]


@pytest.mark.requirement("SDK-24")
async def test_a_call_that_is_given_up_leaves_nothing_running() -> None:
    model = spy({"worker": [{"hang": True}, {"text": "never"}]})
    async with SubagentFactory(model=model) as factory:
        running = asyncio.create_task(factory.create(WORKER).execute(None, {"task": "go"}))
        await model.reached["worker", 1].wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await ManualClock.settle()
        assert model.aborted == ["worker"]


@pytest.mark.requirement("SDK-6", "SDK-60")
async def test_subagents_of_a_factory_are_children_in_one_tree() -> None:
    async with retinue.open() as r:
        async with SubagentFactory(retinue=r, model=scripted(ECHOES), tools=[echo]) as factory:
            await factory.create(WORKER).execute(None, {"task": "one"})
            await factory.create(SubagentConfig("other")).execute(None, {"task": "two"})
        [tree] = [each.tree for each in await r.control.log.list_trees()]
        primary = Runs.of(tree, await r.control.log.read(tree)).primary
    assert primary is not None
    assert (primary.agent, primary.status) == ("client", "done")
    assert [(run.path, run.spawned.depth, run.status) for run in primary.children] == [
        ("/main/worker-1", 1, "done"),
        ("/main/other-2", 1, "done"),
    ]


@pytest.mark.requirement("SDK-60")
async def test_a_factory_is_used_while_it_is_open() -> None:
    model = spy({"worker": [{"hang": True}]})
    factory = SubagentFactory(model=model)
    tool = factory.create(WORKER)
    with pytest.raises(RetinueError, match="this SubagentFactory is not open"):
        await tool.execute(None, {"task": "go"})
    async with factory:
        running = asyncio.create_task(tool.execute(None, {"task": "go"}))
        await model.reached["worker", 1].wait()
    assert (await running).output == "Subagent cancelled"
    with pytest.raises(RetinueError, match="this SubagentFactory is not open"):
        await tool.execute(None, {"task": "go"})


@pytest.mark.requirement("SDK-1", "SDK-6")
@pytest.mark.parametrize("given", [True, False], ids=["context given", "context around"])
async def test_inside_a_run_the_subagent_is_its_child(given: bool, tmp_path: Path) -> None:
    def no_store() -> Path:
        raise AssertionError("a run has a log already")

    tool = SubagentTool(WORKER, model=scripted({}), folder=no_store)

    async def boss(task: str, ctx: Context) -> str:
        return (await tool.execute(ctx if given else None, {"task": "go"})).output

    async with retinue.open() as r:
        result = await r.run(Profile("boss", call=boss), "go")
    assert [child.path for child in result.children] == ["/main/worker-1"]
    assert (result.final_response, result.children[0].final_response) == ("done", "done")


@pytest.mark.requirement("SDK-1", "SDK-59")
async def test_hooks_and_stores_are_replaced_and_the_config_is_not(tmp_path: Path) -> None:
    first: list[SubagentProgress] = []
    second: list[SubagentProgress] = []
    folders: list[Path] = []

    def folder() -> Path:
        folders.append(tmp_path / f"state{len(folders)}")
        return folders[-1]

    tool = SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo], hooks=first.append)
    replaced = tool.with_hooks(second.append).with_folder(folder)
    assert replaced.config is tool.config
    assert replaced.profile is tool.profile
    for _ in range(2):
        assert (await replaced.execute(None, {"task": "go"})).output == "said hi"
    assert (len(first), len(second), len(folders)) == (0, 4, 2)

    for state, update in zip(folders, second[::2], strict=True):
        tree, _, run = update.child_thread_id.partition("/")
        async with retinue.open(state) as r:
            assert [each.tree for each in await r.control.log.list_trees()] == [tree]
            bodies = [event.body for event in await r.control.log.read(tree) if event.run == int(run)]
        assert isinstance(bodies[0], RunSpawned)
        assert bodies[0].subagent_id == update.subagent_id

    assert (await tool.execute(None, {"task": "go"})).output == "said hi"
    assert (len(first), len(second), len(folders)) == (2, 4, 2)


@pytest.mark.requirement("SDK-59")
async def test_a_tool_of_a_factory_can_have_a_log_of_its_own(tmp_path: Path) -> None:
    seen: list[SubagentProgress] = []
    async with SubagentFactory(model=scripted(ECHOES), tools=[echo], hooks=seen.append) as factory:
        tool = factory.create(WORKER)
        await tool.execute(None, {"task": "go"})
        await tool.with_folder(lambda: tmp_path / "state").execute(None, {"task": "go"})
    shared, own = (update.child_thread_id for update in seen[::2])
    assert shared.split("/")[0] != own.split("/")[0]
    assert list((tmp_path / "state" / "logs").glob("*.db"))


@pytest.mark.requirement("SDK-44")
async def test_hooks_that_fail_do_not_hurt_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def broken(update: SubagentProgress) -> None:
        raise OSError("the screen is gone")

    tool = SubagentTool(WORKER, model=scripted(ECHOES), tools=[echo], hooks=broken)
    with caplog.at_level(logging.WARNING, logger="retinue.subagent"):
        assert (await tool.execute(None, {"task": "go"})).output == "said hi"
    assert caplog.messages == ["Failed to emit subagent progress event: the screen is gone"] * 2
