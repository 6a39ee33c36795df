"""Foreign A2A agents: plain agents of `a2a-sdk`, served in this process, that say what a test makes them say."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import uvicorn
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.request_handlers.request_handler import RequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes, create_rest_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentSkill,
    Part,
    Task,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.errors import TaskNotFoundError
from google.protobuf.json_format import MessageToDict
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Mount
from starlette.types import ASGIApp

from retinue.protocol.a2a import EXTENSION

_WORKING = TaskState.TASK_STATE_WORKING
Act = Callable[[TaskUpdater, RequestContext], Awaitable[None]]


class Agent(AgentExecutor):
    """An agent that runs `act`. It records its requests, and its `cancel` returns at once."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.asked: list[str] = []
        self.contexts: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled = asyncio.Event()

    async def execute(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.asked.append(context.get_user_input())
        self.contexts.append(context.context_id or "")
        self.headers.append(dict(context.call_context.state.get("headers", {})) if context.call_context else {})
        assert context.task_id and context.context_id
        if context.current_task is None:
            state = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
            await event_queue.enqueue_event(
                Task(id=context.task_id, context_id=context.context_id, status=state, history=[context.message])
            )
        updater = TaskUpdater(event_queue, context.task_id, context.context_id)
        await self._act(updater, context)

    async def cancel(self, context: RequestContext, event_queue: EventQueue) -> None:
        self.cancelled.set()
        assert context.task_id and context.context_id
        await TaskUpdater(event_queue, context.task_id, context.context_id).cancel()


def make_card(url: str, **changes: Any) -> AgentCard:
    fields = {
        "name": "Argocd",
        "description": "Knows ArgoCD.",
        "version": "1",
        "supported_interfaces": [
            AgentInterface(url=url, protocol_binding=binding, protocol_version=version)
            for binding in ("JSONRPC", "HTTP+JSON")
            for version in ("1.0", "0.3")
        ],
        "capabilities": AgentCapabilities(streaming=True),
        "default_input_modes": ["text"],
        "default_output_modes": ["text"],
        "skills": [AgentSkill(id="x", name="x", description="x", tags=["x"])],
        **changes,
    }
    return AgentCard(**fields)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Any:
        yield


@asynccontextmanager
async def run_app(routes: list[BaseRoute], bound: socket.socket) -> AsyncIterator[_Server]:
    config = uvicorn.Config(
        Starlette(routes=routes), log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    try:
        yield server
    finally:
        server.should_exit = True
        await serving


def bind(port: int = 0) -> tuple[socket.socket, str]:
    bound = socket.create_server(("127.0.0.1", port), backlog=512)
    return bound, f"http://127.0.0.1:{bound.getsockname()[1]}"


@asynccontextmanager
async def serve_agent(
    act: Act,
    port: int = 0,
    *,
    binding: tuple[str, str] | None = None,
    guard: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **card: Any,
) -> AsyncIterator[tuple[str, Agent]]:
    """Serve a plain SDK agent and yield its address. With a `binding` it speaks only this version and transport. What
    `guard` returns stands before the agent."""
    bound, url = bind(port)
    if binding is not None:
        card["supported_interfaces"] = [
            AgentInterface(url=url, protocol_version=binding[0], protocol_binding=binding[1])
        ]
    agent, made = Agent(act), make_card(url, **card)
    handler = DefaultRequestHandler(agent_executor=agent, task_store=InMemoryTaskStore(), agent_card=made)
    routes = [
        *create_agent_card_routes(made),
        *create_jsonrpc_routes(handler, "/", enable_v0_3_compat=True),
        *create_rest_routes(handler, enable_v0_3_compat=True),
    ]
    async with run_app([Mount("/", guard(Starlette(routes=routes)))], bound):
        yield url, agent


class Proxy:
    """A connection in between that a test can cut, or leave half open: bytes of the server then go nowhere."""

    def __init__(self) -> None:
        self.target = 0
        self.count = 0
        self.is_down = False  # ends every connection at once
        self.refused = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._stalled: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """End all connections, as a network that fails does."""
        for writer in self._writers | self._stalled:
            writer.transport.abort()
        self._writers, self._stalled = set(), set()

    def stall(self) -> None:
        """Let those that are open now be silent from here on; new ones work."""
        self._stalled, self._writers = self._writers, set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_down:
            self.refused += 1
            writer.transport.abort()
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.target)
        self.count += 1
        self._writers |= {writer, inner_writer}
        await asyncio.gather(self._copy(reader, inner_writer), self._copy(inner_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if writer in self._writers:
                    writer.write(data)
            if writer in self._writers:
                writer.close()


class Hand(RequestHandler):
    """A peer retinue played by a test, which chooses the events to send and reads the messages received."""

    def __init__(self) -> None:
        self.updates: asyncio.Queue[TaskStatusUpdateEvent | None] = asyncio.Queue()
        self.words: asyncio.Queue[str] = asyncio.Queue()
        self.answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.cancelled = asyncio.Event()
        self.asked = asyncio.Event()
        self.metadata: dict[str, Any] = {}
        self._cursor = 0

    def send(self, event: dict[str, Any]) -> None:
        self._cursor += 1
        update = TaskStatusUpdateEvent(task_id="t", context_id="c", status=TaskStatus(state=_WORKING))
        update.metadata.update({EXTENSION: {"event": json.dumps(event), "cursor": str(self._cursor)}})
        self.updates.put_nowait(update)

    async def on_message_send_stream(self, params: Any, context: Any) -> Any:
        self.metadata = MessageToDict(params.message.metadata)
        self.asked.set()
        yield Task(id="t", context_id="c", status=TaskStatus(state=TaskState.TASK_STATE_SUBMITTED))
        async for update in self.on_subscribe_to_task(params, context):
            yield update

    async def on_subscribe_to_task(self, params: Any, context: Any) -> Any:
        while (update := await self.updates.get()) is not None:
            yield update

    async def on_message_send(self, params: Any, context: Any) -> Any:
        for part in params.message.parts:
            if part.HasField("data"):
                self.answers.put_nowait(MessageToDict(part.data))
            else:
                self.words.put_nowait(part.text)
        return Task(id="t", context_id="c", status=TaskStatus(state=_WORKING))

    async def on_cancel_task(self, params: Any, context: Any) -> Any:
        self.cancelled.set()
        return Task(id="t", context_id="c", status=TaskStatus(state=_WORKING))

    async def on_get_task(self, params: Any, context: Any) -> Any:
        raise TaskNotFoundError

    on_list_tasks = on_get_extended_agent_card = on_get_task
    on_create_task_push_notification_config = on_get_task_push_notification_config = on_get_task
    on_list_task_push_notification_configs = on_delete_task_push_notification_config = on_get_task


@asynccontextmanager
async def serve_hand() -> AsyncIterator[tuple[str, Hand, _Server]]:
    bound, url = bind()
    extension = AgentExtension(uri=EXTENSION)
    extension.params.update({"approve_by": "client"})
    card = make_card(url, capabilities=AgentCapabilities(streaming=True, extensions=[extension]))
    hand = Hand()
    routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(hand, "/")]
    async with run_app(routes, bound) as server:
        yield url, hand, server


async def say(updater: TaskUpdater, *texts: str) -> None:
    """Status updates with these texts."""
    for text in texts:
        await updater.update_status(TaskState.TASK_STATE_WORKING, updater.new_agent_message([Part(text=text)]))


async def answer_as_seed(updater: TaskUpdater, context: RequestContext) -> None:
    """The six events of seed 003's subagent."""
    await say(
        updater,
        "🔧 Calling tool: **version_service__version**\n",
        "✅ Tool **version_service__version** completed\n",
        "ArgoCD runs v2.9.3.",
    )
    await updater.add_artifact([Part(text="")], name="current_result", last_chunk=True)
    await updater.complete()
