"""MCP over streamable HTTP on the loopback interface, with one request per connection. The response is JSON, or a
stream of events if messages precede the answer.

Every request is checked before its body is read: Host and Origin, so that no web page can send requests, then the
token, method, content type and size. A client with a handshake has its own session; clients of 2026-07-28 share one.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import shlex
from collections.abc import Callable
from pathlib import Path

from retinue.concurrency import TaskOwner
from retinue.core.secrets import forget_secret, hide_secret
from retinue.files.token_file import load_token
from retinue.http.listener import HOST, Listener
from retinue.http.server import HttpError, HttpRequest, ServerConnection, check_bearer_token
from retinue.surfaces.mcp import messages, revisions
from retinue.surfaces.mcp.messages import MAX_MESSAGE_BYTES, ErrorCode, Message, RpcError, RpcRequest
from retinue.surfaces.mcp.server import Server, Session

PATH = "/mcp"
METHODS = ("POST", "DELETE")
MAX_CONNECTIONS = 256
MAX_SESSIONS = 64
PING_SECONDS = 5.0
SWEEP_SECONDS = 15.0
STUCK_SECONDS = 30.0
BUFFERED_BYTES = 256 * 1024
TOKEN_PURPOSE = "mcp token"
SESSION = "mcp-session-id"
STATUSES = {ErrorCode.METHOD_NOT_FOUND: 404, ErrorCode.INTERNAL_ERROR: 200}  # by error; others have status 400
EVENTS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


async def serve_http(
    server: Server,
    stop: asyncio.Event,
    *,
    port: int,
    state: Path,
    token: bool,
    say: Callable[[str], None],
    idle_seconds: float,
) -> None:
    """Serve until `stop` is set. The token is kept in `state`, the project's state folder. Without `token`, every
    program on this machine may use the server."""
    file = state / "mcp" / "token" if token else None
    secret = "" if file is None else load_token(file, TOKEN_PURPOSE)
    async with Endpoint(server, port=port, token=secret, idle_seconds=idle_seconds) as endpoint:
        say(f"serving MCP on {endpoint.url}; Ctrl-C stops")
        if file is None:
            say("warning: every program of this machine may use it (--no-token)")
        else:
            say(f'the header to send: "Authorization: Bearer $(cat {shlex.quote(str(file))})"')
        await stop.wait()


class Endpoint(Listener):
    """The HTTP endpoint. `async with Endpoint(...)` listens inside the block and ends all sessions afterwards. An
    empty token admits every client.

    Most clients disconnect without notice. A session and its subagents therefore end once the client has had no
    connection for `idle_seconds`. The same holds for the shared session, once none of its clients was connected for so
    long."""

    def __init__(self, server: Server, *, port: int, token: str, idle_seconds: float) -> None:
        super().__init__("this server", max_connections=MAX_CONNECTIONS)
        self._server, self._port, self._token, self._session_seconds = server, port, token, idle_seconds
        self._sessions: dict[str, HttpSession] = {}
        self._shared = HttpSession(server, shared=True)
        self._sweeper = TaskOwner()

    async def __aenter__(self) -> Endpoint:
        self.url = f"http://{HOST}:{self.listen(self._port)}{PATH}"
        hide_secret(self._token)
        self._sweeper.start(self._end_idle_sessions())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sweeper.close()
        await self.stop_listening()
        forget_secret(self._token)
        for session in (*self._sessions.values(), self._shared):
            await session.close()
        await self.end_connections()

    def encode_error(self, text: str) -> bytes:
        return messages.encode_error(None, RpcError(ErrorCode.INVALID_REQUEST, text))

    async def respond(self, request: HttpRequest, connection: ServerConnection) -> None:
        self._check(request)
        request_id = None
        try:
            if request.method == "DELETE":
                self._find_session(request)
                await self._sessions.pop(request.headers[SESSION]).close()
                connection.send_response(200, b"{}")
            else:
                message = messages.parse_message(await connection.read_json_body(request, MAX_MESSAGE_BYTES))
                request_id = message.id if isinstance(message, RpcRequest) else None
                await self._handle_message(request, message, connection)
        except RpcError as error:
            answer = messages.encode_error(request_id if error.id is None else error.id, error)
            connection.send_response(STATUSES.get(error.code, 400), answer)
        await connection.flush(STUCK_SECONDS)

    def _check(self, request: HttpRequest) -> None:
        """Check token, path, method and Accept header, before reading anything else of the request."""
        if self._token:
            check_bearer_token(request, self._token)
        if request.path != PATH:
            raise HttpError(404, f"the endpoint is {PATH}")
        if request.method not in METHODS:
            raise HttpError(405, f"the endpoint takes {' and '.join(METHODS)}", Allow=", ".join(METHODS))
        accepted = request.headers.get("accept", "*/*")
        if request.method == "POST" and not any(
            kind in accepted for kind in ("application/json", "application/*", "*/*")
        ):
            raise HttpError(406, "answers are application/json or text/event-stream; accept both")

    async def _handle_message(self, request: HttpRequest, message: Message, connection: ServerConnection) -> None:
        said = request.headers.get("mcp-protocol-version")
        modern = said == revisions.ENVELOPE or (isinstance(message, RpcRequest) and revisions.is_enveloped(message))
        if modern and isinstance(message, RpcRequest):
            client = revisions.read_envelope(message, request.headers)
            await self._answer_request(self._shared, message, client, request, connection)
        elif modern:
            connection.send_response(202)  # this revision gives notifications and responses no meaning
        elif isinstance(message, RpcRequest) and message.method == "initialize":
            await self._make_room()
            name, session = secrets.token_urlsafe(24), HttpSession(self._server)
            answer = session.initialize(message)
            self._sessions[name] = session
            session.record_presence()
            connection.send_response(200, answer, {"Mcp-Session-Id": name})
        else:
            session = self._find_session(request)
            if said is not None and said not in revisions.HANDSHAKE:
                raise HttpError(400, "MCP-Protocol-Version is not a revision that is spoken here")
            if isinstance(message, RpcRequest):
                assert session.client is not None
                await self._answer_request(session, message, session.client, request, connection)
            else:
                session.handle_message(message)
                connection.send_response(202)

    async def _end_idle_sessions(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(self._session_seconds / 4, SWEEP_SECONDS))
            since = clock() - self._session_seconds
            for name, session in list(self._sessions.items()):
                if session.is_idle(since) and self._sessions.pop(name, None) is not None:
                    await session.close()
            if self._shared.is_idle(since):
                ended, self._shared = self._shared, HttpSession(self._server, shared=True)
                await ended.close()

    async def _make_room(self) -> None:
        """End the oldest idle session if there are too many. Raises RpcError if no session is idle."""
        if len(self._sessions) >= MAX_SESSIONS:
            idle = next((name for name, session in self._sessions.items() if not session.is_busy), None)
            if idle is None:
                raise RpcError(ErrorCode.INTERNAL_ERROR, f"{MAX_SESSIONS} sessions are at work already")
            await self._sessions.pop(idle).close()

    def _find_session(self, request: HttpRequest) -> HttpSession:
        name = request.headers.get(SESSION)
        if name is None:
            raise HttpError(400, "Mcp-Session-Id is missing: the first request is 'initialize'")
        session = self._sessions.get(name)
        if session is None:
            raise HttpError(404, "there is no such session; begin another one with 'initialize'")
        session.record_presence()
        return session

    async def _answer_request(
        self,
        session: HttpSession,
        message: RpcRequest,
        client: revisions.ClientInfo,
        request: HttpRequest,
        connection: ServerConnection,
    ) -> None:
        """Send the answer. A client of 2026-07-28 cancels by disconnecting. A client with a session may reconnect, so
        its request continues."""
        accepted = request.headers.get("accept", "*/*")
        stream = _ResponseStream(connection, accepts_events="text/event-stream" in accepted or "*/*" in accepted)
        async with TaskOwner() as owner:  # ends both tasks: only one may read the connection at a time
            answering = owner.start(session.answer(message, client, stream))
            gone = owner.start(connection.wait_for_peer())
            session.record_presence(connections=1)
            try:
                while not answering.done() and not gone.done():
                    await asyncio.wait({answering, gone}, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    stream.ping()
            finally:
                session.record_presence(connections=-1)
            if not answering.done():
                stream.is_gone = True
                if client.modern:
                    answering.cancel()
                await asyncio.wait({answering})
        try:
            stream.end(200, answering.result())
        except RpcError as error:
            status = STATUSES.get(error.code, 400) if client.modern else 200
            stream.end(status, messages.encode_error(message.id, error))
        except asyncio.CancelledError:
            stream.end(202, b"")  # the client cancelled the request and expects no answer


class HttpSession(Session):
    """A session that records when its client was last seen, and its number of connections."""

    def __init__(self, server: Server, *, shared: bool = False) -> None:
        super().__init__(server, about="HTTP", shared=shared)
        self._connections, self._seen_at = 0, math.inf  # not idle before its client has connected

    def record_presence(self, *, connections: int = 0) -> None:
        """Record that the client is present now, and add `connections` (may be negative) to its connection count."""
        self._connections += connections
        self._seen_at = asyncio.get_running_loop().time()

    def is_idle(self, since: float) -> bool:
        return self._connections <= 0 and self._seen_at < since


class _ResponseStream:
    """One response: the answer alone, or events followed by the answer. Events are dropped if the client does not
    read."""

    def __init__(self, connection: ServerConnection, *, accepts_events: bool) -> None:
        self._connection, self._accepts_events = connection, accepts_events
        self._has_started = self.is_gone = False

    @property
    def is_open(self) -> bool:
        return self._accepts_events and not self.is_gone

    def send(self, message: bytes) -> None:
        if not self.is_open or self._connection.unsent_bytes > BUFFERED_BYTES:
            return
        if not self._has_started:
            self._has_started = True
            self._connection.start_response(200, EVENTS)
        self._connection.send_chunk(_encode_event(message))

    def ping(self) -> None:
        if self._has_started and not self.is_gone:
            self._connection.send_chunk(b": still at work\r\n\r\n")

    def end(self, status: int, message: bytes) -> None:
        if self.is_gone:
            return
        if not self._has_started:
            self._connection.send_response(status, message)
            return
        if message:
            self._connection.send_chunk(_encode_event(message))
        self._connection.end_response()


def _encode_event(message: bytes) -> bytes:
    return b"event: message\r\ndata: " + message + b"\r\n\r\n"
