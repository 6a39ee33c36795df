"""The files that delegated runs leave: for every way of spawning, and right at the end of the tree."""

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Profile, Usage
from retinue.concurrency import SystemClock
from retinue.core.context import Context
from retinue.core.errors import LogLost
from retinue.core.events import ApprovalAsked, RunStarted
from retinue.log.forwarding_log import ForwardingLog
from retinue.log.memory import MemoryLog
from retinue.supervisor.run_logs import RunLogs
from retinue.supervisor.tree import Tree
from retinue.testing import scripted
from retinue.workspaces.run_folders import StateFolder
from tests.gates import until as wait_until
from tests.log.kit import make_ended, make_spawned
from tests.remote.outbox.kit import answer, ask, explorer
from tests.sandbox.hosts import host
from tests.supervisor.tree.kit import call, main, spawn, until

pytestmark = [pytest.mark.finding("S5"), pytest.mark.requirement("MASS-55")]


def spend(tokens: int, **step: Any) -> dict[str, Any]:
    return {**step, "usage": {"input_tokens": tokens, "output_tokens": 1}}


class HalfDollars:
    """Every call costs half a dollar."""

    def price(self, model: str, usage: Usage) -> Decimal:
        return Decimal("0.5")


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def check_files(folder: Path, *, turns: int, tokens: int) -> None:
    """Check that the files of an ended run agree with each other and with its events."""
    lines = (folder / "live_logs" / "events.ndjson").read_text()
    assert lines == (folder / "full_logs" / "events.ndjson").read_text()
    kinds = [json.loads(line)["kind"] for line in lines.splitlines()]
    assert (kinds[0], kinds[-1], kinds.count("turn.ended")) == ("run.spawned", "run.ended", turns)
    status = read_json(folder / "full_logs" / "status.json")
    assert (status["status"], status["turns"], status["usage"]["input_tokens"]) == ("done", turns, tokens)
    assert "## Ended: done" in (folder / "full_logs" / "transcript.md").read_text()


async def spawn_by_function(task: str, ctx: Context) -> str:
    return (await (await ctx.spawn("kid", task)).result()).final_response


@pytest.mark.requirement("MASS-51")
@pytest.mark.parametrize("way", ["subagent_kid", "spawn_subagents", "background", "python"])
async def test_every_way_of_spawning_leaves_files_and_the_summary_counts_the_whole_tree(
    tmp_path: Path, way: str
) -> None:
    step = {
        "subagent_kid": call("subagent_kid", task="x"),
        "spawn_subagents": spawn({"task": "x", "subagent_type": "kid"}),
        "background": call("subagent_kid", task="x", background=True),
    }
    steps = [spend(500, **step.get(way, {})), spend(700, text="a"), spend(300, text="end")]
    script = {"main": steps, "kid": [spend(20, **call("list_agents")), spend(5, text="seen")]}
    primary = main(script)
    if way == "python":
        script["boss"] = steps[1:]
        primary = Profile("main", call=spawn_by_function)
    kid = Profile("kid", model=scripted(script))
    async with retinue.open(tmp_path / ".retinue", mode="yes", profiles=[kid], prices=HalfDollars()) as r:
        result = await r.run(primary, "go")
    check_files(tmp_path / ".retinue" / "runs" / result.tree / "1", turns=2, tokens=25)
    summary = read_json(tmp_path / ".retinue" / "runs" / result.tree / "metrics_summary.json")
    own = {"python": (0, 0), "background": (3, 1500)}.get(way, (2, 1200))
    assert (summary["runs"], summary["ended"], summary["turns"]) == (2, 2, 2 + own[0])
    assert summary["usage"]["input_tokens"] == 25 + own[1] == result.total_usage.input_tokens
    status = read_json(tmp_path / ".retinue" / "runs" / result.tree / "1" / "full_logs" / "status.json")
    assert Decimal(status["cost"]) == Decimal("0.5") * 2
    assert Decimal(summary["cost"]) == Decimal("0.5") * (2 + own[0])
    assert summary["tool_calls"] == 1 + (way != "python")


async def test_the_status_says_that_a_run_waits_for_a_person(tmp_path: Path) -> None:
    script = {"main": [call("subagent_kid", task="x"), "end"], "kid": [call("shell", command="id"), "end"]}
    kid = Profile("kid", model=scripted(script))
    options: dict[str, Any] = {"wait_approvals": 60, "allow": ["subagent_kid"], "profiles": [kid]}
    async with retinue.open(tmp_path / ".retinue", **options) as r:
        run = await r.spawn(main(script), "go")
        await until(run, RunStarted, number=1)
        await until(run, ApprovalAsked, number=1)
        file = tmp_path / ".retinue" / "runs" / run.tree / "1" / "full_logs" / "status.json"
        await wait_until(lambda: file.exists() and read_json(file)["state"] == "waiting_approval")
        live = file.parents[1] / "live_logs" / "events.ndjson"
        await wait_until(lambda: '"approval.asked"' in live.read_text())  # as it happens, maybe after the status
        kinds = [json.loads(line)["kind"] for line in live.read_text().splitlines()]
        assert (kinds[0], kinds[-1]) == ("run.spawned", "approval.asked")
        # The others come when it has ended; a file that is being replaced has a second name for a moment.
        await wait_until(lambda: [entry.name for entry in file.parent.iterdir()] == ["status.json"])
        await run.cancel()
    assert read_json(file)["status"] == "cancelled"
    assert {entry.name for entry in file.parent.iterdir()} == {"status.json", "events.ndjson", "transcript.md"}


async def test_a_run_of_watch_leaves_files_too(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    async with host(work, profiles=[explorer()], runtime="inherited", serves_requests=True) as there:
        ask(there.outbox, "a-1", workspace=str(work))
        said = await answer(there.outbox, "a-1")
        assert said["status"] == "done"
        [tree] = there.trees
        await there.supervisor.close()
        runs = there.folder / "project" / ".retinue" / "runs" / tree
        status = read_json(runs / "0" / "full_logs" / "status.json")
        check_files(runs / "0", turns=status["turns"], tokens=status["usage"]["input_tokens"])
        assert read_json(runs / "metrics_summary.json")["turns"] == status["turns"] > 0


async def test_a_primary_that_delegates_nothing_leaves_none(tmp_path: Path) -> None:
    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        result = await r.run(main({"main": ["end"]}), "go")
    assert not (tmp_path / ".retinue" / "runs" / result.tree).exists()


class SlowLog(ForwardingLog):
    """Has its events written when the test says so, or not at all."""

    def __init__(self) -> None:
        super().__init__(MemoryLog())
        self.is_asked, self.may_write, self.is_lost = asyncio.Event(), asyncio.Event(), False

    async def flush(self) -> None:
        self.is_asked.set()
        await self.may_write.wait()
        if self.is_lost:
            raise LogLost("another process writes the log")


@pytest.mark.parametrize("is_lost", [False, True])
async def test_files_have_nothing_that_the_log_does_not_have(tmp_path: Path, is_lost: bool) -> None:
    log = SlowLog()
    files, tree = RunLogs(log, StateFolder(tmp_path, project=tmp_path)), Tree(log, SystemClock())
    files.keep(tree, 0)
    for event in (make_spawned(tree=tree.id), make_ended(2, tree=tree.id)):
        tree.view.apply(event)
        tree.log.append(event)
    waiting = asyncio.create_task(files.wait_until_written(tree.id, [0]))
    await log.is_asked.wait()
    assert not waiting.done() and not list(tmp_path.iterdir())
    log.is_lost = is_lost
    log.may_write.set()
    await waiting
    await files.close()
    lines = tmp_path / "runs" / tree.id / "0" / "live_logs" / "events.ndjson"
    kinds = [json.loads(line)["kind"] for line in lines.read_text().splitlines()] if lines.exists() else []
    assert kinds == ([] if is_lost else ["run.spawned", "run.ended"])
    assert files.is_kept(tree.id, 0) is not is_lost
