"""The life of a tool call in a run: functions that fail, policies and approvers that say no, late or nothing."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Context, Deny, Task, tool
from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.events import ToolCall, ToolResult
from retinue.core.limits import INLINE_BYTES
from retinue.core.ports import AttachedApprover
from retinue.core.rules import Verdict
from retinue.testing import allow_all
from tests.supervisor.tree.kit import bodies, call, main


@pytest.mark.parametrize("trouble", [SystemExit(2), asyncio.CancelledError(), ValueError("x")])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_whatever_a_function_raises_is_words_for_the_model(trouble: BaseException, kind: str) -> None:
    @tool(tier="observe", name="troubled")
    def sync() -> None:
        """Raise."""
        raise trouble

    @tool(tier="observe", name="troubled")
    async def other() -> None:
        """Raise."""
        raise trouble

    script = {"main": [call("troubled"), {"text": "{{last_result}}"}]}
    async with retinue.open() as r:
        result = await r.run(main(script, tools=[sync if kind == "sync" else other]), "go")
    assert result.status == "done"
    assert type(trouble).__name__ in result.final_response


async def test_what_a_sync_function_says_from_its_thread_keeps_the_order() -> None:
    @tool(tier="observe")
    def chatter(ctx: Context) -> str:
        """Say a lot."""
        for n in range(500):
            ctx.emit(str(n))
        return "said"

    calls = {"tools": [{"name": "chatter", "args": {}}] * 4}
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        async with retinue.open() as r:
            run = await r.spawn(main({"main": [calls, {"text": "end"}]}, tools=[chatter]), "go")
            seen = [event.seq async for event in run.events()]
            await run.result()
            assert seen == [event.seq for event in await r.control.log.read(run.tree)] == list(range(1, len(seen) + 1))
    finally:
        sys.setswitchinterval(before)


async def test_a_policy_that_denies_is_not_asked_about() -> None:
    class Never:
        def judge(self, spec: Any, args: Any, *, primary: bool, workspace: str) -> Verdict:
            return Verdict("deny", "nothing")

    supervisor = make_supervisor(Parts(project=Path.cwd(), approver=AttachedApprover(allow_all), policy=Never()))  # type: ignore[arg-type]
    run = supervisor.spawner.spawn_primary(
        main({"main": [call("list_agents"), {"text": "{{last_result}}"}]}), Task("go")
    )
    await run.join()
    assert run.result().final_response == "The user denied this call: the rule nothing forbids it"
    await supervisor.close()


async def test_a_yes_that_comes_after_the_cancel_does_nothing() -> None:
    acts: list[int] = []
    asked = asyncio.Event()

    @tool
    async def act() -> str:
        """Act."""
        acts.append(1)
        return "acted"

    async def stubborn(question: Approval) -> Allow:
        asked.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Allow()
        raise AssertionError

    async with retinue.open(approver=stubborn) as r:
        run = await r.spawn(main({"main": [call("act"), {"text": "x"}]}, tools=[act]), "go")
        await asked.wait()
        await run.cancel()
        result = await run.result()
    assert (result.status, acts, result.total_turns) == ("cancelled", [], 1)


async def test_the_approver_cannot_change_what_was_asked() -> None:
    async def sly(question: Approval) -> Allow:
        question.args["command"] = "echo something else"
        return Allow()

    async with retinue.open(approver=sly) as r:
        run = await r.spawn(main({"main": [call("shell", command="echo this"), {"text": "{{last_result}}"}]}), "go")
        assert (await run.result()).final_response == "this\n"
        assert bodies(await r.control.log.read(run.tree), ToolCall)[0].args == {"command": "echo this"}


async def test_a_function_that_asks_when_nobody_is_there_ends_its_run() -> None:
    @tool(tier="observe")
    async def wipe(ctx: Context) -> str:
        """Wipe."""
        return str(await ctx.approve("wipe"))

    async with retinue.open() as r:
        result = await r.run(main({"main": [call("wipe"), {"text": "never"}]}, tools=[wipe]), "go")
    assert (result.status, result.final_response) == ("failed", "Run requires confirmation")


async def test_denying_without_words_is_fine(tmp_path: Path) -> None:
    async def silent(question: Approval) -> Deny:
        return Deny(None)  # type: ignore[arg-type]

    async with retinue.open(tmp_path / ".retinue", approver=silent) as r:
        run = await r.spawn(main({"main": [call("shell", command="x"), {"text": "{{last_result}}"}]}), "go")
        assert (await run.result()).final_response == "The user denied this call."
        assert (await r.control.log.read(run.tree))[-1].kind == "run.ended"


async def test_the_text_of_a_refused_call_is_cut_like_any_result(tmp_path: Path) -> None:
    script = {"main": [call("x/../" + "x" * 200_000), {"text": "end"}]}
    async with retinue.open(tmp_path / ".retinue") as r:
        run = await r.spawn(main(script), "go")
        assert (await run.result()).status == "done"
        [refused] = bodies(await r.control.log.read(run.tree), ToolResult)
        kept = Path(refused.file).read_text()
        assert Path(refused.file).name.startswith("001-x_.._xxx")
    assert not refused.success and len(refused.text) <= INLINE_BYTES
    assert kept.startswith("Unknown tool 'x/../xxx") and len(kept) > 200_000
