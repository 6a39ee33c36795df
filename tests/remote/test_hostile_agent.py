"""Tests of A2A agents that send what no SDK sends: malformed, endless or far too large answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from a2a.server.routes import create_agent_card_routes
from a2a.types import (
    AgentInterface,
    Artifact,
    Message,
    Part,
    Role,
    StreamResponse,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from retinue import Task
from retinue.core.caller import NOBODY
from retinue.core.events import ApprovalAsked, ApprovalDecided, Body, Event, Gap, RunEnded, RunStarted
from retinue.core.messages import RunRef
from retinue.core.remote_agents import A2aAgent
from retinue.protocol.a2a import EXTENSION, make_event_metadata
from retinue.remote.a2a import connection
from retinue.remote.a2a.adapter import MOST_ASKED, A2aAdapter
from retinue.remote.a2a.updates import UpdateFold
from retinue.remote.port import RemoteRequest, Report
from tests.remote.a2a_kit import bind, make_card, run_app
from tests.remote.test_a2a import bodies, make_profile, read_run, supervise

WORKING = {"task": {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}}
REQUEST = RemoteRequest(
    ref=RunRef("t", 0, "/main", "main", "a", "id"), profile="a", text="go", workspace="/w", limits=NOBODY
)
DONE = {"statusUpdate": {"taskId": "t", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"}}}


def encode_stream(*results: object) -> bytes:
    """Return the events of a stream. A result given as bytes is sent as it is."""
    return b"".join(
        b'data: {"jsonrpc": "2.0", "id": 1, "result": %b}\n\n'
        % (result if isinstance(result, bytes) else json.dumps(result).encode())
        for result in results
    )


def make_typed_update(body: Body, seq: int) -> StreamResponse:
    """Return the update by which another Retinue reports an event."""
    metadata = make_event_metadata(Event(seq, "t", 0, "/main", "main", 1.0, body))
    update = TaskStatusUpdateEvent()
    update.metadata.update({EXTENSION: metadata})
    return StreamResponse(status_update=update)


@asynccontextmanager
async def serve_answers(*answers: bytes | AsyncIterator[bytes]) -> AsyncIterator[tuple[str, list[str]]]:
    """Serve an agent that answers its requests with `answers`, the last one again and again. Yield its address, and the
    list of the methods that are called."""
    bound, url = bind()
    called: list[str] = []

    async def respond(request: Request) -> Response:
        answer = answers[min(len(called), len(answers) - 1)]
        called.append((await request.json())["method"])
        kind = "text/event-stream" if "Stream" in called[-1] or "Subscribe" in called[-1] else "application/json"
        if isinstance(answer, bytes):
            return Response(answer, media_type=kind)
        return StreamingResponse(answer, media_type=kind)

    interfaces = [AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version="1.0")]
    card = make_card(url, supported_interfaces=interfaces)
    async with run_app([*create_agent_card_routes(card), Route("/", respond, methods=["POST"])], bound):
        yield url, called


async def run_once(folder: Path, url: str) -> RunEnded:
    """Return the ending of a run at the agent."""
    async with supervise(folder) as supervisor:
        [ending] = bodies(await read_run(await supervisor.spawn(make_profile(url), Task("go"))), RunEnded)
    assert isinstance(ending, RunEnded)
    return ending


@pytest.mark.parametrize("answer", [b"", encode_stream([]), encode_stream({"statusUpdate": "x"})])
async def test_a_message_whose_stream_ends_without_a_task_is_not_sent_again(tmp_path: Path, answer: bytes) -> None:
    async with serve_answers(answer) as (url, called):
        ending = await run_once(tmp_path, url)
    assert called == ["SendStreamingMessage"]
    assert ending.status == "disconnected" and "is not called again" in (ending.error_details or "")


async def test_an_error_in_place_of_a_task_is_no_lost_connection(tmp_path: Path) -> None:
    busy = b'data: {"jsonrpc": "2.0", "id": 1, "error": {"code": -32000, "message": "busy"}}\n\n'
    async with serve_answers(busy) as (url, called):
        ending = await run_once(tmp_path, url)
    assert called == ["SendStreamingMessage"]
    text = "the agent answers with an error: JSON-RPC Error -32000: busy"
    assert (ending.status, ending.error_details) == ("failed", text)


MALFORMED = {
    "no object": [5],
    "a null": [None],
    "wrong types": [WORKING, {"task": {"id": 5}}],
    "two payloads": [{**WORKING, **DONE}],
    "deep": [WORKING, b"[" * 100_000 + b"]" * 100_000],
    "a long number": [WORKING, b"9" * 5000],
    "half of a character": [WORKING, b'{"task": {"id": "\\ud800"}}'],
    "no time": [WORKING, {"task": {"id": "t", "status": {"timestamp": "noon"}}}],
}


@pytest.mark.parametrize("results", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_answer_of_an_agent_is_its_failure(tmp_path: Path, results: list[object]) -> None:
    said = {"artifactUpdate": {"taskId": "t", "artifact": {"artifactId": "a", "parts": [{"text": "so far"}]}}}
    first = [said] if results[0] is WORKING else []
    async with serve_answers(encode_stream(*results[:1], *first, *results[1:])) as (url, called):
        ending = await run_once(tmp_path, url)
    assert called == ["SendStreamingMessage"]
    assert ending.status == "failed" and ending.final_response.startswith("the agent sends what cannot be read: ")
    assert ending.partial == ("so far" if first else "")


async def test_an_ending_counts_although_its_task_cannot_be_read(tmp_path: Path) -> None:
    task = json.dumps({"jsonrpc": "2.0", "id": 1, "result": WORKING["task"]}).encode()
    answers = encode_stream(WORKING), task, encode_stream(DONE), b'{"jsonrpc": "2.0", "id": 1, "result": 5}'
    async with serve_answers(*answers) as (url, called):
        ending = await run_once(tmp_path, url)
    assert called == ["SendStreamingMessage", "GetTask", "SubscribeToTask", "GetTask"]
    assert ending.status == "done"


async def test_data_that_is_no_json_is_named_in_the_answer(tmp_path: Path) -> None:
    data = b'{"artifactUpdate": {"taskId": "t", "artifact": {"artifactId": "a", "parts": [{"data": {"x": NaN}}]}}}'
    async with serve_answers(encode_stream(WORKING, data, DONE)) as (url, _):
        ending = await run_once(tmp_path, url)
    assert (ending.status, ending.final_response) == ("done", "[data that is not JSON]")


async def test_a_message_that_is_answered_with_nonsense_is_undelivered(tmp_path: Path) -> None:
    is_over = asyncio.Event()

    async def stream() -> AsyncIterator[bytes]:
        yield encode_stream(WORKING)
        await is_over.wait()
        yield encode_stream(DONE)

    nonsense = b'{"jsonrpc": "2.0", "id": 1, "result": 5}'
    async with serve_answers(stream(), nonsense) as (url, called), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("go"))
        async for event in run.events():
            if isinstance(event.body, RunStarted):
                receipt = await run.send("more")
                is_over.set()
    assert called == ["SendStreamingMessage", "SendMessage"]
    assert receipt.state == "too_late" and "the agent sends what cannot be read" in receipt.why


@pytest.mark.parametrize(
    "metadata",
    [{"x": math.nan}, {"event": json.dumps({"delta": {"x": 1}}).replace("1", "[" * 5000 + "]" * 5000)}],
    ids=["no JSON", "deep"],
)
def test_metadata_of_another_retinue_that_cannot_be_read_leaves_a_gap(metadata: dict[str, Any]) -> None:
    async def read() -> list[Report]:
        run = A2aAdapter(A2aAgent(url="http://127.0.0.1:1")).start(REQUEST)
        update = TaskStatusUpdateEvent()
        update.metadata.update({EXTENSION: metadata})
        return run._read_typed(StreamResponse(status_update=update))

    [report] = asyncio.run(read())
    assert isinstance(report.body, Gap)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
async def test_a_stream_may_be_endless_but_none_of_its_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    """An event ends with an empty line. The SDK keeps all lines before it."""
    monkeypatch.setattr(connection, "STREAM_EVENT_BYTES", 10_000)

    async def stream(*, ends_events: bool) -> AsyncIterator[bytes]:
        yield encode_stream(WORKING).replace(b"\n", end)
        for _ in range(1000):
            yield b": " + b"x" * 100 + end
            if ends_events:
                yield end
        yield end + encode_stream(DONE).replace(b"\n", end)

    async with serve_answers(stream(ends_events=True)) as (url, _):
        assert (await run_once(tmp_path, url)).status == "done"
    refused = b'{"jsonrpc": "2.0", "id": 1, "error": {"code": -32001}}'
    async with serve_answers(stream(ends_events=False), refused) as (url, called):
        ending = await run_once(tmp_path, url)
    assert ending.status == "disconnected" and called == ["SendStreamingMessage", "GetTask"]


async def test_names_and_questions_of_an_agent_take_little_room() -> None:
    fold = UpdateFold()
    for number in range(20):
        artifact = Artifact(artifact_id=f"{number}" * 500_000, parts=[Part(text=f"{number} ")])
        fold.apply(StreamResponse(artifact_update=TaskArtifactUpdateEvent(task_id="t", artifact=artifact)))
    [*_, ending] = fold.apply(StreamResponse(message=Message(message_id="m")))
    assert isinstance(ending.body, RunEnded) and len(ending.body.final_response.split()) == 20
    assert sum(map(len, (*fold._artifacts, *fold._heard))) < 10_000
    run = A2aAdapter(A2aAgent(url="http://127.0.0.1:1")).start(REQUEST)
    for number in range(2 * MOST_ASKED):
        run._read_typed(make_typed_update(ApprovalAsked(f"q{number}", "c", "x", {"a": "b" * 1000}), number))
    assert len(run._asked) == MOST_ASKED and not any(asked.args for asked in run._asked.values())
    run._read_typed(make_typed_update(ApprovalDecided("q0", "c", True), number + 1))
    assert len(run._asked) == MOST_ASKED - 1


def test_long_messages_with_one_id_and_one_beginning_are_different() -> None:
    fold = UpdateFold()
    for word in ("one", "two", "two"):
        message = Message(message_id="m", role=Role.ROLE_AGENT, parts=[Part(text="x" * 1000 + word)])
        status = TaskStatus(state=TaskState.TASK_STATE_WORKING, message=message)
        fold.apply(StreamResponse(status_update=TaskStatusUpdateEvent(task_id="t", status=status)))
    assert [text[1000:] for text in fold._said] == ["one", "two"]
