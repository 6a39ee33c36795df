"""Tests of A2A agents that send what no SDK sends: malformed, endless or far too large answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from a2a.server.routes import create_agent_card_routes
from a2a.types import AgentInterface
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from retinue import Task
from retinue.core.events import RunEnded
from tests.remote.a2a_kit import bind, make_card, run_app
from tests.remote.test_a2a import bodies, make_profile, read_run, supervise

WORKING = {"task": {"id": "t", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}}
DONE = {"statusUpdate": {"taskId": "t", "contextId": "c", "status": {"state": "TASK_STATE_COMPLETED"}}}


def encode_stream(*results: object) -> bytes:
    """Return the events of a stream. A result given as bytes is sent as it is."""
    return b"".join(
        b'data: {"jsonrpc": "2.0", "id": 1, "result": %b}\n\n'
        % (result if isinstance(result, bytes) else json.dumps(result).encode())
        for result in results
    )


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
