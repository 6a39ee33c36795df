"""No answer is lost: every reply of a model to its user is shown exactly once, and so is what a subagent answered."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

import retinue
from retinue import Event, Profile, Task
from retinue.core.events import Message, RunWaiting
from retinue.core.results import UserReply
from retinue.log.activity import Entries
from retinue.surfaces.printer.printer import Printer
from retinue.testing import scripted
from tests.gates import Gate, HeldClock
from tests.supervisor.tree.kit import call, main, spawn, until
from tests.surfaces.cli.shell import Project
from tests.surfaces.cli.shell import until as wait_until

START = spawn({"task": "look", "subagent_id": "kid"}, background=True)


def count_shown(events: list[Event], result: retinue.Result[Any], text: str) -> int:
    """Count how often a watcher's screen shows a text, in the live blocks and in the answer."""
    stream = io.StringIO()
    printer = Printer(stream, color=False)
    for event in events:
        printer.show_event(event)
    answer = result.final_response if result.status == "done" else ""
    return (stream.getvalue() + answer).count(text)


def run_with_late_kid(project: Project, *arguments: str, main: list[Any], kid: str) -> tuple[str, str]:
    """Run a primary whose background child answers after the primary's first reply; what it said on both streams."""
    gate = Gate(project.folder / "gate")
    model = project.script({"main": main, "kid": [gate.reply, {"text": kid}]})
    with project.running("run", "the task", "--model", model, "--yes", *arguments) as process:
        wait_until(lambda: bool(project.rows()))
        wait_until(lambda: any((event["run"], event["kind"]) == (0, "message") for event in project.events()))
        gate.open()
        answer, live = process.communicate()
    assert process.returncode == 0, live
    return answer, live


@pytest.mark.finding("S3")
@pytest.mark.requirement("SDK-3", "SDK-38")
@pytest.mark.parametrize(
    ("first", "second", "fetch"),
    [
        ("THE REAL ANSWER: 42", "ok, noted", []),
        ("Started it, will report", "RESULT 42", [call("get_agent", agent_id=1)]),
        ("Started it, will report", "RESULT 42", [call("wait_for_background_tool", subagent_id="kid")]),
    ],
)
def test_replies_before_and_after_a_notice_are_the_answer_together(
    project: Project, first: str, second: str, fetch: list[Any]
) -> None:
    replies = [START, {"text": first}, *fetch, {"text": second}]
    answer, live = run_with_late_kid(project, main=replies, kid="THE KID SAW IT")
    assert answer == f"{first}\n\n{second}\n"
    for text in (first, second, "THE KID SAW IT"):
        assert (answer + live).count(text) == 1, live
    shown = project.retinue("tail")
    for text in (first, second, "THE KID SAW IT"):
        assert (shown.stdout + shown.stderr).count(text) == 1


@pytest.mark.finding("S3")
def test_replies_say_what_they_replied_to(project: Project) -> None:
    answer, _ = run_with_late_kid(project, "--json", main=[START, {"text": "one"}, {"text": "two"}], kid="seen")
    result = json.loads(answer)
    assert result["final_response"] == "one\n\ntwo"
    assert result["replies"] == [{"text": "one", "to": "task"}, {"text": "two", "to": "agent:1"}]


@pytest.mark.finding("S3")
async def test_a_reply_before_the_users_words_is_shown_and_the_answer_begins_after_them() -> None:
    script = {
        "main": [START, {"text": "THE REAL ANSWER: 42"}, {"text": "ok, noted"}, {"text": "bye"}],
        "kid": [{"hang": True}],
    }
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script), "go")
        await until(run, Message, number=0)
        assert (await run.send("thanks")).state == "queued"
        async for event in run.events():
            if isinstance(event.body, Message) and event.body.text == "ok, noted":
                break
        await r.control.cancel(run.tree, 1)
        result = await run.result()
        events = [event async for event in run.events()]
    assert result.final_response == "ok, noted\n\nbye"
    assert result.replies == (
        UserReply("THE REAL ANSWER: 42", "task"), UserReply("ok, noted", "user"), UserReply("bye", "agent:1"),
    )  # fmt: skip
    assert [event.body.replies_to for event in events if isinstance(event.body, Message)] == ["task", "user", "agent:1"]
    for text in ("THE REAL ANSWER: 42", "ok, noted", "bye"):
        assert count_shown(events, result, text) == 1


@pytest.mark.finding("S3")
async def test_a_reply_of_a_run_that_is_cancelled_is_shown_and_kept() -> None:
    script = {"main": [START, {"text": "THE REAL ANSWER: 42"}], "kid": [{"hang": True}]}
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script), "go")
        await until(run, Message, number=0)
        await run.cancel()
        result = await run.result()
        events = [event async for event in run.events()]
    assert (result.status, result.partial) == ("cancelled", "THE REAL ANSWER: 42")
    assert count_shown(events, result, "THE REAL ANSWER: 42") == 1


@pytest.mark.finding("S3")
async def test_typed_output_comes_only_from_final_answer_and_words_beside_it_are_shown() -> None:
    script = {"main": [{"text": "It is 42."}, call("final_answer", value=42)]}
    output = {"type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=scripted(script), output=output), "go")
        result = await run.result()
        events = [event async for event in run.events()]
    assert (result.structured, json.loads(result.final_response)) == ({"value": 42}, {"value": 42})
    assert result.replies == (UserReply("It is 42.", "task"),)
    assert count_shown(events, result, "It is 42.") == 1


@pytest.mark.finding("S3")
async def test_the_answer_of_a_subagent_has_all_its_replies_too() -> None:
    script = {
        "main": [spawn({"task": "m", "subagent_id": "middle"}), {"text": "{{last_result}}"}],
        "middle": [START, {"text": "THE REAL ANSWER: 42"}, {"text": "ok, noted"}],
        "kid": [{"delay": 1, "text": "seen"}],
    }
    clock = HeldClock()
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=scripted(script, clock=clock)), "go")
        await until(run, Message, number=1)
        clock.release()
        result = await run.result()
    answer = json.loads(result.final_response)["results"][0]["answer"]
    assert answer == "THE REAL ANSWER: 42\n\nok, noted"
    assert result.children[0].replies[1].to.startswith("agent:")


@pytest.mark.finding("S3")
@pytest.mark.parametrize(
    ("ask", "shown"),
    [
        (call("subagent_helper", task="look"), "● helper [look] disconnected (2 turns, 1 tool, 0 tokens"),
        (spawn({"task": "look", "subagent_type": "helper"}), '"status": "partial"'),
        (
            call("subagent_helper", task="look", background=True),
            "helper [look] said before it ended disconnected:\nWORDS",
        ),
    ],
)
async def test_words_of_a_subagent_that_fails_are_shown_once(ask: dict[str, Any], shown: str) -> None:
    helper = [call("glob", pattern="*") | {"text": "FIRST"}, {"cut": "WORDS"}]
    profile = Profile("helper", tools=["glob"])
    stream = io.StringIO()
    printer = Printer(stream, color=False)
    async with retinue.open(mode="yes") as r:
        model = scripted({"main": [ask, {"text": "well"}, {"text": "so be it"}], "helper": helper})
        run = await r.spawn(Profile("main", model=model, tools=[profile, "spawn_subagents"]), "go")
        await run.result()
        async for event in run.events():
            printer.show_event(event)
    assert shown in stream.getvalue()
    assert [stream.getvalue().count(text) for text in ("FIRST", "WORDS")] == [1, 1]


@pytest.mark.finding("S3")
async def test_a_reply_that_is_cut_off_is_shown() -> None:
    script = {"main": [call("glob", pattern="*") | {"text": "FIRST"}, {"cut": "THE REAL ANSW"}]}
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script), "go")
        result = await run.result()
        events = [event async for event in run.events()]
    assert result.status != "done"
    assert [count_shown(events, result, text) for text in ("FIRST", "THE REAL ANSW")] == [1, 1]
    entries = Entries()
    bodies = [entry.body for event in events if (entry := entries.apply(event)) is not None]
    assert [bodies.count(text) for text in ("FIRST", "THE REAL ANSW")] == [1, 1]


@pytest.mark.finding("S3")
async def test_an_answer_in_a_conversation_is_not_shown_again_when_it_is_cancelled() -> None:
    async with retinue.open() as r:
        run = await r.spawn(main({"main": ["FIRST", "SECOND"]}), Task("hi", conversation=True))
        await until(run, RunWaiting)
        await run.send("and then?")
        async for event in run.events():
            if isinstance(event.body, Message) and event.body.text == "SECOND":
                break
        await run.cancel()
        result = await run.result()
        events = [event async for event in run.events()]
    assert (result.status, result.partial) == ("cancelled", "SECOND")
    assert [count_shown(events, result, text) for text in ("FIRST", "SECOND")] == [1, 1]
