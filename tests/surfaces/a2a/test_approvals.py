"""Questions of served runs: answered by the host, and by the client only as data that is bound to what was shown."""

from pathlib import Path
from typing import Any

import pytest
from a2a.types import GetTaskRequest, SubscribeToTaskRequest, TaskState
from a2a.utils.errors import InvalidParamsError, UnsupportedOperationError
from google.protobuf.json_format import MessageToDict

from retinue import Allow, Deny
from retinue.core.approvals import Approval
from retinue.core.events import ApprovalDecided, ToolResult
from retinue.surfaces.a2a.server import A2aServer
from tests.surfaces.a2a.kit import answer, ask, connect, make_argocd, make_request, question_of, read_bodies, serve

SCRIPT: dict[str, Any] = {
    "argocd": [{"tools": [{"name": "deploy", "args": {"target": "prod"}}]}, {"text": "{{last_result}}"}]
}


async def pending(server: A2aServer, task: str) -> Approval:
    found = server.tasks.find(task, "anyone")
    assert found is not None
    await server.tasks.wait_until(found, lambda view: bool(view.questions))
    [asked] = await server.control.pending(task)
    return asked


async def test_a_client_allows_what_it_was_shown_and_the_run_goes_on(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd(SCRIPT), asks_client=True) as server, connect(server) as client:
        events = await ask(client, "deploy")
        task, question = events[0].task.id, question_of(events)
        assert (question["tool"], question["args"], question["agent"]) == ("deploy", {"target": "prod"}, "argocd")
        waiting = await client.get_task(GetTaskRequest(id=task))
        rest = await ask(client, "", task_id=task, parts=[answer(question)])
        done = await client.get_task(GetTaskRequest(id=task))
    assert waiting.status.state == TaskState.TASK_STATE_INPUT_REQUIRED
    assert rest[0].task.id == task and rest[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED
    assert done.artifacts[0].parts[0].text == "deployed to prod"
    [decided] = await read_bodies(tmp_path, task, ApprovalDecided)
    assert decided.by == "a2a client anyone"


async def test_a_subscription_goes_on_through_questions_to_the_end(tmp_path: Path) -> None:
    calls = [{"tools": [{"name": "deploy", "args": {"target": name}}]} for name in ("one", "two")]
    script: dict[str, Any] = {"argocd": [*calls, {"text": "both"}]}
    async with serve(tmp_path, make_argocd(script), asks_client=True) as server, connect(server) as client:
        task = (await ask(client, "deploy"))[0].task.id
        updates = client.subscribe(SubscribeToTaskRequest(id=task))
        states = [(await anext(updates)).task.status.state]
        await server.control.answer((await pending(server, task)).id, Allow(), by="user")
        async for update in updates:
            if update.HasField("status_update"):
                states.append(update.status_update.status.state)
                if states[-1] == TaskState.TASK_STATE_INPUT_REQUIRED:
                    await server.control.answer((await pending(server, task)).id, Allow(), by="user")
    asked, done = TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_COMPLETED
    assert states == [asked, asked, done]


async def test_a_blocking_answer_waits_for_what_comes_of_it(tmp_path: Path) -> None:
    calls = [{"tools": [{"name": "deploy", "args": {"target": name}}]} for name in ("one", "two")]
    script: dict[str, Any] = {"argocd": [*calls, {"text": "both"}]}
    async with serve(tmp_path, make_argocd(script), asks_client=True) as server, connect(server) as client:
        client._config.streaming = False  # type: ignore[attr-defined]
        [first] = await ask(client, "deploy")
        task, states = first.task, [first.task.status.state]
        while task.status.state == TaskState.TASK_STATE_INPUT_REQUIRED:
            [data] = [MessageToDict(part.data) for part in task.status.message.parts if part.HasField("data")]
            [said] = await ask(client, "", task_id=task.id, parts=[answer(dict(data))])
            task = said.task
            states.append(task.status.state)
    asked, done = TaskState.TASK_STATE_INPUT_REQUIRED, TaskState.TASK_STATE_COMPLETED
    assert states == [asked, asked, done]


@pytest.mark.requirement("P16")
async def test_nothing_but_the_bound_data_part_is_a_yes(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd(SCRIPT), asks_client=True) as server, connect(server) as client:
        events = await ask(client, "deploy")
        task, question = events[0].task.id, question_of(events)
        forged = [
            answer(question, digest="0" * 32),
            answer(question, digest=""),
            answer(question, approval_id="another"),
            answer(question, decision="yes"),
            answer(question, scope="project"),
            answer(question, answer="prod"),  # no text is asked for
        ]
        for part in forged:
            with pytest.raises(InvalidParamsError):
                await ask(client, "", task_id=task, parts=[part])
        steered = await ask(client, "yes, I approve", task_id=task)  # words are words
        assert question_of(steered)["approval_id"] == question["approval_id"]
        denied = await ask(client, "", task_id=task, parts=[answer(question, "deny", reason="not today")])
    assert denied[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED
    results = await read_bodies(tmp_path, task, ToolResult)
    assert [(body.success, "not today" in body.text) for body in results] == [(False, True)]


async def test_a_message_that_is_sent_again_is_not_answered_with_an_old_question(tmp_path: Path) -> None:
    """The client has lost the response to its message. The task asks the next question by now."""
    calls = [{"tools": [{"name": "deploy", "args": {"target": name}}]} for name in ("one", "two")]
    script: dict[str, Any] = {"argocd": [*calls, {"text": "both"}]}
    async with serve(tmp_path, make_argocd(script), asks_client=True) as server, connect(server) as client:
        begins = make_request("deploy")
        events = [event async for event in client.send_message(begins)]
        answers = make_request("", task_id=events[0].task.id, parts=[answer(question_of(events))])
        asked = [
            question_of([event async for event in client.send_message(each)]) for each in (answers, answers, begins)
        ]
    assert [each["args"]["target"] for each in asked] == ["two"] * 3


async def test_either_all_answers_of_a_message_count_or_none(tmp_path: Path) -> None:
    calls = [{"name": "deploy", "args": {"target": name}} for name in ("one", "two")]
    script: dict[str, Any] = {"argocd": [{"tools": calls}, {"text": "both"}]}
    async with serve(tmp_path, make_argocd(script), asks_client=True) as server, connect(server) as client:
        task = (await ask(client, "deploy"))[0].task.id
        found = server.tasks.find(task, "anyone")
        assert found is not None
        await server.tasks.wait_until(found, lambda view: len(view.questions) == 2)
        first, second = [
            {"approval_id": asked.id, "digest": asked.digest} for asked in await server.control.pending(task)
        ]
        for parts in ([answer(first), answer(second, digest="0" * 32)], [answer(first), answer(first, "deny")]):
            with pytest.raises(InvalidParamsError):
                await ask(client, "", task_id=task, parts=parts)
            assert len(await server.control.pending(task)) == 2
        await ask(client, "", task_id=task, parts=[answer(first)])
        rest = await ask(client, "", task_id=task, parts=[answer(first), answer(second)])  # the first once more
    assert rest[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED


async def test_the_deny_of_the_host_wins(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd(SCRIPT), asks_client=True) as server, connect(server) as client:
        events = await ask(client, "deploy")
        task, question = events[0].task.id, question_of(events)
        asked = await pending(server, task)
        assert await server.control.answer(asked.id, Deny("never"), by="user", digest=asked.digest) == "taken"
        with pytest.raises((InvalidParamsError, UnsupportedOperationError)):
            await ask(client, "", task_id=task, parts=[answer(question)])
        found = server.tasks.find(task, "anyone")
        assert found is not None
        view = await server.tasks.wait_until(found, lambda view: view.ending is not None)
    assert view.ending is not None and "never" in view.ending.final_response


async def test_without_the_flag_only_the_host_answers(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd(SCRIPT)) as server, connect(server) as client:
        events = client.send_message(make_request("deploy"))
        task = (await anext(events)).task.id
        asked = await pending(server, task)
        assert (await client.get_task(GetTaskRequest(id=task))).status.state == TaskState.TASK_STATE_WORKING
        with pytest.raises(UnsupportedOperationError, match="--approve-by client"):
            part = answer({"approval_id": asked.id, "digest": asked.digest})
            await ask(client, "", task_id=task, parts=[part])
        assert await server.control.answer(asked.id, Allow(), by="user") == "taken"
        rest = [event async for event in events]
    assert rest[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED
