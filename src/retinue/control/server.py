"""The control server: the commands of Control over HTTP on the loopback interface, for other processes of the user.

Every request is checked before its body is read: Host and Origin, so that no web page can send requests, and the
token, which is stored in a file that only the user can read. GET requests change nothing. Most commands are methods of
Control, called with the fields of the request (see the table in `protocol.control`). The surface that runs trees
starts and stops the server.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from retinue.concurrency import TaskOwner, run_until_first
from retinue.control.address_files import AddressFile
from retinue.core.control import ClientOptions, Control, ResumeOverrides, RunHandle
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import Delta, encode_event
from retinue.core.results import Result
from retinue.core.secrets import forget_secret, hide_secret
from retinue.http.listener import Listener
from retinue.http.server import HttpError, HttpRequest, ServerConnection, check_bearer_token
from retinue.protocol import control as protocol
from retinue.protocol.strict_json import InvalidBody, decode_body, encode_body

MAX_CONNECTIONS = 256
GRACE_SECONDS = 1.0
MAX_REMEMBERED = 4096
HEARTBEAT_SECONDS = 5.0
STUCK_SECONDS = 30.0
BUFFERED_BYTES = 64 * 1024
LINES_PER_TURN = 64
UNATTENDED = (
    "process {pid} writes the log of {tree} and asks nobody, since it was started with --yes: "
    "add --yes to continue there all the same, or wait until it has ended"
)
_ENDLESS = (protocol.ATTEND, protocol.WATCH_QUESTIONS)  # streams that end only with the server


class ControlServer(Listener):
    """The control server. `async with ControlServer(control, state_folder)` listens inside the block and removes its
    address file afterwards. `unattended` marks a process that asks nobody for approval: it resumes and continues runs
    only for a client that accepts this."""

    address: protocol.Address

    def __init__(self, control: Control, state: Path, *, unattended: bool = False) -> None:
        super().__init__("this control server", max_connections=MAX_CONNECTIONS)
        self._state = state
        self._token = secrets.token_urlsafe(32)
        self._control = control
        self._unattended = unattended
        self._streams: dict[protocol.StreamCommand, Callable[[Any], AsyncGenerator[bytes]]] = {
            protocol.OPEN_CLIENT: self._open_client,
            protocol.ATTEND: self._attend,
            protocol.WATCH: self._watch_tree,
            protocol.WATCH_QUESTIONS: self._watch_questions,
        }
        self._calls = _KeyedCalls()
        self._closing = asyncio.Event()

    async def __aenter__(self) -> ControlServer:
        port = self.listen()
        hide_secret(self._token)
        self.address = protocol.Address(
            version=protocol.VERSION, pid=os.getpid(), port=port, token=self._token, writer=self._control.writer
        )
        try:
            self._file = AddressFile(self._state, self.address)
        except RetinueError:
            await self.stop_listening()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._file.remove()
        await self.stop_listening()
        self._closing.set()
        await self.end_connections(GRACE_SECONDS)  # watchers of an ended tree get its last events
        await self._calls.close()
        forget_secret(self._token)

    async def respond(self, request: HttpRequest, connection: ServerConnection) -> None:
        route = self._find_route(request)
        try:
            if route.reads:
                arguments = protocol.decode_query(request.query, route.request)
            else:
                arguments = decode_body(await connection.read_json_body(request), route.request)
            if isinstance(route, protocol.Command):
                key = "" if route.reads else request.headers.get(protocol.KEY_HEADER.lower(), "")
                run = partial(self._run_command, route, arguments)
                reply = await self._calls.run_once(key, (route.path, arguments), run) if key else await run()
                connection.send_response(200, encode_body(reply))
                return
            async with aclosing(self._streams[route](arguments)) as lines:
                first = await anext(lines)  # raises the errors of the request
                closing = self._closing if route in _ENDLESS else asyncio.Event()
                await _send_lines(first, lines, connection, closing)
        except InvalidBody as error:
            raise HttpError(400, str(error)) from None
        except RetinueError as error:
            status = 404 if isinstance(error, NotFound) else 400
            connection.send_response(status, encode_body(protocol.to_error_reply(error)))

    def _find_route(self, request: HttpRequest) -> protocol.Command[Any] | protocol.StreamCommand:
        """Return the command of a request, after checking token, route and method. Raises HttpError."""
        check_bearer_token(request, self._token)
        route = protocol.ROUTES.get(request.path)
        if route is None:
            raise HttpError(404, "there is no such route")
        method = "GET" if route.reads else "POST"
        if request.method != method:
            raise HttpError(405, f"this route takes {method} only", Allow=method)
        if request.query and not route.reads:
            raise HttpError(400, "this route takes no parameters in its address")
        return route

    async def _run_command(self, command: protocol.Command[Any], request: protocol.Arguments) -> Any:
        """Call the method of Control, and return the part of its result that can be sent to another process."""
        arguments = msgspec.structs.asdict(request)
        if isinstance(request, protocol.ResumeRequest | protocol.ContinueRequest):
            if self._unattended and not request.unattended:
                raise ConfigError(UNATTENDED.format(pid=os.getpid(), tree=request.tree))
            overrides = {name: arguments.pop(name) for name in ResumeOverrides.__struct_fields__ if name in arguments}
            arguments["overrides"] = ResumeOverrides(**overrides)
        reply = await getattr(self._control, command.method)(**arguments)
        if isinstance(reply, RunHandle):
            await reply.wait_until_logged()
            return reply.ref
        if isinstance(reply, Result):  # the parser of a typed output is a function and cannot be sent
            return msgspec.structs.replace(reply, parse=msgspec.UNSET)
        return reply

    # Streams. A handler yields its first line, which may be empty, once its request is known to have no error.

    async def _open_client(self, request: protocol.OpenClientRequest) -> AsyncGenerator[bytes]:
        async with await self._control.open_client(ClientOptions(**msgspec.structs.asdict(request))) as client:
            yield encode_body(client.ref)
            await client.result()

    async def _attend(self, request: protocol.QuestionsRequest) -> AsyncGenerator[bytes]:
        async with self._control.attend(request.tree):
            yield b"{}"
            await asyncio.Event().wait()  # until the client leaves

    async def _watch_questions(self, request: protocol.QuestionsRequest) -> AsyncGenerator[bytes]:
        yield b""
        async with aclosing(self._control.watch_questions(request.tree)) as changes:
            async for change in changes:
                yield protocol.encode_question(change)

    async def _watch_tree(self, request: protocol.WatchRequest) -> AsyncGenerator[bytes]:
        await self._control.describe_run(request.tree)  # raises NotFound
        yield b""
        async with aclosing(self._control.watch(request.tree, after=request.after, deltas=request.deltas)) as items:
            async for item in items:
                yield protocol.encode_delta(item) if isinstance(item, Delta) else encode_event(item)


class _KeyedCalls:
    """A runner that executes a command once per key. A repetition gets the reply of the first call, even while that
    call is still running."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[object, asyncio.Task[Any]]] = {}
        self._tasks = TaskOwner(on_error=lambda _: None)  # the task that awaits the reply gets the exception

    async def run_once(self, key: str, content: object, run: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if len(key) > protocol.MAX_KEY:
            raise HttpError(400, f"{protocol.KEY_HEADER} is longer than {protocol.MAX_KEY} characters")
        known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = (content, self._tasks.start(run()))
            if len(self._calls) > MAX_REMEMBERED:
                del self._calls[next(iter(self._calls))]
        first_content, task = known
        if first_content != content:
            raise HttpError(409, f"this {protocol.KEY_HEADER} belongs to another command")
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End the commands that are still running."""
        await self._tasks.close(None)


async def _send_lines(
    first_line: bytes, lines: AsyncGenerator[bytes], connection: ServerConnection, closing: asyncio.Event
) -> None:
    """Send the lines of a stream command, until there are no more, the peer is gone, or `closing` is set.

    A slow peer blocks only itself. A peer that reads nothing for too long is dropped; a watcher can then reconnect
    with `after` set to its last event. An empty line is a heartbeat."""
    connection.start_response(200, {"Content-Type": "application/x-ndjson"})
    connection.send_chunk(first_line + b"\n")
    with suppress(OSError, RetinueError):  # the peer is gone or stuck, or the lines fail: the response stays unfinished
        first = await run_until_first(
            [
                _write_lines(lines, connection),
                _send_heartbeats(connection),
                connection.wait_for_peer(),
                closing.wait(),
            ]
        )
        if first in (0, 3):
            connection.end_response()


async def _write_lines(lines: AsyncGenerator[bytes], connection: ServerConnection) -> None:
    written = 0
    async for line in lines:
        connection.send_chunk(line + b"\n")
        written += 1
        if connection.unsent_bytes > BUFFERED_BYTES:
            async with asyncio.timeout(STUCK_SECONDS):
                await connection.drain()
        elif written % LINES_PER_TURN == 0:
            await asyncio.sleep(0)  # let runs proceed while a fast peer reads a long history


async def _send_heartbeats(connection: ServerConnection) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        if not connection.unsent_bytes:
            connection.send_chunk(b"\n")
