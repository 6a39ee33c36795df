"""A process that may no longer write its log: its runs stop, end once and say why; none goes on unlogged."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

import retinue
from retinue import Event, Retinue
from retinue.core.errors import LogLost
from retinue.core.events import RunEnded, RunStarted, ToolResult, UsageReported
from retinue.core.ports import Log
from retinue.log.forwarding_log import ForwardingLog
from retinue.log.sqlite import SqliteLog
from tests.supervisor.tree.kit import bodies, call, main, until

LOST = "may no longer write the log"


class LosingLog(ForwardingLog):
    """The log of a tree, which another process takes when `lose` is called. `offered` are all events of the tree,
    whether the log took them or not."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.offered: list[Event] = []
        self.taken: list[SqliteLog] = []

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        self.offered.append(event)
        return super().append(event, wait)

    async def lose(self) -> None:
        """Have the log taken, and raise LogLost once this process knows."""
        log = self._log
        assert isinstance(log, SqliteLog)
        log.path.with_suffix(".lock").unlink()
        self.taken.append(SqliteLog(log.folder))
        await self.flush()


@asynccontextmanager
async def open_losing(folder: Path) -> AsyncIterator[tuple[Retinue, list[LosingLog]]]:
    """Open Retinue, whose log is lost inside the block. asyncio must have nothing to report."""
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told))
    logs: list[LosingLog] = []
    with pytest.raises(LogLost, match=LOST):
        async with retinue.open(folder, mode="yes") as r:
            yield r, logs
    gc.collect()
    for log in logs:
        for taken in log.taken:
            await taken.close()
    assert said == []


@pytest.mark.parametrize("raises", [False, True])
async def test_a_run_whose_log_is_lost_asks_its_model_no_more(tmp_path: Path, raises: bool) -> None:
    calls: list[str] = []

    @retinue.tool(tier="observe", repeatable=True)
    async def look() -> str:
        """Lose the log at the second call."""
        calls.append("look")
        if len(calls) == 2:
            with suppress(*([] if raises else [LogLost])):
                await logs[0].lose()
        return "seen"

    script = {"main": [call("look") for _ in range(5)]}
    async with open_losing(tmp_path / ".retinue") as (r, logs):
        run = await r.spawn(main(script, tools=[look]), "go")
        logs.append(r.control.trees[run.tree].wrap_log(LosingLog))
        result = await run.result()
        assert (result.status, len(calls), result.tool_count) == ("failed", 2, 2)
        assert LOST in result.final_response
        offered = logs[0].offered
    # The second result was refused, and the run ended before its model could read it.
    assert [len(bodies(offered, kind)) for kind in (UsageReported, ToolResult, RunEnded)] == [2, 2, 1]


async def test_a_child_whose_log_is_lost_ends_and_so_does_its_parent(tmp_path: Path) -> None:
    @retinue.tool(tier="observe", repeatable=True)
    async def lose() -> str:
        """Lose the log."""
        with suppress(LogLost):
            await logs[0].lose()
        return "lost"

    script = {
        "main": [call("subagent_kid", task="x"), {"text": "end"}],
        "kid": [call("lose"), {"text": "end"}],
    }
    kid = retinue.Profile("kid", tools=[lose])
    async with open_losing(tmp_path / ".retinue") as (r, logs):
        run = await r.spawn(main(script, tools=[kid]), "go")
        logs.append(r.control.trees[run.tree].wrap_log(LosingLog))
        result = await run.result()
        assert (result.status, [child.status for child in result.children]) == ("failed", ["failed"])
        assert LOST in result.final_response and LOST in result.children[0].final_response
    assert [event.run for event in logs[0].offered if isinstance(event.body, RunEnded)] == [1, 0]


async def test_a_message_to_a_run_whose_log_is_lost_is_refused_and_the_run_ends(tmp_path: Path) -> None:
    async with open_losing(tmp_path / ".retinue") as (r, logs):
        run = await r.spawn(main({"main": [{"hang": True}]}), "go")
        logs.append(r.control.trees[run.tree].wrap_log(LosingLog))
        await until(run, RunStarted)
        with suppress(LogLost):
            await logs[0].lose()
            await run.send("the loss is noticed by the next write")
        with pytest.raises(LogLost):
            await run.send("are you there?")
        assert (await run.result()).status == "failed"
    assert len(bodies(logs[0].offered, RunEnded)) == 1


async def test_a_run_that_is_spawned_after_the_loss_fails_at_once(tmp_path: Path) -> None:
    async with open_losing(tmp_path / ".retinue") as (r, logs):
        first = await r.spawn(main({"main": [{"hang": True}]}), "go")
        logs.append(r.control.trees[first.tree].wrap_log(LosingLog))
        await until(first, RunStarted)
        with suppress(LogLost):
            await logs[0].lose()
            await first.send("the loss is noticed by the next write")
        second = await r.spawn(main({"main": [{"text": "end"}]}), "go")
        assert (await second.result()).status == "failed"
        assert (await second.result()).usage.total_tokens == 0


async def test_the_lost_log_of_another_process_does_not_end_a_run(tmp_path: Path) -> None:
    @retinue.tool(tier="observe", repeatable=True)
    async def ask_other() -> str:
        """Ask another process."""
        raise LogLost("process 7 may no longer write the log")

    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        script = {"main": [call("ask_other"), {"text": "{{last_result}}"}]}
        result = await r.run(main(script, tools=[ask_other]), "go")
    assert (result.status, LOST in result.final_response) == ("done", True)
