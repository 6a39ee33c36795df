"""A recorded tree plays again through the real supervisor and loop: the same requests, calls and endings, whatever
happened in it, and up to every place where a record can end."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import retinue
from retinue import Allow, Approval, Context, Deny, Event, Limits, Profile, Task, tool
from retinue.build.supervisor import make_replay
from retinue.core.events import ApprovalDecided, RunEnded, RunResumed, RunSpawned, ToolCall, ToolResult
from retinue.core.messages import Call, ProviderToolCall, Reply
from retinue.core.records import Difference, RunRecord, compare_runs
from retinue.log.threads import RESUMED, fold_records, fold_thread
from retinue.testing import MemoryLog, scripted
from tests.supervisor.tree.kit import Talk, bodies, call, main, spawn, tree, until


async def replay(events: list[Event]) -> tuple[list[Difference], dict[int, RunRecord], list[Event]]:
    """Replay the events. Return the differences, the records that were played, and the events of the replay."""
    recorded = fold_records(events)
    played = make_replay(recorded)
    log = MemoryLog()
    control = played.open_control(log, Path.cwd())
    run = await control.spawn(*played.primary)
    await run.result()
    again = await log.read(run.tree)
    await control.close()
    now = fold_records(again)
    assert not [event for event in bodies(again, RunEnded) if "stalled" in (event.error_details or "")]
    found = [
        played.differences.get(number) or compare_runs(record, now.get(number)) for number, record in recorded.items()
    ]
    return [difference for difference in found if difference is not None], recorded, again


async def test_a_conversation_plays_again_with_its_interrupts() -> None:
    begun = asyncio.Event()

    @tool
    async def hang() -> str:
        """Never ends."""
        begun.set()
        await asyncio.get_running_loop().create_future()
        return "never"

    async def ponder(question: Approval) -> Allow:
        if question.tool == "shell":
            begun.set()
            await asyncio.get_running_loop().create_future()
        return Allow()

    agents = {"main": [call("hang"), "one", call("shell", command="ls"), "two"]}
    async with retinue.open(approver=ponder) as r:
        talk = Talk(await r.spawn(main(agents, tools=[hang, "shell"]), Task("hello", conversation=True)))
        await begun.wait()
        await talk.interrupt()
        await talk.say("leave it")
        begun.clear()
        await talk.run.send("list")
        await begun.wait()
        await talk.interrupt()
        await talk.say("leave that too")
        events = await talk.end()
    differences, _, again = await replay(events)
    assert differences == []
    assert fold_thread(again, 0) == fold_thread(events, 0)


def answer(text: str) -> dict[str, Any]:
    return {"text": text}


NESTED = {
    "main": [spawn({"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}), answer("all")],
    "a": [{"thinking": "hm", **spawn({"task": "twin"}, {"task": "twin"})}, answer("A")],
    "b": [spawn({"task": "twin"}, {"task": "twin"}), call("glob", pattern="*.nothing"), answer("B")],
    "*": [call("read", path="no such file"), answer("leaf")],
}
BACKGROUND = {
    "main": [
        spawn({"task": "slow", "subagent_id": "slow"}, background=True),
        {"text": "I wait"},
        call("get_agent", agent_id=1),
        answer("done waiting"),
    ],
    "slow": [call("glob", pattern="x"), answer("slow answer")],
}
WRONG = {
    "main": [
        {
            "tools": [
                {"name": "nope", "args": {}},
                {"name": "read", "args": {}},
                {"name": "glob", "args": {"pattern": "*"}},
            ]
        },
        answer("well"),
    ]
}


@pytest.mark.parametrize("agents", [NESTED, BACKGROUND, WRONG], ids=["nested", "background", "wrong"])
async def test_every_beginning_of_a_record_plays_without_a_difference(agents: dict[str, Any], tmp_path: Path) -> None:
    _, events = await tree(agents, project=tmp_path)
    for length in range(1, len(events) + 1, 3):
        differences, recorded, _ = await replay(events[:length])
        assert differences == [], length
        assert len(recorded) == len(bodies(events[:length], RunSpawned))
    differences, recorded, again = await replay(events)
    assert differences == []
    assert not any(record.cut for record in recorded.values())
    assert {e.run: (e.path, e.body.label) for e in again if isinstance(e.body, RunSpawned)} == {
        e.run: (e.path, e.body.label) for e in events if isinstance(e.body, RunSpawned)
    }


@pytest.mark.parametrize(
    "last",
    [{"refuse": "I will not"}, {"error": "no such model", "status": 404}, {"crash": "boom"}, {"cut": "half a"}],
    ids=lambda last: next(iter(last)),
)
async def test_an_ending_by_the_model_comes_again(last: dict[str, Any]) -> None:
    result, events = await tree({"main": [call("glob", pattern="*.nothing"), last]})
    differences, _, again = await replay(events)
    assert differences == []
    [ended] = bodies(again, RunEnded)
    assert (ended.status, ended.final_response) == (result.status, result.final_response)


async def test_a_limit_comes_again() -> None:
    _, events = await tree({"main": [call("glob", pattern="*")] * 5}, limits=Limits(turns=2))
    differences, _, again = await replay(events)
    assert (differences, bodies(again, RunEnded)[0].status) == ([], "limited")


async def test_answers_of_people_come_again_with_who_gave_them(tmp_path: Path) -> None:
    agents = {
        "main": [
            {"tools": [{"name": "write", "args": {"path": name, "content": name}} for name in ("a", "b", "c")]},
            call("shell", command="echo hi"),
            answer("so be it"),
        ]
    }

    async def approver(question: Approval) -> Allow | Deny:
        match question.args.get("path"):
            case "a":
                return Deny("not this one")
            case "b":
                return Allow(args={"path": "d", "content": "edited"})
        return Allow(scope="run")

    _, events = await tree(agents, mode="ask", approver=approver, project=tmp_path, deny=["shell"])
    before = sorted(tmp_path.iterdir())
    differences, _, again = await replay(events)
    assert differences == []
    assert sorted(tmp_path.iterdir()) == before
    assert [(d.call_id, d.allowed, d.by, d.args) for d in bodies(again, ApprovalDecided)] == [
        (d.call_id, d.allowed, d.by, d.args) for d in bodies(events, ApprovalDecided)
    ]
    assert len(bodies(again, ApprovalDecided)) == 4


async def test_a_run_that_nobody_confirmed_ends_so_again() -> None:
    _, events = await tree({"main": [{"tools": [{"name": "shell", "args": {"command": "ls"}}] * 2}]}, mode="ask")
    differences, _, again = await replay(events)
    assert (differences, bodies(again, RunEnded)[0].final_response) == ([], "Run requires confirmation")


async def test_a_question_that_nobody_could_be_asked_stays_unasked() -> None:
    @tool(tier="observe")
    async def inquire(ctx: Context) -> str:
        """Asks a person."""
        return str(await ctx.ask_person("which", {"a": 1}, "which one?"))

    async with retinue.open(mode="ask") as r:
        run = await r.spawn(main({"main": [call("inquire"), "end"]}, tools=[inquire]), "go")
        events = [event async for event in run.events()]
    differences, _, again = await replay(events)
    assert (differences, bodies(again, ApprovalDecided)) == ([], [])
    assert [body.text for body in bodies(again, ToolResult)] == ["Nobody could be asked.", "None"]


async def test_host_functions_and_callables_do_again_what_they_did_but_are_not_run() -> None:
    ran = []

    @tool
    async def ask_around(ctx: Context, what: str) -> str:
        """Asks a helper."""
        ran.append(what)
        ctx.emit("I ask around")
        assert await ctx.approve("ask", what=what)
        helper = Profile("helper", model=scripted({"helper": [{"text": "from the helper"}]}))
        return (await (await ctx.spawn(helper, what)).result()).final_response

    async def foreign(task: str, ctx: Context) -> str:
        ctx.emit("working")
        ran.append(task)
        return (
            await (await ctx.spawn(Profile("helper", model=scripted({"helper": [{"text": "yes"}]})), "x")).result()
        ).name

    profile = main(
        {"main": [call("ask_around", what="it"), call("subagent_foreign", task="go"), {"text": "ok"}]},
        tools=[ask_around, Profile("foreign", call=foreign)],
    )
    async with retinue.open(approver=_yes) as r:
        run = await r.spawn(profile, "go")
        events = [event async for event in run.events()]
    differences, recorded, _ = await replay(events)
    assert (differences, ran, len(recorded)) == ([], ["it", "go"], 4)


async def _yes(question: Approval) -> Allow:
    return Allow()


async def test_typed_output_the_reminder_and_words_of_the_user_come_again() -> None:
    agents = {
        "main": [{"text": "I forgot"}, {"hang": True}, call("final_answer", risk=3)],
    }
    schema = {"type": "object", "properties": {"risk": {"type": "integer"}}, "required": ["risk"]}
    model = _Held(agents)
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", "Be.", model=model, output=schema), Task("go", context="for context"))
        await model.asked.wait()
        await run.send("hurry")
        model.go.set()
        events = [event async for event in run.events()]
        result = await run.result()
    assert result.structured == {"risk": 3}
    differences, _, again = await replay(events)
    assert (differences, bodies(again, RunEnded)[0].structured) == ([], {"risk": 3})


class _Held:
    """A scripted model whose second turn waits for the test."""

    def __init__(self, agents: dict[str, Any]) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        self._inner = scripted({"main": [agents["main"][0], call("list_agents"), agents["main"][2]]})

    async def complete(self, request: Any, on_delta: Any) -> Any:
        if request.turn == 2:
            self.asked.set()
            await self.go.wait()
        return await self._inner.complete(request, on_delta)


@pytest.mark.parametrize("status", ["cancelled", "timed_out"])
async def test_of_a_stopped_tree_all_that_is_there_is_played(status: str) -> None:
    agents = {
        "main": [{"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": t}]}} for t in ("quick", "long")]}],
        "quick": [answer("quick")],
        "long": [call("glob", pattern="*.nothing"), {"hang": True}],
    }
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(agents), "go")
        await until(run, ToolResult, number=2)
        r.control.trees[run.tree].runs[0].stop(status)  # type: ignore[attr-defined]
        events = [event async for event in run.events()]
    differences, recorded, again = await replay(events)
    assert differences == []
    assert {number: bool(record.cut) for number, record in recorded.items()} == {0: True, 1: False, 2: True}
    assert bodies(again, ToolResult, run=2) != []
    assert [ended.status for ended in bodies(again, RunEnded, run=0)] == [status]


async def test_a_resumed_run_is_played_up_to_there() -> None:
    _, events = await tree({"main": [call("glob", pattern="*.nothing"), answer("x")]})
    at = next(n for n, event in enumerate(events) if isinstance(event.body, ToolResult)) + 1
    resumed = msgspec.structs.replace(events[at], body=RunResumed())
    differences, recorded, _ = await replay([*events[:at], resumed, *events[at:]])
    assert (differences, recorded[0].cut) == ([], RESUMED)


async def test_runs_that_people_continued_are_played_too() -> None:
    agents = {
        "main": [spawn({"task": "x", "subagent_id": "mid"}), answer("all")],
        "mid": [spawn({"task": "y", "subagent_id": "leaf"}), answer("M")],
        "leaf": [call("glob", pattern="*.nothing"), answer("L")],
    }
    profile = main(agents)
    async with retinue.open(mode="yes") as r:
        tree = (await r.run(profile, "go")).tree
        for run in (2, 1, 3):  # the leaf, what is above it, and the leaf that was continued
            await (await r.continue_run(f"{tree}/{run}", "more", profiles=[profile])).result()
        events = list(await r.control.log.read(tree))
    differences, recorded, _ = await replay(events)
    assert (differences, len(recorded), recorded[3].spawned.continues) == ([], 7, 2)
    differences, _, _ = await replay(changed(events, RunEnded, 6, final_response="another"))
    assert [(one.run, one.what) for one in differences] == [(6, "ending")]


def changed(events: list[Event], kind: type[Any], run: int, **fields: Any) -> list[Event]:
    return [
        msgspec.structs.replace(e, body=msgspec.structs.replace(e.body, **fields))
        if isinstance(e.body, kind) and e.run == run
        else e
        for e in events
    ]


async def test_where_a_run_departs_is_told_once_with_its_turn() -> None:
    _, events = await tree(NESTED)
    differences, _, _ = await replay(changed(events, RunEnded, 1, final_response="another"))
    [one] = differences
    assert (one.path, one.what, one.turn) == ("/main/subagent-1", "ending", 2)
    assert "-  another" in one.lines and "+  A" in one.lines
    differences, _, _ = await replay(changed(events, ToolCall, 2, tier="observe"))
    assert [(d.run, d.turn, d.what) for d in differences] == [(2, 1, "turn")]
    other = b'{"name":"main","instructions":"You are someone else."}'
    differences, _, _ = await replay(changed(events, RunSpawned, 0, profile=msgspec.Raw(other)))
    assert differences == []  # what is recorded is what is played


async def test_a_record_that_ends_too_early_for_what_the_run_does() -> None:
    """The record is of a run that stopped after one turn, so a loop that makes a second model call departs from it."""
    _, events = await tree({"main": [call("glob", pattern="*.nothing"), answer("x")]})
    second = next(n for n, e in enumerate(events) if e.kind == "turn.started" and e.body.turn == 2)  # type: ignore[union-attr]
    differences, _, _ = await replay([*events[:second], events[-1]])
    assert [(d.turn, d.what, d.lines[-1]) for d in differences] == [(2, "turn", "+asks for turn 2")]


class Searching:
    """A model whose provider searches while it answers."""

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        found = ProviderToolCall(
            f"s{request.turn}", "web_search", {"query": "x"}, "found", content={"n": 1}, origin="here"
        )
        calls = (Call("a", "list_agents", {}),) if request.turn == 1 else ()
        return Reply("looking", calls, natives=(found,))


async def test_what_the_provider_searched_is_played_as_that(tmp_path: Path) -> None:
    async with retinue.open(project=tmp_path, mode="yes") as r:
        run = await r.spawn(Profile("main", model=Searching(), tools=["list_agents"]), "go")
        events = [event async for event in run.events()]
    for cut in range(1, len(events) + 1):
        differences, recorded, again = await replay(events[:cut])
        assert not differences, (cut, differences)
    assert [turn.reply.natives[0].id for turn in recorded[0].turns if turn.reply] == ["s1", "s2"]
    assert [body.tier for body in bodies(again, ToolCall)] == ["provider", "observe", "provider"]


async def test_a_workspace_that_was_made_ready_is_no_difference(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("workspace_setup: echo set > setup.txt\n")
    model = scripted({"main": [call("shell", command="cat setup.txt"), answer("done")]})
    async with retinue.open(project=tmp_path, mode="yes", config=tmp_path / "r.yaml") as r:
        run = await r.spawn(Profile("main", model=model, workspace="copy"), "go")
        events = [event async for event in run.events()]
    assert [body.name for body in bodies(events, ToolCall)] == ["workspace_setup", "shell"]
    assert (await replay(events))[0] == []
