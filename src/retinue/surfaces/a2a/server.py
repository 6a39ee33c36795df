"""The A2A server: the SDK's routes behind the gate, on uvicorn.

`retinue a2a serve` creates the server with the Control of the tasks. The server offers the agent card of its profile.
"""

from __future__ import annotations

import base64
import logging
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from a2a.server.context import ServerCallContext
from a2a.server.routes import create_agent_card_routes, create_rest_routes
from a2a.server.routes.common import DefaultServerCallContextBuilder
from a2a.server.routes.jsonrpc_dispatcher import JSONRPC03Adapter, JsonRpcDispatcher  # type: ignore[attr-defined]
from a2a.server.routes.rest_routes import REST03Adapter  # type: ignore[attr-defined]
from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentSkill,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import PROTOCOL_VERSION_0_3, PROTOCOL_VERSION_1_0, TransportProtocol
from a2a.utils.error_handlers import rest_error_handler
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retinue.build.logs import open_log_reader
from retinue.concurrency import TaskOwner
from retinue.core.control import Control
from retinue.core.errors import RetinueError
from retinue.core.secrets import forget_secret, hide_secret
from retinue.protocol.a2a import EXTENSION
from retinue.protocol.notices import format_name
from retinue.surfaces.a2a.gate import CARD_PATH, GONE, RPC_PATH, Gate, Refused, make_refusal
from retinue.surfaces.a2a.handler import TaskHandler
from retinue.surfaces.a2a.options import OperatorScreen, ServerOptions
from retinue.surfaces.a2a.tasks import ServedTasks

INVALID_PARAMS = -32602
MAX_CONNECTIONS = 1024
GRACE_SECONDS = 5
SDK_LOGGERS = ("a2a", "uvicorn", "uvicorn.error", "uvicorn.access", "sse_starlette")
CACHE_CONTROL = "public, max-age=60"
MODES = ["text/plain"]
INPUT_MODES = ["text/plain", "application/json", "application/octet-stream"]
BEARER = "bearer"


class A2aServer:
    """The server. `async with A2aServer(...) as server` listens at `server.url` inside the block. `state` is the state
    folder of the project."""

    def __init__(self, control: Control, state: Path, options: ServerOptions, screen: OperatorScreen) -> None:
        self.control = control
        self._state, self._options, self._screen = state, options, screen
        self._owner = TaskOwner()

    async def __aenter__(self) -> A2aServer:
        options, screen = self._options, self._screen
        async with AsyncExitStack() as stack:
            bound = listen(options.host, options.port)
            stack.callback(bound.close)
            scheme = "http" if options.certificate is None else "https"
            self.address = format_address(options.host, bound.getsockname()[1])
            self.url = options.public_url or f"{scheme}://{self.address}"
            self.tasks = ServedTasks(self.control, open_log_reader(self._state), options, screen)
            stack.push_async_callback(self.tasks.close)
            await self.tasks.load()
            await self.tasks.resume()
            handler = TaskHandler(self.control, self.tasks, options, screen, self._state / "a2a" / "files")
            self._serve(handler, bound, stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _serve(self, handler: TaskHandler, bound: socket.socket, stack: AsyncExitStack) -> None:
        """Start answering requests, until the exit stack is closed."""
        options = self._options
        for secret in options.tokens.values():
            hide_secret(secret)
            stack.callback(forget_secret, secret)
        for name in SDK_LOGGERS:  # their tracebacks do not help the user at this terminal
            logging.getLogger(name).setLevel(logging.CRITICAL)
        hosts = self._list_hosts()
        scheme = self.url.partition("://")[0]
        config = uvicorn.Config(
            Gate(
                make_application(handler, make_card(options, self.url)),
                tokens=options.tokens,
                hosts=hosts,
                origins=frozenset(f"{scheme}://{host}" for host in hosts),
            ),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            server_header=False,
            ssl_certfile=options.certificate,
            ssl_keyfile=options.key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:
            raise RetinueError(f"the TLS certificate and key cannot be used: {error}") from None
        server = _Server(config)
        serving = self._owner.start(server.serve(sockets=[bound]))

        async def stop() -> None:
            server.should_exit = True
            await serving

        stack.push_async_callback(stop)

    def _list_hosts(self) -> frozenset[str]:
        """Return the Host headers that name this server."""
        port = self.address.rpartition(":")[2]
        names = {self.address, f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"}
        return frozenset(names | {self.url.partition("://")[2].partition("/")[0].lower()})


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the command line installs its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the address. Raises RetinueError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise RetinueError(f"cannot listen on {format_address(host, port)}: {error.strerror or error}") from None


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _ContextBuilder(DefaultServerCallContextBuilder):
    """A context builder that adds the event set when the client disconnects."""

    def build(self, request: Request) -> ServerCallContext:
        context = super().build(request)
        context.state[GONE] = request.scope[GONE]
        return context


def make_application(handler: TaskHandler, card: object) -> Starlette:
    """Return the application: card, JSON-RPC and REST, each for both versions of the protocol."""
    builder = _ContextBuilder()
    dispatcher = JsonRpcDispatcher(handler, context_builder=builder, enable_v0_3_compat=True)

    async def answer_rpc(request: Request) -> Response:
        problem = _find_wrong_params(await request.json())
        return problem or await dispatcher.handle_requests(request)

    made = Starlette(
        routes=[
            *create_agent_card_routes(card, cache_control=CACHE_CONTROL),  # type: ignore[arg-type]
            Route(RPC_PATH, answer_rpc, methods=["POST"]),
            *(
                Route(path, answer, methods=[way])
                for (path, way), answer in _Rest03Adapter(handler, builder).routes().items()
            ),
            *create_rest_routes(handler, context_builder=builder),
        ],
        exception_handlers={404: _answer_stray, 405: _answer_stray},
    )
    made.router.redirect_slashes = False
    return made


class _Rest03Adapter(REST03Adapter):
    """A REST adapter that answers an invalid streaming request before the stream begins. The SDK would only break off
    the stream."""

    @rest_error_handler
    async def _handle_streaming_request(  # type: ignore[override]
        self, method: Any, request: Request
    ) -> Response:
        stream = method(request, self._context_builder.build(request))
        first = await anext(stream, None)

        async def go_on(request: Request, context: ServerCallContext) -> AsyncGenerator[Any]:
            async with aclosing(stream):
                if first is not None:
                    yield first
                async for item in stream:
                    yield item

        return await super()._handle_streaming_request(go_on, request)


async def _answer_stray(request: Request, error: Exception) -> Response:
    """Answer a request that matches no route, such as a request from a browser."""
    assert isinstance(error, HTTPException)
    refused = Refused(error.status_code, f"{request.method} is not answered here: the agent's card is at {CARD_PATH}")
    return make_refusal(refused, is_rpc=False)


def _find_wrong_params(body: object) -> JSONResponse | None:
    """Return the error response to a 0.3 request with invalid params, or None. The SDK answers -32600 or -32603 where
    the protocol requires -32602."""
    method = body.get("method") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(method, str) or method not in JSONRPC03Adapter.METHOD_TO_MODEL:
        return None
    try:
        request = JSONRPC03Adapter.METHOD_TO_MODEL[method].model_validate(body)  # type: ignore[attr-defined]
        problem = _find_wrong_bytes(request)
    except ValidationError as error:
        wrong = [each for each in error.errors() if (each["loc"], each["type"]) != (("id",), "missing")]
        is_params = bool(wrong) and all(each["loc"][:1] == ("params",) for each in wrong)
        problem = f"{'.'.join(map(str, wrong[0]['loc']))}: {wrong[0]['msg']}" if is_params else ""
    if not problem:
        return None
    name, said = body.get("id"), {"code": INVALID_PARAMS, "message": problem}
    return JSONResponse({"jsonrpc": "2.0", "id": name if isinstance(name, str | int) else None, "error": said})


def _find_wrong_bytes(request: Any) -> str:
    """Return an error message if the base64 bytes of a file in a 0.3 request are invalid, else an empty string."""
    for number, part in enumerate(getattr(getattr(getattr(request, "params", None), "message", None), "parts", ())):
        try:
            base64.b64decode(getattr(getattr(part.root, "file", None), "bytes", ""), validate=True)
        except ValueError as error:
            return f"params.message.parts.{number}.file.bytes: {error}"
    return ""


def make_card(options: ServerOptions, url: str) -> AgentCard:
    """Return the agent card of the profile, served at `url`."""
    profile = options.profile
    about = profile.description or f"The agent '{profile.name}'"
    extension = AgentExtension(uri=EXTENSION, description="Every event of the tree of runs, with limits and approvals")
    extension.params.update({"approve_by": "client" if options.asks_client else "host"})
    card = AgentCard(
        name=format_name(profile.name),
        description=about,
        version=options.version,
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding=binding, protocol_version=number)
            for binding in (TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON)
            for number in (PROTOCOL_VERSION_1_0, PROTOCOL_VERSION_0_3)
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=False, extensions=[extension]),
        default_input_modes=INPUT_MODES,
        default_output_modes=MODES,
        skills=[AgentSkill(id=profile.name, name=format_name(profile.name), description=about, tags=["agent"])],
    )
    if options.tokens:
        card.security_schemes[BEARER].CopyFrom(
            SecurityScheme(http_auth_security_scheme=HTTPAuthSecurityScheme(scheme="Bearer"))
        )
        card.security_requirements.append(SecurityRequirement(schemes={BEARER: StringList()}))
    return card
