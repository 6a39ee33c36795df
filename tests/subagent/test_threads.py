"""Tests of a child's input, of its parent's view of it, and of the thread of each event."""

from typing import Any

import pytest

import retinue
from retinue import Profile
from retinue.core.events import Event, Message, ToolCall, ToolResult
from retinue.core.messages import AssistantTurn, Call, ToolTurn, UserTurn
from retinue.log.threads import fold_thread
from retinue.subagent import SubagentConfig, SubagentFactory, SubagentTool
from retinue.testing import scripted
from tests.subagent.agents import Spy, calls, echo, spy

FAMILY: dict[str, Any] = {
    "main": [calls("subagent_worker", task="inspect"), {"text": "told: {{last_result}}"}],
    "worker": [
        {"text": "let me look", "thinking": "hmm", **calls("echo", message="a secret")},
        {"text": "nothing to see"},
    ],
}


async def run_family() -> tuple[list[Event], Spy]:
    model = spy(FAMILY)
    worker = SubagentTool(SubagentConfig("worker"), tools=[echo]).profile
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=model, tools=[worker]), "go")
        return [event async for event in run.events()], model


@pytest.mark.requirement("SDK-3", "SDK-4")
async def test_the_parents_model_sees_the_final_text_and_nothing_else() -> None:
    _, model = await run_family()
    last = model.asked("main")[-1].thread
    assert last == [
        UserTurn("go"),
        AssistantTurn("", (Call("call_1_1", "subagent_worker", {"task": "inspect"}),)),
        ToolTurn("call_1_1", "subagent_worker", "nothing to see"),
    ]
    assert "secret" not in repr(model.asked("main"))


@pytest.mark.requirement("SDK-4", "SDK-47")
async def test_each_event_is_in_the_thread_of_its_run() -> None:
    events, _ = await run_family()
    of_main = [event.body for event in events if event.run == 0]
    assert [body.name for body in of_main if isinstance(body, ToolCall)] == ["subagent_worker"]
    assert [body.text for body in of_main if isinstance(body, ToolResult)] == ["nothing to see"]
    assert [body.text for body in of_main if isinstance(body, Message)] == ["told: nothing to see"]
    assert fold_thread(events, 0) == [
        UserTurn("go"),
        AssistantTurn("", (Call("call_1_1", "subagent_worker", {"task": "inspect"}),)),
        ToolTurn("call_1_1", "subagent_worker", "nothing to see"),
        AssistantTurn("told: nothing to see"),
    ]
    child = fold_thread(events, 1)
    assert child[0] == UserTurn("inspect")
    assert child[2] == ToolTurn("call_1_1", "echo", "a secret")
    assert child[-1] == AssistantTurn("nothing to see")
    said = [event.body.text for event in events if isinstance(event.body, Message)]
    assert said.count("nothing to see") == 1


@pytest.mark.requirement("SDK-1", "SDK-27")
async def test_each_run_starts_with_its_task_as_plain_text_and_nothing_else() -> None:
    model = spy({"worker": [calls("echo", message="x"), {"text": "over"}]})
    async with SubagentFactory(model=model, tools=[echo]) as factory:
        tool = factory.create(SubagentConfig("worker"))
        await tool.execute(None, {"task": "first"})
        await tool.execute(None, {"task": '{"second": "{{last_result}}"}'})
    starts = [request for request in model.requests if request.turn == 1]
    assert [request.thread for request in starts] == [
        [UserTurn("first")],
        [UserTurn('{"second": "{{last_result}}"}')],
    ]
    assert len({(request.ref.tree, request.ref.run) for request in starts}) == 2
    assert len({request.ref.subagent_id for request in starts}) == 2


@pytest.mark.requirement("SDK-3", "SDK-38")
@pytest.mark.parametrize(
    ("texts", "answer"),
    [
        (["first", "second", "third"], "third"),
        (["first", "second", ""], "second"),
        (["first", "", ""], "first"),
        (["", "", "only"], "only"),
        (["", "", ""], ""),
    ],
)
async def test_the_answer_is_the_last_message_that_has_text(texts: list[str], answer: str) -> None:
    *before, last = texts
    replies = [{"text": text, **calls("echo", message="x")} for text in before]
    model = scripted({"worker": [*replies, {"text": last}]})
    outcome = await SubagentTool(SubagentConfig("worker"), model=model, tools=[echo]).execute(None, {"task": "go"})
    assert (outcome.success, outcome.output) == (True, answer)
