"""No answer is lost: every reply of a model to its user is shown exactly once, and so is what a subagent answered."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

import retinue
from retinue import Event, Profile
from retinue.core.events import Message
from retinue.core.results import UserReply
from retinue.surfaces.printer.printer import Printer
from retinue.testing import scripted
from tests.supervisor.tree.kit import call, main, spawn, until
from tests.surfaces.cli.shell import Project

START = spawn({"task": "look", "subagent_id": "kid"}, background=True)


def count_shown(events: list[Event], result: retinue.Result[Any], text: str) -> int:
    """How often a text is on the screen of somebody who watched: the live blocks, and the answer."""
    stream = io.StringIO()
    printer = Printer(stream, color=False)
    for event in events:
        printer.show_event(event)
    answer = result.final_response if result.status == "done" else ""
    return (stream.getvalue() + answer).count(text)


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
    agents = {
        "main": [START, {"text": first}, *fetch, {"text": second}],
        "kid": [{"delay": 1, "text": "THE KID SAW IT"}],
    }
    ran = project.run("--yes", agents=agents)
    assert ran.stdout == f"{first}\n\n{second}\n"
    for text in (first, second, "THE KID SAW IT"):
        assert (ran.stdout + ran.stderr).count(text) == 1, ran.stderr
    shown = project.retinue("tail")
    for text in (first, second, "THE KID SAW IT"):
        assert (shown.stdout + shown.stderr).count(text) == 1


@pytest.mark.finding("S3")
def test_replies_say_what_they_replied_to(project: Project) -> None:
    agents = {"main": [START, {"text": "one"}, {"text": "two"}], "kid": [{"delay": 1, "text": "seen"}]}
    ran = project.run("--yes", "--json", agents=agents)
    result = json.loads(ran.stdout)
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
        "kid": [{"delay": 1, "text": "seen"}],  # so that the reply comes first
    }
    async with retinue.open(mode="yes") as r:
        result = await r.run(main(script), "go")
    answer = json.loads(result.final_response)["results"][0]["answer"]
    assert answer == "THE REAL ANSWER: 42\n\nok, noted"
    assert result.children[0].replies[1].to.startswith("agent:")
