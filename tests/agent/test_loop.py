"""Tests of the agent loop with models that misbehave: the resulting thread and output."""

from pathlib import Path
from typing import Any

import pydantic

import retinue
from retinue import Context, Profile, tool
from retinue.core.events import RunSpawned, ToolCall
from retinue.core.messages import Call, Reply
from retinue.log.threads import fold_thread
from retinue.testing import allow_all, scripted
from tests.supervisor.tree.kit import bodies, call, main

HALF = "\ud83d"


class Halves:
    """A model that says half an emoji wherever it can."""

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        if request.ref.run:
            return Reply(HALF)
        calls = [Call("a", "broken", {"word": HALF}), Call("b", "spawn_subagents", {"tasks": [{"task": f"{HALF} x"}]})]
        return Reply(HALF, (calls[request.turn - 1],)) if request.turn <= len(calls) else Reply("end")


async def test_half_a_character_hurts_nobody(tmp_path: Path) -> None:
    @tool(tier="observe")
    def broken(word: str) -> str:
        """Half an emoji."""
        return word

    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        run = await r.spawn(Profile("main", model=Halves(), tools=[broken, "spawn_subagents"]), HALF)
        kinds = [event.kind async for event in run.events()]
        assert (await run.result()).status == "done"
        assert (await r.run(main({"main": [{"text": "after"}]}), "go")).final_response == "after"
        stored = await r.control.log.read(run.tree)
    assert [event.kind for event in stored] == kinds
    assert [body.task for body in bodies(stored, RunSpawned)] == ["?"]  # a call with half a character runs nothing


async def test_the_thread_leaves_out_what_the_model_never_saw() -> None:
    @tool(tier="observe")
    async def busy(ctx: Context) -> str:
        """Talk and ask."""
        ctx.emit("progress 50%")
        return str(await ctx.approve("really"))

    script = {"main": [{"text": "I will call it", **call("busy")}, {"text": "end"}]}
    async with retinue.open(approver=allow_all) as r:
        run = await r.spawn(main(script, tools=[busy]), "go")
        result = await run.result()
        _, first, second, _ = fold_thread(await r.control.log.read(run.tree), 0)
    assert (first.text, [c.name for c in first.calls], second.text) == ("I will call it", ["busy"], "True")  # type: ignore[union-attr]
    assert (result.tool_count, len(result.tool_logs)) == (1, 1)


async def test_a_provider_that_repeats_its_call_ids_confuses_nobody() -> None:
    @tool(tier="observe")
    async def echo(word: str) -> str:
        """Say it."""
        return word

    class Repeating:
        async def complete(self, request: Any, on_delta: Any) -> Reply:
            if request.turn > 2:
                return Reply("end")
            return Reply("", (Call("same", "echo", {"word": "a"}), Call("same", "echo", {"word": "b"})))

    async with retinue.open() as r:
        run = await r.spawn(Profile("main", model=Repeating(), tools=[echo]), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    assert [c.call_id for c in bodies(events, ToolCall)] == ["same", "same-2", "same-3", "same-4"]
    assert [t.text for t in fold_thread(events, 0) if type(t).__name__ == "ToolTurn"] == ["a", "b", "a", "b"]  # type: ignore[union-attr]


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    given: int = pydantic.Field(alias="theGiven")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.given


async def test_pydantic_models_with_aliases_and_computed_fields_come_back() -> None:
    profile = Profile("p", model=scripted({"p": [call("final_answer", theGiven=4)]}), output=Aliased)
    async with retinue.open() as r:
        assert (await r.run(profile, "go")).output().double == 8

        async def agent(task: str, ctx: Context) -> Aliased:
            return Aliased(theGiven=5)

        assert (await r.run(Profile("a", call=agent, output=Aliased), "go")).output().double == 10
