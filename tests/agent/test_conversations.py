"""A conversation: a run that waits for the next message, can be interrupted, and ends once; whole after every crash."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, ConfigError, Limits, Profile, RetinueError, Task, tool
from retinue.core.events import (
    ApprovalDecided,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunWaiting,
    ToolCall,
    ToolResult,
    TurnStarted,
)
from retinue.core.messages import INTERRUPTED_TURN, AssistantTurn, ToolTurn, Turn, UserTurn
from retinue.log.threads import fold_interrupted_runs, fold_thread
from retinue.supervisor.run_roles import INTERRUPTED_CALL
from retinue.testing import ManualClock, scripted
from tests.crash.test_library import Crash
from tests.supervisor.tree.kit import Talk, bodies, call, main, spawn

HELLO = Task("hello", conversation=True)


async def test_it_waits_after_each_answer_and_ends_once_as_done() -> None:
    async with retinue.open() as r:
        talk = Talk(await r.spawn(main({"main": ["one", "two"]}), HELLO))
        assert await talk.next(RunWaiting) == RunWaiting()
        assert await talk.run.state() == "waiting"
        assert await r.control.result(talk.run.tree) is None
        assert await talk.say("and now?") == RunWaiting()
        assert await talk.run.state() == "waiting"
        events = await talk.end()
        assert await r.control.end_conversation(talk.run.tree) is False
        assert (await talk.run.send("late")).state == "too_late"
        result = await talk.run.result()
    assert (result.status, result.final_response, result.total_turns) == ("done", "two", 2)
    assert [event.kind for event in events].count("run.ended") == 1
    assert [turn.text for turn in fold_thread(events, 0)] == ["hello", "one", "and now?", "two"]


async def test_its_clock_stands_still_while_it_waits() -> None:
    clock = ManualClock()
    slow = {"text": "one", "delay": 40}
    async with retinue.open(clock=clock) as r:
        profile = Profile("main", model=scripted({"main": [slow, slow, slow]}, clock=clock))
        talk = Talk(await r.spawn(profile, HELLO, limits=Limits(seconds=100, stall=60)))
        await talk.next(TurnStarted)
        await clock.advance(40)
        await talk.next(RunWaiting)
        await clock.advance(100_000)
        await talk.run.send("more")
        await talk.next(TurnStarted)
        await clock.advance(40)
        await talk.next(RunWaiting)
        await clock.advance(100_000)
        assert await talk.run.state() == "waiting"
        await talk.run.send("too much")  # 80 of 100 seconds are used
        await talk.next(TurnStarted)
        await clock.advance(20)
        assert (await talk.run.result()).status == "timed_out"


async def test_the_limit_of_turns_is_that_of_each_message() -> None:
    look = call("glob", pattern="*")
    async with retinue.open() as r:
        talk = Talk(
            await r.spawn(main({"main": [look, "one", look, look, look, "two"]}), HELLO, limits=Limits(turns=2))
        )
        assert await talk.next(RunWaiting) == RunWaiting()
        limited = await talk.say("look around")
        assert (limited.after, limited.text) == (
            "limited",
            "limit of 2 turns reached; your next message gets as many again",
        )
        assert await talk.say("go on") == RunWaiting()
        assert (await talk.run.result() if await talk.end() else None).final_response == "two"


async def test_a_spent_budget_ends_it_as_any_run() -> None:
    usage = {"input_tokens": 60_000, "output_tokens": 10}
    agents = {"main": [{"text": "one", "usage": usage}, {"text": "two", "usage": usage}]}
    async with retinue.open() as r:
        talk = Talk(await r.spawn(main(agents), HELLO, limits=Limits(tokens=60_010)))
        await talk.next(RunWaiting)
        await talk.run.send("more")
        result = await talk.run.result()
    assert result.status == "limited"


async def test_what_goes_wrong_in_a_turn_does_not_end_it() -> None:
    agents = {
        "main": [{"error": "no such model", "status": 404}, {"refuse": "I will not."}, {"cut": "I was cut."}, "fine"]
    }
    async with retinue.open() as r:
        talk = Talk(await r.spawn(main(agents), HELLO))
        failed = await talk.next(RunWaiting)
        assert (failed.after, failed.text) == ("failed", "Request rejected (404): no such model")
        assert await talk.say("please") == RunWaiting("refused", "I will not.")
        assert (await talk.say("again")).after == "failed"
        assert await talk.say("once more") == RunWaiting()
        events = await talk.end()
    said = [turn.text for turn in fold_thread(events, 0)]
    assert said == ["hello", "please", "again", "I was cut.", "once more", "fine"]


async def test_words_sent_while_it_works_steer_it() -> None:
    gate, passed = asyncio.Event(), asyncio.Event()

    @tool
    async def work() -> str:
        """Works."""
        passed.set()
        await gate.wait()
        return "worked"

    async with retinue.open(mode="yes") as r:
        talk = Talk(await r.spawn(main({"main": [call("work"), "one"]}, tools=[work]), HELLO))
        await passed.wait()
        assert (await talk.run.send("quickly")).state == "queued"
        gate.set()
        await talk.next(RunWaiting)
        events = await talk.end()
    assert [event.kind for event in events].count("run.waiting") == 1
    assert [turn.text for turn in fold_thread(events, 0)] == ["hello", "", "worked", "quickly", "one"]


def _hang() -> tuple[asyncio.Event, Any]:
    begun = asyncio.Event()

    @tool
    async def hang() -> str:
        """Never ends."""
        begun.set()
        await asyncio.get_running_loop().create_future()
        return "never"

    return begun, hang


async def test_an_interrupt_ends_the_turn_and_not_the_run() -> None:
    begun, hang = _hang()
    quick_and_slow = {"text": "I try.", "tools": [{"name": "hang"}, {"name": "glob", "args": {"pattern": "*.none"}}]}
    async with retinue.open(mode="yes") as r:
        talk = Talk(await r.spawn(main({"main": [quick_and_slow, "fine"]}, tools=[hang, "glob"]), HELLO))
        assert await r.control.interrupt_turn(talk.run.tree, 5) is False
        await begun.wait()
        await talk.next(ToolResult)
        assert await talk.interrupt() == RunWaiting("interrupted")
        assert await r.control.interrupt_turn(talk.run.tree) is False
        assert await talk.say("leave it") == RunWaiting()
        events = await talk.end()
    results = {body.name: (body.success, body.outcome, body.text) for body in bodies(events, ToolResult)}
    assert results["hang"] == (False, "interrupted", INTERRUPTED_CALL)
    assert results["glob"][:2] == (True, "")
    thread = fold_thread(events, 0)
    assert [turn.name for turn in thread if isinstance(turn, ToolTurn)] == ["hang", "glob"]
    assert thread[4:] == [
        UserTurn(INTERRUPTED_TURN, "notice"),
        UserTurn("leave it", "user"),
        AssistantTurn("fine"),
    ]


async def test_a_model_call_is_interrupted_and_what_it_said_is_kept() -> None:
    class Speaker:
        name = "speaker"

        def __init__(self) -> None:
            self.spoken = asyncio.Event()
            self.threads: list[list[Turn]] = []

        async def complete(self, request: Any, on_delta: Any) -> Any:
            self.threads.append(list(request.thread))
            if request.turn == 1:
                on_delta("text", "One, two, ")
                on_delta("text", "three")
                self.spoken.set()
                await asyncio.get_running_loop().create_future()
            return retinue.core.messages.Reply("four")

    model = Speaker()
    async with retinue.open() as r:
        talk = Talk(await r.spawn(Profile("main", model=model), HELLO))
        await model.spoken.wait()
        assert await talk.interrupt() == RunWaiting("interrupted")
        await talk.say("go on")
        events = await talk.end()
    assert [body.text for body in bodies(events, Message)] == ["One, two, three", "four"]
    assert model.threads[1] == [
        UserTurn("hello"),
        AssistantTurn("One, two, three"),
        UserTurn(INTERRUPTED_TURN, "notice"),
        UserTurn("go on", "user"),
    ]
    assert fold_thread(events, 0) == [*model.threads[1], AssistantTurn("four")]


async def test_an_interrupted_question_is_closed_and_its_call_was_not_run() -> None:
    asked = asyncio.Event()

    async def ponder(question: Approval) -> Allow:
        asked.set()
        await asyncio.get_running_loop().create_future()
        return Allow()

    async with retinue.open(approver=ponder) as r:
        talk = Talk(await r.spawn(main({"main": [call("shell", command="touch x"), "fine"]}), HELLO))
        await asked.wait()
        await talk.interrupt()
        assert await r.control.pending() == []
        assert await talk.run.state() == "waiting"
        events = await talk.end()
    [decided] = bodies(events, ApprovalDecided)
    assert (decided.allowed, decided.reason, decided.by) == (False, "the turn was interrupted", "user")
    [result] = bodies(events, ToolResult)
    assert result.text == "The user denied this call: the turn was interrupted"


async def test_an_interrupt_cancels_the_children_it_waits_for_and_spares_those_in_the_background() -> None:
    _, hang = _hang()
    agents = {
        "main": [
            spawn({"task": "b", "subagent_id": "b"}, background=True),
            spawn({"task": "a", "subagent_id": "a"}),
            "fine",
        ],
        "a": [call("hang")],
        "b": [call("hang")],
    }
    async with retinue.open(mode="yes") as r:
        talk = Talk(await r.spawn(main(agents, tools=[hang, "spawn_subagents"]), HELLO))
        await talk.next(ToolCall, number=2)
        await talk.interrupt()
        info = (await r.control.list_trees(live=True))[0]
        assert [row.state for row in info.runs] == ["waiting", "running", "cancelled"]
        events = await talk.end()
    assert {e.run: e.body.status for e in events if isinstance(e.body, RunEnded)} == {
        0: "done",
        1: "cancelled",
        2: "cancelled",
    }


async def test_children_in_the_background_go_on_and_their_endings_are_told() -> None:
    gate = asyncio.Event()

    @tool
    async def work() -> str:
        """Works."""
        await gate.wait()
        return "worked"

    agents = {
        "main": [spawn({"task": "a", "subagent_id": "a"}, background=True), "started", "it is done"],
        "a": [call("work"), "a is done"],
    }
    async with retinue.open(mode="yes") as r:
        talk = Talk(await r.spawn(main(agents, tools=[work, "spawn_subagents"]), HELLO))
        await talk.next(RunWaiting)
        assert await talk.run.state() == "waiting"
        gate.set()
        assert (await talk.next(Inbox)).about == 1
        await talk.next(RunWaiting)
        events = await talk.end()
    assert [body.text for body in bodies(events, Message, run=0)] == ["started", "it is done"]


async def test_it_can_be_ended_in_the_middle_of_a_turn_and_cancelled_while_it_waits() -> None:
    async with retinue.open() as r:
        talk = Talk(await r.spawn(main({"main": ["one", {"hang": True}]}), HELLO))
        await talk.next(RunWaiting)
        await talk.run.send("more")
        await talk.next(TurnStarted)
        await talk.end()
        assert (await talk.run.result()).status == "done"
        other = Talk(await r.spawn(main({"main": ["one"]}), HELLO))
        await other.next(RunWaiting)
        assert await other.run.cancel()
        assert (await other.run.result()).status == "cancelled"


async def test_what_cannot_be_a_conversation_is_refused() -> None:
    async with retinue.open() as r:
        with pytest.raises(ConfigError, match="cannot hold a conversation"):
            await r.spawn(main({}, output=int), HELLO)
        with pytest.raises(ConfigError, match="cannot hold a conversation"):
            await r.spawn(Profile("main", call=lambda text, ctx: text), HELLO)
        run = await r.spawn(main({"main": ["one"]}), "hello")
        assert await r.control.end_conversation(run.tree) is False
        assert await r.control.interrupt_turn(run.tree) is False
        assert (await run.result()).final_response == "one"


async def test_an_ended_conversation_is_continued_as_one() -> None:
    async with retinue.open() as r:
        profile = main({"main": ["one", "two"]})
        talk = Talk(await r.spawn(profile, HELLO))
        await talk.next(RunWaiting)
        await talk.end()
        overrides = retinue.core.control.ResumeOverrides(profiles=[profile], conversation=True)
        again = Talk(await r.control.continue_run(talk.run.tree, 0, "back again", overrides))
        await again.next(RunWaiting)
        assert (await again.say("and more")).after == "answered"
        await again.end()


TALKED = {"main": [call("note", text="a"), "one", call("hang"), "two", "three"]}


async def test_it_goes_on_from_every_single_event() -> None:
    """Whatever the last event on disk was: everything said is there, it waits for the next message, and ends once."""
    begun, hang = _hang()
    said: list[str] = []

    @tool
    def note(text: str) -> str:
        """Writes it down, for good."""
        said.append(text)
        return "noted"

    crash = Crash(main(TALKED, tools=[note, hang]))
    async with retinue.open(mode="yes") as r:
        talk = Talk(await r.spawn(crash.profile, HELLO))
        await talk.next(RunWaiting)
        await talk.run.send("second")
        await begun.wait()
        await talk.interrupt()
        await talk.say("third")
        whole = await talk.end()
    texts = {"hello", "second", "third"}
    for cut in range(1, len(whole)):
        before = whole[:cut]
        began = any(isinstance(event.body, ToolCall) and event.body.name == "note" for event in before)
        hangs = any(isinstance(event.body, ToolCall) and event.body.name == "hang" for event in before)
        said.clear()
        begun.clear()
        async with crash.after(before) as r:
            talk = Talk(await r.resume(before[0].tree, profiles=[crash.profile]))
            await talk.next(RunResumed)
            if "second" in _list_words(before) and not hangs:
                await begun.wait()
                await talk.interrupt()
            elif not _starts_waiting(before):
                await talk.next(RunWaiting)
            assert await talk.run.state() == "waiting", cut
            events = await talk.end()
        assert said == ([] if began else ["a"]), cut
        assert events[:cut] == before
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        assert [event.kind for event in events].count("run.ended") == 1
        words = [turn.text for turn in fold_thread(events, 0) if isinstance(turn, UserTurn) and turn.source != "notice"]
        assert words == [text for text in ("hello", "second", "third") if text in _list_words(before)], cut
        calls, results = bodies(events, ToolCall), bodies(events, ToolResult)
        assert sorted(body.call_id for body in calls) == sorted(body.call_id for body in results), cut
    assert texts == set(_list_words(whole))


def _list_words(events: list[Event]) -> list[str]:
    return [event.body.task for event in events if isinstance(event.body, RunSpawned)] + [
        event.body.text for event in events if isinstance(event.body, Inbox)
    ]


def _starts_waiting(events: list[Event]) -> bool:
    """Tell if the resumed run waits at once, because it got no message since it began to wait."""
    thread = fold_interrupted_runs(events, before={})[0].thread
    return thread.waits and not thread.waiting


async def test_time_spent_waiting_does_not_count_after_a_crash() -> None:
    clock = ManualClock()
    slow = {"text": "one", "delay": 40}
    profile = Profile("main", model=scripted({"main": [slow, slow]}, clock=clock))
    async with retinue.open(clock=clock) as r:
        talk = Talk(await r.spawn(profile, HELLO, limits=Limits(seconds=100)))
        await talk.next(TurnStarted)
        await clock.advance(40)
        await talk.next(RunWaiting)
        await clock.advance(1000)
        await talk.run.send("more")
        await talk.next(TurnStarted)
        events = list(await r.control.log.read(talk.run.tree))
    assert fold_interrupted_runs(events, before={})[0].seconds == 40
    waiting = events[: [event.kind for event in events].index("run.waiting") + 1]
    async with retinue.open(clock=clock) as r:
        for event in waiting:
            r.control.log.append(event)
        talk = Talk(await r.resume(waiting[0].tree, profiles=[profile]))
        await clock.advance(1000)
        assert await talk.run.state() == "waiting"
        await talk.run.send("more")
        await talk.next(Inbox)
        events = list(await r.control.log.read(talk.run.tree))
    assert fold_interrupted_runs(events, before={})[0].seconds == 40


async def test_a_process_that_closes_leaves_a_waiting_conversation_open(tmp_path: Path) -> None:
    begun, hang = _hang()
    agents = {
        "main": [spawn({"task": "a", "subagent_id": "a"}, background=True), "one", "I see", "two"],
        "a": [call("hang")],
    }
    profile = main(agents, tools=[hang, "spawn_subagents"])
    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        talk = Talk(await r.spawn(profile, HELLO))
        await begun.wait()
        await talk.next(RunWaiting)
        waits = asyncio.create_task(talk.run.result())
        await asyncio.sleep(0)
    with pytest.raises(RetinueError, match="left open"):
        await waits
    async with retinue.open(tmp_path / ".retinue", mode="yes") as r:
        [info] = await r.control.list_trees()
        assert [(row.state, row.status) for row in info.runs] == [("waiting", None), ("cancelled", "cancelled")]
        again = Talk(await r.resume(talk.run.tree, profiles=[profile]))
        await again.next(RunResumed)
        await again.next(RunWaiting)  # after it was told that its subagent was cancelled
        await again.say("go on")
        events = await again.end()
    assert [event.kind for event in events if event.run == 0].count("run.ended") == 1
    assert [body.text for body in bodies(events, Message, run=0)] == ["one", "I see", "two"]


async def test_another_model_answers_from_the_next_turn_on_also_after_a_crash(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"agents": {"main": [name] * 4}}))
    profile = Profile("main", model=f"scripted:{tmp_path}/first.json")
    other = f"scripted:{tmp_path}/second.json"
    crash = Crash(profile)
    async with retinue.open() as r:
        talk = Talk(await r.spawn(profile, HELLO))
        await talk.next(RunWaiting)
        with pytest.raises(ConfigError, match="unknown model"):
            await r.control.change_model(talk.run.tree, 0, "nobody:knows")
        assert await r.control.change_model(talk.run.tree, 0, other) == other
        await talk.say("and you?")
        before = list(await r.control.log.read(talk.run.tree))
        with pytest.raises(ConfigError, match="is not an open conversation"):
            await r.control.change_model(talk.run.tree, 1, other)
    async with crash.after(before) as r:
        again = Talk(await r.resume(before[0].tree, profiles=[profile]))
        await again.next(RunResumed)
        await again.say("still you?")
        events = await again.end()
    assert [body.text for body in bodies(events, Message)] == ["first", "second", "second"]


CHANGES = {
    "main": [
        call("write", path="a.txt", content="1\n"),
        "one",
        call("write", path="a.txt", content="2\n"),
        "two",
        call("write", path="b.txt", content="b\n"),
        "three",
    ]
}


async def test_its_changes_are_applied_message_by_message(tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("kept\n")
    async with retinue.open(tmp_path / ".retinue", project=tmp_path, mode="yes") as r:
        talk = Talk(await r.spawn(main(CHANGES, workspace="copy"), HELLO))
        tree, control = talk.run.tree, r.control
        await talk.next(RunWaiting)
        assert "+1" in await control.diff(tree)
        assert [file.path for file in await control.apply(tree)] == ["a.txt"]
        assert (tmp_path / "a.txt").read_text() == "1\n"
        assert await control.diff(tree) == ""
        assert await control.apply(tree) == ()
        await talk.say("more")
        assert "-1\n+2" in await control.diff(tree)
        assert [(file.path, file.status) for file in await control.apply(tree)] == [("a.txt", "modified")]
        await talk.say("and more")
        await talk.end()
        assert [file.path for file in await control.apply(tree)] == ["b.txt"]  # a.txt was applied before
    assert {path.name: path.read_text() for path in tmp_path.glob("*.txt")} == {
        "a.txt": "2\n",
        "b.txt": "b\n",
        "kept.txt": "kept\n",
    }
