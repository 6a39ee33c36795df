"""Runs at A2A agents that are not ours: plain agents of the SDK, and hostile ones."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from a2a.client.errors import A2AClientError
from a2a.server.agent_execution import RequestContext
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentInterface,
    Artifact,
    ClientCredentialsOAuthFlow,
    OAuth2SecurityScheme,
    OAuthFlows,
    Part,
    Role,
    SecurityScheme,
    StreamResponse,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.types import Message as Words
from a2a.types import Task as A2aTask
from a2a.utils.errors import A2AError, TaskNotFoundError, UnsupportedOperationError
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from retinue import Allow, Deny, Profile, Task
from retinue.build.parts import Parts
from retinue.build.remote_agents import inspect_agent
from retinue.build.supervisor import make_supervisor
from retinue.concurrency import RateLimit
from retinue.core import secrets
from retinue.core.caller import NOBODY
from retinue.core.control import RunHandle
from retinue.core.errors import RetinueError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Delta,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunSpawned,
    ToolCall,
    ToolResult,
    TurnStarted,
    Warned,
)
from retinue.core.messages import RunRef
from retinue.core.remote_agents import A2aAgent, AgentAuth
from retinue.core.replies import SpokenText
from retinue.core.secrets import forget_secret, hide_secret
from retinue.remote.a2a import adapter, connection
from retinue.remote.a2a.updates import UpdateFold
from retinue.remote.port import RemoteRequest
from retinue.supervisor.supervisor import Supervisor
from retinue.testing import ManualClock, scripted
from tests.remote.a2a_kit import Hand, Proxy, answer_as_seed, bind, make_card, run_app, say, serve_agent

_INPUT = TaskState.TASK_STATE_INPUT_REQUIRED


@asynccontextmanager
async def supervise(folder: Path, **parts: Any) -> AsyncIterator[Supervisor]:
    supervisor = make_supervisor(Parts(**{"project": folder, "wait_approvals": 30.0, **parts}))
    try:
        yield supervisor
    finally:
        await supervisor.close()


def make_profile(url: str, **agent: Any) -> Profile:
    return Profile("argocd", tools=(), a2a=A2aAgent(url=url, **{"reconnect_timeout": 0.5, **agent}))


async def read_run(run: RunHandle) -> list[Event]:
    return [event async for event in run.events()]


def bodies(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event.body for event in events if isinstance(event.body, kind)]


@pytest.mark.requirement("CAIPE-9", "CAIPE-10", "CAIPE-30")
async def test_notices_of_a_foreign_agent_are_calls_and_its_words_the_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "retinue"):
        async with serve_agent(answer_as_seed) as (url, agent), supervise(tmp_path) as supervisor:
            run = await supervisor.spawn(make_profile(url), Task("show version"))
            events = await read_run(run)
    [call], [result] = bodies(events, ToolCall), bodies(events, ToolResult)
    assert (call.name, result.name, result.success) == ("version_service__version",) * 2 + (True,)
    [ending] = bodies(events, RunEnded)
    assert (ending.status, ending.final_response) == ("done", "ArgoCD runs v2.9.3.")
    assert agent.asked == ["show version"] and bodies(events, Message) == []
    said = [record.getMessage() for record in caplog.records if "accumulated" in record.getMessage()]
    assert said == [f"Streamed + accumulated text from status-update: {size} chars" for size in (45, 46, 19)]


@pytest.mark.parametrize("binding", [(version, way) for version in ("1.0", "0.3") for way in ("JSONRPC", "HTTP+JSON")])
async def test_every_binding_that_an_agent_may_speak(tmp_path: Path, binding: tuple[str, str]) -> None:
    async with serve_agent(answer_as_seed, binding=binding) as (url, agent), supervise(tmp_path) as supervisor:
        result = await (await supervisor.spawn(make_profile(url), Task("show version"))).result()
    assert (result.status, result.final_response, result.tool_count) == ("done", "ArgoCD runs v2.9.3.", 1)
    assert len(agent.asked) == 1


async def test_an_answer_as_status_and_as_artifact_is_counted_once(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "Looking...", "✅ All healthy")
        await updater.add_artifact([Part(text="✅ All "), Part(text="healthy")], artifact_id="a", name="answer")
        await updater.complete(updater.new_agent_message([Part(text="✅ All healthy")]))

    async with serve_agent(act) as (url, _), supervise(tmp_path) as supervisor:
        events = await read_run(await supervisor.spawn(make_profile(url), Task("go")))
    assert bodies(events, RunEnded)[0].final_response == "✅ All healthy"
    assert bodies(events, ToolCall) == bodies(events, ToolResult) == []
    assert [body.text for body in bodies(events, Message)] == ["Looking...", "✅ All healthy", "✅ All healthy"]


@pytest.mark.requirement("CAIPE-5", "CAIPE-32")
async def test_chunks_of_an_answer_are_shown_as_they_come_and_counted_once(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "Looking...")
        await updater.add_artifact([Part(text="⟦the plan⟧")], artifact_id="p", name="streaming_result")
        for number, word in enumerate(("ArgoCD ", "runs ", "v2.9.3.", "")):
            await updater.add_artifact(
                [Part(text=word)], artifact_id="a", name="streaming_result", append=number > 0, last_chunk=not word
            )
        await updater.complete()

    async with serve_agent(act) as (url, _), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("go"))
        items = [item async for item in supervisor.watch(run.tree, deltas=True)]
    deltas = [item for item in items if isinstance(item, Delta)]
    assert [delta.text for delta in deltas] == ["ArgoCD runs ", "v2.9.3."]
    assert [(delta.turn, delta.offset) for delta in deltas] == [(1, 0), (1, 12)]
    events = [item for item in items if isinstance(item, Event)]
    assert [(body.text, body.final) for body in bodies(events, Message)] == [
        ("Looking...", False),
        ("ArgoCD runs v2.9.3.", True),
    ]
    assert bodies(events, RunEnded)[0].final_response == "ArgoCD runs v2.9.3."
    fold = SpokenText(0)
    assert "".join(piece for item in items for piece in fold.apply(item)) == "Looking...\n\nArgoCD runs v2.9.3."


async def test_a_secret_that_an_agent_says_in_pieces_is_not_shown(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        for number, word in enumerate(("It is ", "hunter2-", "hunter2", ", you know.")):
            await updater.add_artifact([Part(text=word)], artifact_id="a", append=number > 0)
        await updater.complete()

    hide_secret("hunter2-hunter2")
    try:
        async with serve_agent(act) as (url, _), supervise(tmp_path) as supervisor:
            run = await supervisor.spawn(make_profile(url), Task("go"))
            items = [item async for item in supervisor.watch(run.tree, deltas=True)]
    finally:
        forget_secret("hunter2-hunter2")
    shown = "".join(item.text for item in items if isinstance(item, Delta))
    [whole] = [item.body.text for item in items if isinstance(item, Event) and isinstance(item.body, Message)]
    assert shown == whole and "hunter2" not in shown and shown.endswith(", you know.")


async def test_a_foreign_supervisor_shows_the_agents_it_calls(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(
            updater, "🔧 Calling argocd...", "🔧 Argocd: Calling tool: Get_App", "✅ Argocd: Tool Get_App completed"
        )
        await say(updater, "✅ argocd completed", "✅ Deployment completed")
        await updater.complete()

    async with serve_agent(act) as (url, _), supervise(tmp_path) as supervisor:
        events = await read_run(await supervisor.spawn(make_profile(url), Task("go")))
    [_, child] = [event for event in events if isinstance(event.body, RunSpawned)]
    assert (child.agent, child.run) == ("argocd", 1)
    assert [event.run for event in events if isinstance(event.body, ToolCall | ToolResult)] == [1, 1]
    assert [(event.run, event.body.status) for event in events if isinstance(event.body, RunEnded)] == [
        (1, "done"),
        (0, "done"),
    ]
    assert bodies(events, RunEnded)[-1].final_response == "✅ Deployment completed"  # nobody had called that


@pytest.mark.requirement("CAIPE-26")
def test_updates_without_status_message_parts_or_text_are_skipped_and_all_parts_are_read() -> None:
    fold = UpdateFold()
    empty = [
        StreamResponse(),
        StreamResponse(status_update=TaskStatusUpdateEvent(task_id="t")),
        StreamResponse(status_update=TaskStatusUpdateEvent(task_id="t", status=TaskStatus(state=2))),  # type: ignore[arg-type]
    ]
    for update in empty:
        assert not [report for report in fold.apply(update) if report.body.__class__.__name__ != "RunStarted"]
    status = TaskStatus(state=TaskState.TASK_STATE_WORKING)
    status.message.parts.extend([Part(text=""), Part(text="one"), Part(), Part(text="two")])
    fold.apply(StreamResponse(status_update=TaskStatusUpdateEvent(task_id="t", status=status)))
    done = TaskStatusUpdateEvent(task_id="t", status=TaskStatus(state=TaskState.TASK_STATE_COMPLETED))
    assert fold.apply(StreamResponse(status_update=done))[-1].body.final_response == "one\ntwo"  # type: ignore[union-attr]
    assert fold.apply(StreamResponse(status_update=done)) == []  # it does not come back from its end


def test_data_and_files_of_an_answer_are_text_that_can_be_read() -> None:
    fold = UpdateFold()
    data = ParseDict({"version": "v2.9.3", "ok": True}, Value())
    parts = [Part(text="It "), Part(text="runs:"), Part(data=data), Part(url="https://x.example/f", filename="f.txt")]
    done = TaskStatus(state=TaskState.TASK_STATE_COMPLETED)
    task = A2aTask(id="t", status=done, artifacts=[Artifact(artifact_id="a", parts=parts)])
    ended = fold.apply(StreamResponse(task=task))[-1].body
    assert ended.final_response == 'It runs:\n{"ok":true,"version":"v2.9.3"}\n[a file: f.txt]'  # type: ignore[union-attr]


def test_another_task_is_not_listened_to() -> None:
    fold = UpdateFold()
    fold.task_id = "mine"
    done = TaskStatusUpdateEvent(task_id="theirs", status=TaskStatus(state=TaskState.TASK_STATE_COMPLETED))
    [report] = fold.apply(StreamResponse(status_update=done))
    assert report.body.kind == "gap" and not fold.has_ended  # type: ignore[union-attr]


async def test_input_required_is_a_question_whose_answer_goes_back(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        text = context.get_user_input()
        if text == "deploy":
            await updater.requires_input(updater.new_agent_message([Part(text="Which cluster?")]))
        else:
            await updater.add_artifact([Part(text=f"deployed to {text}")])
            await updater.complete()

    async with serve_agent(act) as (url, agent), supervise(tmp_path, mode="yes") as supervisor:
        answers = [(Allow(args={"answer": "blue"}), "blue"), (Allow(), "yes"), (Deny("none of them"), "none of them")]
        for decision, words in answers:
            run = await supervisor.spawn(make_profile(url), Task("deploy"))
            async for event in run.events():
                if isinstance(event.body, ApprovalAsked):
                    assert event.body.args == {"question": "Which cluster?"}
                    assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
            assert (await run.result()).final_response == f"deployed to {words}"
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                assert (await run.send("green")).state == "queued"
        assert (await run.result()).final_response == "deployed to green"
    assert len(set(agent.contexts)) == 4


async def test_an_answer_goes_to_the_question_that_it_was_given_to(tmp_path: Path) -> None:
    """The user answers the first question by a message. The agent takes back the second one itself."""

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        if context.get_user_input() == "deploy":
            await updater.requires_input(updater.new_agent_message([Part(text="Which cluster?")]))
        elif context.get_user_input() == "blue":
            await updater.update_status(_INPUT, updater.new_agent_message([Part(text="Is blue backed up?")]))
            await updater.update_status(_INPUT, updater.new_agent_message([Part(text="Is blue backed up?")]))
            await say(updater, "I see that it is.")
            await updater.requires_input(updater.new_agent_message([Part(text="May I delete blue?")]))
        else:
            await updater.complete(updater.new_agent_message([Part(text=context.get_user_input())]))

    async with serve_agent(act) as (url, agent), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        asked: list[ApprovalAsked] = []
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                asked.append(event.body)
                if event.body.preview == "Which cluster?":
                    assert (await run.send("blue")).state == "queued"
                elif event.body.preview == "May I delete blue?":
                    first, second, third = asked
                    assert [question.id for question in await supervisor.pending()] == [third.approval_id]
                    for old in (first, second):
                        assert await supervisor.answer(old.approval_id, Allow(), by="user") != "taken"
                    assert await supervisor.answer(third.approval_id, Deny("keep it"), by="user") == "taken"
        result = await run.result()
        decided = bodies(await read_run(run), ApprovalDecided)
    assert (result.final_response, agent.asked) == ("I see that it is.\nkeep it", ["deploy", "blue", "keep it"])
    assert [(each.allowed, each.reason, each.args) for each in decided] == [
        (True, "", {"answer": "blue"}),
        (False, "the agent went on without an answer", None),
        (False, "keep it", None),
    ]


class Asker(Hand):
    """A foreign agent that asks `questions` and keeps the stream of each open, for the `updates` of a test. `state` is
    the state of its task. `received` holds the texts of its messages."""

    def __init__(self, *questions: str) -> None:
        super().__init__()
        self.questions = list(questions)
        self.received: asyncio.Queue[str] = asyncio.Queue()
        self.state = make_status(TaskState.TASK_STATE_SUBMITTED)

    async def on_message_send_stream(self, params: Any, context: Any) -> Any:
        text = params.message.parts[0].text
        self.received.put_nowait(text)
        if not self.questions:
            yield self.change(TaskState.TASK_STATE_COMPLETED, f"so it is {text}")
            return
        yield A2aTask(id="t", context_id="c", status=make_status(TaskState.TASK_STATE_WORKING))
        yield self.change(_INPUT, self.questions.pop(0))
        async for update in self.on_subscribe_to_task(params, context):
            yield update

    async def on_get_task(self, params: Any, context: Any) -> Any:
        return A2aTask(id="t", context_id="c", status=self.state)

    def change(self, state: Any, text: str) -> TaskStatusUpdateEvent:
        """Change the state of the task, and return the update about it."""
        self.state = make_status(state, text)
        return TaskStatusUpdateEvent(task_id="t", context_id="c", status=self.state)


def make_status(state: Any, text: str = "") -> TaskStatus:
    status = TaskStatus(state=state)
    if text:
        status.message.CopyFrom(Words(message_id=text, role=Role.ROLE_AGENT, parts=[Part(text=text)]))
    return status


@asynccontextmanager
async def serve_asker(asker: Asker, **card_changes: Any) -> AsyncIterator[str]:
    bound, url = bind()
    card = make_card(url, **card_changes)
    async with run_app([*create_agent_card_routes(card), *create_jsonrpc_routes(asker, "/")], bound):
        yield url


@pytest.mark.parametrize("way", ["answer", "send"])
async def test_an_answer_does_not_wait_for_the_end_of_a_stream(tmp_path: Path, way: str) -> None:
    """The agent keeps the stream of each of its questions open."""
    asker = Asker("Which cluster?", "Are you sure?")
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor, asyncio.timeout(60):
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        answers = ["blue", "sure"]
        assert await asker.received.get() == "deploy"
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                text = answers.pop(0)
                if way == "send":
                    assert (await run.send(text)).state == "queued"
                else:
                    decision = Allow(args={"answer": text})
                    assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
                assert await asker.received.get() == text
        assert (await run.result()).final_response == "so it is sure"


async def test_an_answer_is_sent_although_the_agent_goes_on_at_that_moment(tmp_path: Path) -> None:
    asker = Asker("Which cluster?")
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor, asyncio.timeout(60):
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                decision = Allow(args={"answer": "blue"})
                assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
                for number in range(3):
                    asker.updates.put_nowait(asker.change(TaskState.TASK_STATE_WORKING, f"step {number}"))
        assert [await asker.received.get() for _ in range(2)] == ["deploy", "blue"]
        assert (await run.result()).final_response.endswith("so it is blue")


async def test_an_answer_is_not_sent_to_another_question(tmp_path: Path) -> None:
    """The agent asks again while the first answer is on its way."""
    asker = Asker("Which cluster?")
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor, asyncio.timeout(60):
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                is_first = event.body.preview == "Which cluster?"
                decision = Allow(args={"answer": "blue" if is_first else "sure"})
                assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
                if is_first:
                    asker.change(_INPUT, "Are you sure?")  # the state tells, but no update
        assert [await asker.received.get() for _ in range(2)] == ["deploy", "sure"]
        warned = [body.text for body in bodies(await read_run(run), Warned)]
    assert warned == ["the answer was not sent: the agent asked another question before it got the answer"]


@pytest.mark.parametrize("has_ended", [True, False])
async def test_the_result_of_an_agent_that_went_on_without_an_answer_is_not_lost(
    tmp_path: Path, has_ended: bool
) -> None:
    """The stream of its question has ended. It refuses the answer that comes too late."""

    class Impatient(Asker):
        async def on_message_send_stream(self, params: Any, context: Any) -> Any:
            if params.message.task_id:
                raise UnsupportedOperationError("the question is closed")
            yield self.change(_INPUT, "Which cluster?")

    asker = Impatient()
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                if has_ended:
                    asker.change(TaskState.TASK_STATE_COMPLETED, "deployed to blue")
                assert await supervisor.answer(event.body.approval_id, Allow(), by="user") == "taken"
        result = await run.result()
    expected = ("done", "deployed to blue") if has_ended else ("failed", "the agent refuses: the question is closed")
    assert (result.status, result.final_response) == expected


@pytest.mark.parametrize("is_cut", [True, False])
async def test_an_answer_is_not_sent_to_a_question_that_was_asked_while_no_stream_was_open(
    tmp_path: Path, is_cut: bool
) -> None:
    """The stream of the first question breaks or ends. Then the agent asks another question by itself."""
    asker = Asker("Which cluster?")
    async with Proxy() as proxy, supervise(tmp_path) as supervisor, asyncio.timeout(60):
        interfaces = [AgentInterface(url=proxy.url, protocol_binding="JSONRPC", protocol_version="1.0")]
        async with serve_asker(asker, supported_interfaces=interfaces) as url:
            proxy.target = int(url.rpartition(":")[2])
            run = await supervisor.spawn(make_profile(proxy.url, reconnect_timeout=30.0), Task("deploy"))
            async for event in run.events():
                if isinstance(event.body, ApprovalAsked):
                    is_first = event.body.preview == "Which cluster?"
                    if is_first:
                        asker.change(_INPUT, "May I delete it?")
                        proxy.cut() if is_cut else asker.updates.put_nowait(None)
                        for _ in range(5):  # until we have noticed it
                            await inspect_agent(A2aAgent(url=proxy.url))
                    decision = Allow(args={"answer": "blue"}) if is_first else Deny("never")
                    assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
            warned = [body.text for body in bodies(await read_run(run), Warned)]
    assert [asker.received.get_nowait() for _ in range(asker.received.qsize())] == ["deploy", "never"]
    assert warned == ["the answer was not sent: the agent asked another question before it got the answer"]


async def test_a_stream_that_begins_with_the_state_before_the_answer_asks_nothing_again(tmp_path: Path) -> None:
    """The protocol lets every stream begin with the task."""

    class Exact(Asker):
        async def on_message_send_stream(self, params: Any, context: Any) -> Any:
            yield A2aTask(id="t", context_id="c", status=self.state)
            async for update in super().on_message_send_stream(params, context):
                yield update

    asker = Exact("Which cluster?", "Which cluster?")
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor, asyncio.timeout(60):
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        texts = ["blue", "green"]
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                decision = Allow(args={"answer": texts.pop(0)})
                assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
        events = await read_run(run)
    assert bodies(events, RunEnded)[0].final_response == "so it is green"
    assert [body.reason for body in bodies(events, ApprovalDecided)] == ["", ""]
    assert [asker.received.get_nowait() for _ in range(3)] == ["deploy", "blue", "green"]


@pytest.mark.parametrize("error", [UnsupportedOperationError, TaskNotFoundError])
async def test_an_agent_that_cannot_show_its_tasks_gets_its_answer(tmp_path: Path, error: type[A2AError]) -> None:
    class Secretive(Asker):
        async def on_get_task(self, params: Any, context: Any) -> Any:
            raise error

    asker = Secretive("Which cluster?")
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor, asyncio.timeout(60):
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                decision = Allow(args={"answer": "blue"})
                assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
        assert (await run.result()).final_response == "so it is blue"


async def test_an_agent_that_works_again_and_refuses_the_late_answer_is_followed_to_its_end(tmp_path: Path) -> None:
    class Busy(Asker):
        async def on_message_send_stream(self, params: Any, context: Any) -> Any:
            if params.message.task_id:
                raise UnsupportedOperationError("the question is closed")
            yield self.change(_INPUT, "Which cluster?")

        async def on_subscribe_to_task(self, params: Any, context: Any) -> Any:
            yield self.change(TaskState.TASK_STATE_COMPLETED, "deployed to blue")

    asker = Busy()
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor, asyncio.timeout(60):
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                asker.change(TaskState.TASK_STATE_WORKING, "")
                assert await supervisor.answer(event.body.approval_id, Allow(), by="user") == "taken"
        events = await read_run(run)
    assert bodies(events, RunEnded)[0].final_response == "deployed to blue"
    assert [body.text for body in bodies(events, Warned)] == [
        "the agent has gone on and refuses the answer: the question is closed"
    ]


def test_a_question_that_is_told_again_without_its_text_is_the_same() -> None:
    fold = UpdateFold()
    task = A2aTask(id="t", status=make_status(_INPUT, "Which cluster?"))
    assert isinstance(fold.apply(StreamResponse(task=task))[-1].body, ApprovalAsked)
    for text in ("Which cluster?", ""):
        assert fold.apply(StreamResponse(task=A2aTask(id="t", status=make_status(_INPUT, text)))) == []


async def test_a_cancelled_agent_that_asked_and_is_not_done_at_once_is_followed_to_its_end(tmp_path: Path) -> None:
    """Its reply to the cancel says that it works again. The stream of its question has ended."""

    class Slow(Asker):
        async def on_cancel_task(self, params: Any, context: Any) -> Any:
            self.change(TaskState.TASK_STATE_WORKING, "cleaning up")
            return await self.on_get_task(params, context)

        async def on_subscribe_to_task(self, params: Any, context: Any) -> Any:
            if self.state.state == TaskState.TASK_STATE_WORKING:
                yield self.change(TaskState.TASK_STATE_CANCELED, "all clean")
            else:
                stream_ended.set()

    asker, stream_ended = Slow("Which cluster?"), asyncio.Event()
    async with serve_asker(asker) as url, supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                await stream_ended.wait()
                assert await run.cancel()
        events = await read_run(run)
    assert bodies(events, RunEnded)[0].status == "cancelled" and asker.state.state == TaskState.TASK_STATE_CANCELED
    assert [body.code for body in bodies(events, Warned)] == []


async def test_an_agent_is_not_called_while_its_question_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its card is old and it cannot be reached. The user may take hours."""
    monkeypatch.setattr(connection, "CARD_SECONDS", -1.0)

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        if context.get_user_input() == "deploy":
            await updater.requires_input(updater.new_agent_message([Part(text="Which cluster?")]))
        else:
            await updater.complete()

    async with Proxy() as proxy, supervise(tmp_path) as supervisor:
        interfaces = [AgentInterface(url=proxy.url, protocol_binding="JSONRPC", protocol_version="1.0")]
        async with serve_agent(act, supported_interfaces=interfaces) as (url, agent):
            proxy.target = int(url.rpartition(":")[2])
            run = await supervisor.spawn(make_profile(proxy.url, reconnect_timeout=30.0), Task("deploy"))
            async for event in run.events():
                if isinstance(event.body, ApprovalAsked):
                    proxy.is_down = True
                    proxy.cut()
                    for _ in range(20):  # so long that it would be called again and again
                        await asyncio.to_thread(lambda: None)
                        with pytest.raises(RetinueError):
                            await inspect_agent(A2aAgent(url=proxy.url))
                    own, proxy.is_down = proxy.refused, False
                    assert await supervisor.answer(event.body.approval_id, Allow(), by="user") == "taken"
            assert (await run.result()).status == "done"
    assert (own, agent.asked) == (20, ["deploy", "yes"])


async def test_cancel_stops_the_task_and_words_reach_it(tmp_path: Path) -> None:
    began, told = asyncio.Event(), asyncio.Event()

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await updater.start_work()
        if context.get_user_input() == "left":
            told.set()
            return
        began.set()
        if context.get_user_input() == "hang":
            await asyncio.Event().wait()

    async with serve_agent(act) as (url, agent), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("wait"))
        await began.wait()
        assert (await run.send("left")).state == "queued"
        await told.wait()
        assert await run.cancel()
        await agent.cancelled.wait()
        events = await read_run(run)
    assert [body.text for body in bodies(events, Inbox)] == ["left"]
    assert bodies(events, RunEnded)[0].status == "cancelled"


async def test_a_cancelled_run_keeps_what_its_agent_had_written(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await updater.add_artifact([Part(text="half ")], artifact_id="a")
        await updater.add_artifact([Part(text="an answer")], artifact_id="a", append=True)
        await asyncio.Event().wait()

    async with serve_agent(act) as (url, _), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("go"))
        async for item in supervisor.watch(run.tree, deltas=True):
            if isinstance(item, Delta):
                assert await run.cancel()
        result = await run.result()
    assert (result.status, result.partial) == ("cancelled", "half an answer")


async def test_cancel_reaches_an_agent_that_waits_for_input(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await updater.requires_input(updater.new_agent_message([Part(text="Which cluster?")]))

    async with serve_agent(act) as (url, agent), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                assert await run.cancel()
        assert (await run.result()).status == "cancelled"
        assert agent.cancelled.is_set() and await supervisor.pending() == []


async def test_a_continued_run_is_in_the_same_context(tmp_path: Path) -> None:
    async with serve_agent(answer_as_seed) as (url, agent), supervise(tmp_path) as supervisor:
        first = await supervisor.spawn(make_profile(url), Task("one"))
        await first.result()
        from retinue.core.control import ResumeOverrides

        second = await supervisor.continue_run(first.tree, 0, "two", ResumeOverrides(profiles=[make_profile(url)]))
        await second.result()
    assert agent.asked == ["one", "two"] and len(set(agent.contexts)) == 1


async def test_an_empty_answer_is_an_answer(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await updater.complete()

    async with serve_agent(act) as (url, agent), supervise(tmp_path) as supervisor:
        result = await (await supervisor.spawn(make_profile(url), Task("go"))).result()
    assert (result.status, result.final_response, len(agent.asked)) == ("done", "", 1)
    assert result.warning is not None and "without any text" in result.warning


async def test_endings_are_those_of_the_task(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "so far")
        message = updater.new_agent_message([Part(text="no, because")])
        await {"fail": updater.failed, "reject": updater.reject}[context.get_user_input()](message)

    async with serve_agent(act) as (url, _), supervise(tmp_path) as supervisor:
        for text, status in (("fail", "failed"), ("reject", "refused")):
            result = await (await supervisor.spawn(make_profile(url), Task(text))).result()
            assert (result.status, result.partial) == (status, "so far")
            assert "no, because" in (result.error_details or result.final_response)


@pytest.mark.parametrize("fault", ["cut", "stall"])
async def test_what_an_agent_said_while_the_connection_was_lost_is_not_lost(tmp_path: Path, fault: str) -> None:
    began, goes_on = asyncio.Event(), asyncio.Event()

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "🔧 Calling tool: **x**")
        for number, word in enumerate(("one ", "two ")):
            await updater.add_artifact([Part(text=word)], artifact_id="a", append=number > 0)
        began.set()
        await goes_on.wait()
        await say(updater, "✅ Tool **x** completed")
        for word in ("three ", "four"):
            await updater.add_artifact([Part(text=word)], artifact_id="a", append=True)
        await updater.complete()

    async with Proxy() as proxy, supervise(tmp_path) as supervisor:
        interfaces = [AgentInterface(url=proxy.url, protocol_binding="JSONRPC", protocol_version="1.0")]
        async with serve_agent(act, supported_interfaces=interfaces) as (url, agent):
            proxy.target = int(url.rpartition(":")[2])
            run = await supervisor.spawn(make_profile(proxy.url, reconnect_timeout=30.0, idle_timeout=0.5), Task("go"))
            await began.wait()
            async for event in run.events():
                if isinstance(event.body, TurnStarted):  # the first chunks are here
                    break
            getattr(proxy, fault)()
            goes_on.set()
            events = await read_run(run)
    assert bodies(events, RunEnded)[0].final_response == "one two three four" and agent.asked == ["go"]
    assert len(bodies(events, ToolCall)) == len(bodies(events, ToolResult)) == 1


async def test_what_an_agent_said_before_it_was_lost_is_kept(tmp_path: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "Looking...", "Found it.")
        for number, word in enumerate(("half ", "an answer")):
            await updater.add_artifact([Part(text=word)], artifact_id="a", append=number > 0)
        await asyncio.Event().wait()

    async with Proxy() as proxy, supervise(tmp_path) as supervisor:
        interfaces = [AgentInterface(url=proxy.url, protocol_binding="JSONRPC", protocol_version="1.0")]
        async with serve_agent(act, supported_interfaces=interfaces) as (url, _):
            proxy.target = int(url.rpartition(":")[2])
            run = await supervisor.spawn(make_profile(proxy.url), Task("go"))
            items = []
            async for item in run.events(deltas=True):
                items.append(item)
                if isinstance(item, Delta) and item.text.endswith("answer"):
                    proxy.is_down = True
                    proxy.cut()
    events = [item for item in items if isinstance(item, Event)]
    assert [body.text for body in bodies(events, Message)] == ["Looking...", "Found it.", "half an answer"]
    [ending] = bodies(events, RunEnded)
    assert ending.status == "disconnected" and ending.partial.endswith("half an answer")
    fold = SpokenText(0)
    said = "".join(piece for item in items for piece in fold.apply(item))
    assert said == "Looking...\n\nFound it.\n\nhalf an answer"


class Resumed(Hand):
    """A foreign agent whose stream breaks after two chunks. Its state, as fetched then, and the chunks sent after it do
    not fit together: `before` is the text of the state, `after` the chunks."""

    def __init__(self, before: str, after: list[str]) -> None:
        super().__init__()
        self.before, self.after = before, after
        self.has_ended = False
        self.status = TaskStatus(state=TaskState.TASK_STATE_WORKING)
        self.status.message.CopyFrom(Words(message_id="m", role=Role.ROLE_AGENT, parts=[Part(text="Thinking...")]))

    async def on_message_send_stream(self, params: Any, context: Any) -> Any:
        yield A2aTask(id="t", context_id="c", status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED))
        for word in ("one ", "two "):
            yield self.make_chunk(word)

    async def on_get_task(self, params: Any, context: Any) -> Any:
        text = "one two three four" if self.has_ended else self.before
        status = TaskStatus(state=TaskState.TASK_STATE_COMPLETED) if self.has_ended else self.status
        artifact = Artifact(artifact_id="a", parts=[Part(text=text)])
        return A2aTask(id="t", context_id="c", status=status, artifacts=[artifact])

    async def on_subscribe_to_task(self, params: Any, context: Any) -> Any:
        yield await self.on_get_task(params, context)
        yield TaskStatusUpdateEvent(task_id="t", context_id="c", status=self.status)
        for word in self.after:
            yield self.make_chunk(word)
        self.has_ended = True
        done = TaskStatus(state=TaskState.TASK_STATE_COMPLETED)
        yield TaskStatusUpdateEvent(task_id="t", context_id="c", status=done)

    def make_chunk(self, text: str) -> TaskArtifactUpdateEvent:
        artifact = Artifact(artifact_id="a", parts=[Part(text=text)])
        return TaskArtifactUpdateEvent(task_id="t", context_id="c", artifact=artifact, append=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [("one two three ", ["three ", "four"]), ("one two ", ["four"])],
    ids=["a chunk comes twice", "a chunk never comes"],
)
async def test_an_answer_after_a_lost_connection_is_the_one_that_the_agent_has(
    tmp_path: Path, before: str, after: list[str]
) -> None:
    bound, url = bind()
    card = make_card(url)
    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(Resumed(before, after), "/")]
    async with run_app(routes, bound), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url, reconnect_timeout=30.0), Task("go"))
        events = await read_run(run)
    assert [ending.final_response for ending in bodies(events, RunEnded)] == ["one two three four"]
    assert [said.text for said in bodies(events, Message) if not said.final] == ["Thinking..."]


@pytest.mark.parametrize("binding", [(version, way) for version in ("1.0", "0.3") for way in ("JSONRPC", "HTTP+JSON")])
async def test_a_peer_that_forgot_its_task_is_not_called_again(tmp_path: Path, binding: tuple[str, str]) -> None:
    began = asyncio.Event()

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await updater.start_work()
        began.set()
        await asyncio.Event().wait()

    bound, url = bind()
    bound.close()
    port = int(url.rpartition(":")[2])
    async with supervise(tmp_path) as supervisor:
        async with serve_agent(act, port, binding=binding) as (_, agent):
            run = await supervisor.spawn(make_profile(url, reconnect_timeout=1e6), Task("go"))
            await began.wait()
        async with serve_agent(answer_as_seed, port, binding=binding) as (_, other):
            result = await run.result()
    assert (result.status, agent.asked, other.asked) == ("disconnected", ["go"], [])
    assert result.error_details is not None and "not called again" in result.error_details


async def test_a_peer_that_is_not_there_ends_disconnected(tmp_path: Path) -> None:
    bound, url = bind()
    bound.close()
    async with supervise(tmp_path) as supervisor:
        result = await (await supervisor.spawn(make_profile(url), Task("go"))).result()
    assert result.status == "disconnected" and "cannot be reached" in (result.error_details or "")


# Cards and credentials


@asynccontextmanager
async def serve_card(answer: Any) -> AsyncIterator[str]:
    """A card that a function makes, given the address."""
    bound, url = bind()

    async def respond(request: Request) -> Response:
        made: Response = answer(url)
        return made

    async with run_app([Route("/.well-known/agent-card.json", respond)], bound):
        yield url


def with_interfaces(*urls: str) -> Any:
    from a2a.server.request_handlers.response_helpers import agent_card_to_dict

    def answer(url: str) -> Response:
        found = [AgentInterface(url=each, protocol_binding="JSONRPC", protocol_version="1.0") for each in urls]
        return JSONResponse(agent_card_to_dict(make_card(url, supported_interfaces=found)))

    return answer


BAD_CARDS = [
    (with_interfaces("http://169.254.169.254/latest"), "169.254.169.254, which is not allowed"),
    (with_interfaces("http://localhost:1/"), "localhost:1, which is not allowed"),
    (with_interfaces("file:///etc/passwd"), "which is not allowed"),
    (with_interfaces("http://["), "has an invalid address: Invalid IPv6 URL"),
    (with_interfaces("http://localhost:1/\x01"), "has an invalid address: Invalid non-printable"),
    (with_interfaces("http://localhost:1/" + "x" * 70_000), "has an invalid address: URL too long"),
    (with_interfaces(), "neither JSON-RPC nor REST"),
    (lambda url: RedirectResponse("http://127.0.0.1:1/card"), "HTTP status 307"),
    (lambda url: Response(b'{"name":"' + b"x" * 300_000 + b'"}'), "larger than 262144 bytes"),
    (lambda url: Response(b"<html>"), "cannot be read: the body is not JSON"),
    (lambda url: Response(b'{"a":1,"a":2}'), "is given twice"),
    (lambda url: Response(b"[" * 300), "cannot be read"),
    (lambda url: Response(b'{"version": 1e999}'), "1e999 is too large"),
    (lambda url: JSONResponse({"skills": "none", "supportedInterfaces": 5}), "is not an agent card"),
    (lambda url: Response(b"x", headers={"content-encoding": "gzip"}), "compressed"),
    (lambda url: Response(status_code=500), "HTTP status 500"),
]


async def test_a_bad_card_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for answer, words in BAD_CARDS:
        async with serve_card(answer) as url:
            with pytest.raises(RetinueError, match=words.replace(".", r"\.")):
                await inspect_agent(A2aAgent(url=url))
    answer, words = BAD_CARDS[0]
    async with serve_card(answer) as url, supervise(tmp_path) as supervisor:
        result = await (await supervisor.spawn(make_profile(url), Task("go"))).result()
        assert result.status == "failed" and words in (result.error_details or "")


async def test_a_card_that_does_not_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of it comes in time. An agent may send them far more slowly than this one, so they need no limit."""
    monkeypatch.setattr(connection, "CARD_BYTES", 1 << 40)

    async def stream() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0)  # so that the server sees the end of the connection

    async with serve_card(lambda url: StreamingResponse(stream())) as url, asyncio.timeout(30):
        with pytest.raises(RetinueError, match="has not answered within 1 s"):
            await inspect_agent(A2aAgent(url=url, timeout=1.0))


async def test_credentials_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_TOKEN", "t" * 20)
    monkeypatch.setenv("AGENT_KEY", "k" * 20)
    async with serve_agent(answer_as_seed) as (url, agent), supervise(tmp_path) as supervisor:
        for auth in (AgentAuth(bearer_env="AGENT_TOKEN"), AgentAuth(api_key_env="AGENT_KEY", api_key_header="x-key")):
            await (await supervisor.spawn(make_profile(url, auth=auth), Task("go"))).result()
        missing = await (
            await supervisor.spawn(make_profile(url, auth=AgentAuth(bearer_env="NO_SUCH_TOKEN")), Task("go"))
        ).result()
    assert agent.headers[0]["authorization"] == f"Bearer {'t' * 20}"
    assert agent.headers[1]["x-key"] == "k" * 20 and len(agent.asked) == 2
    assert "NO_SUCH_TOKEN is not set" in (missing.error_details or "")


async def test_a_credential_of_an_agent_is_hidden_in_the_tree_that_first_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It becomes known when the agent is called first. The tree is at work by then, and no other secret is known."""
    monkeypatch.setenv("AGENT_LOGIN", "hunter2-hunter2")

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "You are hunter2-hunter2.")
        await updater.complete(updater.new_agent_message([Part(text="Bye, hunter2-hunter2.")]))

    calls = [{"tools": [{"name": "subagent_argocd", "args": {"task": "go"}}]}, "end"]
    async with serve_agent(act) as (url, agent), supervise(tmp_path) as supervisor:
        child = make_profile(url, auth=AgentAuth(bearer_env="AGENT_LOGIN"))
        monkeypatch.setattr(secrets, "known", ())  # as without any key in the environment
        run = await supervisor.spawn(Profile("main", model=scripted({"main": calls}), tools=[child]), Task("go"))
        said = " ".join(str(event.body) for event in await read_run(run))
    assert agent.headers[0]["authorization"] == "Bearer hunter2-hunter2"
    assert "Bye, [secret]." in said and "hunter2" not in said


@asynccontextmanager
async def serve_refusals(*statuses: int) -> AsyncIterator[tuple[str, list[str]]]:
    """An agent whose answers to messages have these HTTP statuses, one after the other, and the tokens it was shown."""
    bound, url = bind()
    tokens: list[str] = []

    async def refuse(request: Request) -> Response:
        if request.url.path == "/token":
            return JSONResponse({"access_token": f"token-{len(tokens)}", "expires_in": 3600})
        tokens.append(request.headers.get("authorization", ""))
        return Response("no", statuses[min(len(tokens), len(statuses)) - 1], headers={"location": "/elsewhere"})

    interfaces = [AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")]
    card = create_agent_card_routes(make_card(url, supported_interfaces=interfaces))
    async with run_app([*card, Route("/{path:path}", refuse, methods=["POST"])], bound):
        yield url, tokens


REFUSALS = [
    ((401,), "does not let us in (HTTP status 401): no credentials are configured", 1),
    ((403,), "does not let us in (HTTP status 403)", 1),
    ((307,), "refuses the request with the HTTP status 307", 1),
    ((404,), "refuses the request with the HTTP status 404", 1),
    ((429, 404), "refuses the request with the HTTP status 404", 2),
]


async def test_an_agent_that_refuses_a_message_is_told_at_once(tmp_path: Path) -> None:
    async with supervise(tmp_path) as supervisor:
        for statuses, words, count in REFUSALS:
            async with serve_refusals(*statuses) as (url, tokens):
                result = await (await supervisor.spawn(make_profile(url, reconnect_timeout=60.0), Task("go"))).result()
            assert (result.status, len(tokens)) == ("failed", count), statuses
            assert words in (result.error_details or ""), statuses
        async with serve_refusals(500) as (url, tokens):  # it may have begun
            result = await (await supervisor.spawn(make_profile(url, reconnect_timeout=60.0), Task("go"))).result()
        assert (result.status, len(tokens)) == ("disconnected", 1)


@pytest.mark.parametrize(
    "answer",
    [A2AClientError("JSON-RPC Error -32000: no"), A2AClientError("HTTP client is closed"), TaskNotFoundError()],
)
async def test_a_command_that_was_answered_or_cannot_be_sent_any_more_is_not_sent_again(answer: A2AError) -> None:
    ref = RunRef("t", 0, "/main", "main", "a", "id")
    request = RemoteRequest(ref=ref, profile="a", text="go", workspace="/w", limits=NOBODY)
    run = adapter.A2aAdapter(A2aAgent(url="http://127.0.0.1:1")).start(request)
    sent = []

    async def send() -> None:
        sent.append(1)
        raise answer

    with pytest.raises(type(answer)):
        await asyncio.wait_for(run._repeat(send), 100)
    assert len(sent) == 1


async def test_a_token_that_is_not_taken_is_replaced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_ID", "me")
    monkeypatch.setenv("CLIENT_SECRET", "s" * 20)
    async with serve_refusals(401) as (url, tokens), supervise(tmp_path) as supervisor:
        auth = AgentAuth(client_id_env="CLIENT_ID", client_secret_env="CLIENT_SECRET", token_url=f"{url}/token")
        result = await (
            await supervisor.spawn(make_profile(url, auth=auth, reconnect_timeout=60.0), Task("go"))
        ).result()
    assert tokens == ["Bearer token-0", "Bearer token-1"]
    assert result.status == "failed" and "CLIENT_ID and CLIENT_SECRET" in (result.error_details or "")


async def test_a_cancel_arrives_also_with_a_token_that_is_no_longer_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_ID", "me")
    monkeypatch.setenv("CLIENT_SECRET", "s" * 20)
    tokens, taken, began = itertools.count(1), ["Bearer token-1"], asyncio.Event()

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        began.set()
        await asyncio.Event().wait()

    def guard(agent: ASGIApp) -> ASGIApp:
        async def check(scope: Scope, receive: Receive, send: Send) -> None:
            answer = agent
            if scope["path"] == "/token":
                answer = JSONResponse({"access_token": f"token-{next(tokens)}", "expires_in": 3600})
            elif scope["method"] == "POST" and Headers(scope=scope).get("authorization") not in taken:
                answer = Response("no", 401)
            await answer(scope, receive, send)

        return check

    async with serve_agent(act, guard=guard) as (url, agent), supervise(tmp_path) as supervisor:
        auth = AgentAuth(client_id_env="CLIENT_ID", client_secret_env="CLIENT_SECRET", token_url=f"{url}/token")
        run = await supervisor.spawn(make_profile(url, auth=auth), Task("wait"))
        await began.wait()
        taken[:] = ["Bearer token-2"]
        assert await run.cancel()
        await asyncio.wait_for(agent.cancelled.wait(), 100)
        assert (await run.result()).status == "cancelled"


async def test_oauth_client_credentials_go_to_configured_hosts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_ID", "me")
    monkeypatch.setenv("CLIENT_SECRET", "s" * 20)
    asked: list[tuple[str, str]] = []

    async def give_token(request: Request) -> Response:
        asked.append((request.headers["authorization"], (await request.body()).decode()))
        return JSONResponse({"access_token": "fresh-token", "expires_in": 3600})

    async def redirect(request: Request) -> Response:
        return RedirectResponse("/token", 307)

    bound, login = bind()
    async with run_app(
        [Route("/token", give_token, methods=["POST"]), Route("/moved", redirect, methods=["POST"])], bound
    ):
        flow = OAuthFlows(client_credentials=ClientCredentialsOAuthFlow(token_url=f"{login}/token"))
        card = {"security_schemes": {"o": SecurityScheme(oauth2_security_scheme=OAuth2SecurityScheme(flows=flow))}}
        secret = {"client_id_env": "CLIENT_ID", "client_secret_env": "CLIENT_SECRET"}
        async with serve_agent(answer_as_seed, **card) as (url, agent), supervise(tmp_path) as supervisor:
            host = login.removeprefix("http://")
            ways = [
                A2aAgent(url=url, auth=AgentAuth(**secret, token_url=f"{login}/token", scopes=("a", "b"))),
                A2aAgent(url=url, auth=AgentAuth(**secret), allowed_hosts=(host,)),
            ]
            for way in ways:
                profile = Profile("argocd", tools=(), a2a=way)
                for _ in range(2):
                    assert (await (await supervisor.spawn(profile, Task("go"))).result()).status == "done"
            assert len(asked) == 2  # a token is used until it expires
            with pytest.raises(RetinueError, match="not allowed"):
                await inspect_agent(A2aAgent(url=url, auth=AgentAuth(**secret)))  # the card alone does not decide
            with pytest.raises(RetinueError, match="HTTP status 307"):
                await inspect_agent(A2aAgent(url=url, auth=AgentAuth(**secret, token_url=f"{login}/moved")))
    assert all(header.startswith("Basic ") for header, _ in asked)
    assert "scope=a+b" in asked[0][1] and agent.headers[0]["authorization"] == "Bearer fresh-token"


async def test_an_invalid_address_for_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIENT_ID", "me")
    monkeypatch.setenv("CLIENT_SECRET", "s" * 20)
    flow = OAuthFlows(client_credentials=ClientCredentialsOAuthFlow(token_url="http://["))
    card = {"security_schemes": {"o": SecurityScheme(oauth2_security_scheme=OAuth2SecurityScheme(flows=flow))}}
    auth = AgentAuth(client_id_env="CLIENT_ID", client_secret_env="CLIENT_SECRET")
    async with serve_agent(answer_as_seed, **card) as (url, _):
        with pytest.raises(RetinueError, match="has an invalid address"):
            await inspect_agent(A2aAgent(url=url, auth=auth))


async def test_an_agent_that_does_not_stream_is_asked_again_and_again(tmp_path: Path) -> None:
    silent = AgentCapabilities(streaming=False)
    async with serve_agent(answer_as_seed, capabilities=silent) as (url, agent), supervise(tmp_path) as supervisor:
        result = await (await supervisor.spawn(make_profile(url), Task("go"))).result()
    assert (result.status, len(agent.asked)) == ("done", 1)


class SleepingClock(ManualClock):
    """A clock that moves only while somebody sleeps, and at once."""

    async def sleep(self, seconds: float) -> None:
        self._now += max(seconds, 1e-6)  # a part of a token may be too little to move it
        await asyncio.sleep(0)


async def test_a_flood_of_updates_is_read_at_a_bounded_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates beyond the rate wait at the agent, and none is lost."""
    clock = SleepingClock()
    monkeypatch.setattr(adapter, "UPDATE_RATE", 100.0)
    monkeypatch.setattr(adapter, "UPDATE_BURST", 5)
    monkeypatch.setattr(adapter, "RateLimit", partial(RateLimit, clock=clock))

    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, *(f"{number}" for number in range(30)))
        await updater.complete()

    async with serve_agent(act) as (url, _), supervise(tmp_path) as supervisor:
        result = await (await supervisor.spawn(make_profile(url), Task("go"))).result()
    assert clock.monotonic() >= (30 - 5) / 100.0
    assert result.final_response.split() == [str(number) for number in range(30)]


def test_a_task_that_is_looked_up_again_says_nothing_twice() -> None:
    fold = UpdateFold()
    status = TaskStatus(state=TaskState.TASK_STATE_WORKING)
    status.message.CopyFrom(Words(message_id="m", parts=[Part(text="Looking...")]))
    large = Artifact(artifact_id="a", parts=[Part(text="x" * 1_000_000)])
    working = StreamResponse(task=A2aTask(id="t", status=status, artifacts=[large]))
    reports = [report for _ in range(10) for report in fold.apply(working)]
    assert [report.body.kind for report in reports] == ["run.started"]  # type: ignore[union-attr]
    large.parts[0].text += "the end"
    done = TaskStatus(state=TaskState.TASK_STATE_COMPLETED)
    said, ended = fold.apply(StreamResponse(task=A2aTask(id="t", status=done, artifacts=[large])))
    assert said.body.text == "Looking..." and ended.body.final_response.endswith("xthe end")  # type: ignore[union-attr]
