"""One MCP server over any transport: its sessions and their requests.

The server answers the handshake immediately and on its own. All other requests need the host (models, log, sandboxes),
which loads while the first answer is sent. The server knows no transport. Transports parse messages, pass in requests
and send the answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.surfaces.mcp import catalog, messages, revisions
from retinue.surfaces.mcp.messages import ErrorCode, Id, Notification, Response, RpcError, RpcRequest
from retinue.surfaces.mcp.revisions import ClientInfo

MAX_OPEN = 256
ELICIT = "elicitation/create"
NOTHING_RUN = " (nothing was run; once this is fixed, the next call works)"
UNUSABLE = "[Not usable when the tools were listed. Tell the user: {error}. Once this is fixed, the next call works.]"
_TIMED_OUT = re.compile(r"time[ds]?[ -]?out", re.IGNORECASE)


class Channel(Protocol):
    """A channel for messages to a peer other than its answers, usable while `is_open`. `send` never blocks; messages
    that the peer does not read are dropped."""

    @property
    def is_open(self) -> bool: ...
    def send(self, message: bytes) -> None: ...


class ToolHost(Protocol):
    """The part of the host that a server uses: its tools, and the end of a session."""

    def list_tools(self) -> list[dict[str, Any]]: ...
    async def call_tool(self, exchange: Exchange, name: str, args: dict[str, Any]) -> dict[str, Any]: ...
    async def end_session(self, session: Session) -> None: ...


class Server:
    """The server. `load` makes the host, or raises RetinueError if the project has an error. Whoever passes `load`
    closes the host. `say` shows the user a message. If the server `keeps_running` without a host, `say` also gets the
    error."""

    def __init__(
        self,
        load: Callable[[], Coroutine[Any, Any, ToolHost]],
        *,
        say: Callable[[str], None],
        keeps_running: bool = True,
        profile: str | None = None,
    ) -> None:
        self._load = load
        self.say = say
        self._keeps_running = keeps_running
        self._last_error = ""
        self._tasks = TaskOwner(on_error=self._report_error)  # a task that awaits the host gets the exception too
        self._loading: asyncio.Task[ToolHost] | None = None
        self.profile = profile
        self.instructions = (
            revisions.INSTRUCTIONS if profile is None else revisions.PROFILE_INSTRUCTIONS.format(name=profile)
        )

    def start_loading(self) -> asyncio.Task[ToolHost]:
        """Start loading the host, unless it is loading or loaded. A failed load is retried: the user may have repaired
        the project."""
        task = self._loading
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loading = self._tasks.start(self._load())
        return task

    async def wait_for_host(self) -> ToolHost:
        return await asyncio.shield(self.start_loading())

    def _report_error(self, error: BaseException) -> None:
        if isinstance(error, RetinueError) and self._keeps_running and str(error) != self._last_error:
            self._last_error = str(error)
            self.say(self._last_error)

    async def list_tools(self) -> list[dict[str, Any]]:
        try:
            return (await self.wait_for_host()).list_tools()
        except RetinueError as error:
            if self.profile is None:
                note = UNUSABLE.format(error=error)
                return [{**tool, "description": f"{note} {tool['description']}"} for tool in catalog.list_tools()]
            raise RpcError(ErrorCode.INTERNAL_ERROR, str(error)) from None

    async def find_host(self) -> ToolHost | None:
        """Return the host, waiting while it loads, or None if there is none."""
        with suppress(RetinueError):
            return None if self._loading is None else await asyncio.shield(self._loading)
        return None


class Exchange:
    """A request in progress. `timed_out` means that the peer stopped waiting but still wants the result, so the work
    started for the request continues."""

    def __init__(self, session: Session, request: RpcRequest, client: ClientInfo, channel: Channel) -> None:
        self.session = session
        self.request = request
        self.client = client
        self.channel = channel
        self.timed_out = False
        token = request.meta.get("progressToken")
        self.progress_token = token if isinstance(token, int | str) and not isinstance(token, bool) else None
        self._progress_count = 0
        self._task = asyncio.current_task()

    def send_progress(self, text: str) -> None:
        """Send progress, if the request asked for progress."""
        if self.progress_token is not None:
            self._progress_count += 1
            params = {"progressToken": self.progress_token, "progress": self._progress_count, "message": text}
            self.channel.send(messages.encode_message(method="notifications/progress", params=params))

    def cancel(self, *, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        if self._task is not None:
            self._task.cancel()


class Session:
    """The session of one client. `about` names its transport. If there is a `channel`, the client can be asked there
    at any time. All clients without a session of their own use a `shared` one."""

    def __init__(self, server: Server, *, about: str, channel: Channel | None = None, shared: bool = False) -> None:
        self.server = server
        self.about = about
        self.client: ClientInfo | None = None
        self.channel = channel
        self.exchanges: dict[object, Exchange] = {}
        self.has_running_subagents: Callable[[], bool] = lambda: False
        self._shared = shared
        self._asked: dict[Id, asyncio.Future[dict[str, Any] | None]] = {}
        self._count = 0

    def follow_subagents(self, has_running: Callable[[], bool]) -> None:
        """Stay busy while `has_running` returns True."""
        self.has_running_subagents = has_running

    async def answer(self, request: RpcRequest, client: ClientInfo, channel: Channel) -> bytes:
        """Return the answer as bytes, or raise RpcError. A cancelled request has no answer."""
        exchange = Exchange(self, request, client, channel)
        key: object = exchange if self._shared else request.id
        try:
            if key in self.exchanges or len(self.exchanges) >= MAX_OPEN:
                raise RpcError(
                    ErrorCode.INVALID_REQUEST, f"this id is in use, or more than {MAX_OPEN} requests are open"
                )
            self.exchanges[key] = exchange
            try:
                result = await self._handle_request(exchange)
            finally:
                del self.exchanges[key]
            return messages.encode_message(id=request.id, result=revisions.finish_result(request, client, result))
        except RpcError:
            raise
        except RetinueError as error:
            raise RpcError(ErrorCode.INTERNAL_ERROR, str(error)) from None
        except Exception as error:
            text = f"internal error: {type(error).__name__}: {error}"
            self.server.say(text)
            raise RpcError(ErrorCode.INTERNAL_ERROR, text) from error

    async def _handle_request(self, exchange: Exchange) -> dict[str, Any]:
        request, modern = exchange.request, exchange.client.modern
        match request.method:
            case "tools/list":
                return {"tools": await self.server.list_tools()}
            case "tools/call":
                return await self._call_tool(exchange)
            case "server/discover" if modern:
                about = {"capabilities": {"tools": {}}, "instructions": self.server.instructions}
                return {"supportedVersions": [revisions.ENVELOPE], **about}
            case "ping" if not modern:
                return {}
        raise RpcError(ErrorCode.METHOD_NOT_FOUND, "Method not found", request.method[:100])

    async def _call_tool(self, exchange: Exchange) -> dict[str, Any]:
        params = exchange.request.params
        name, args = params.get("name"), params.get("arguments")
        if not isinstance(name, str):
            raise RpcError(ErrorCode.INVALID_PARAMS, "tools/call: 'name' must be a string")
        if args is not None and not isinstance(args, dict):
            raise RpcError(ErrorCode.INVALID_PARAMS, "tools/call: 'arguments' must be an object")
        try:
            host = await self.server.wait_for_host()
        except RetinueError as error:
            return {"content": [{"type": "text", "text": f"{error}{NOTHING_RUN}"}], "isError": True}
        return await host.call_tool(exchange, name, args or {})

    def initialize(self, request: RpcRequest) -> bytes:
        """Answer the handshake of a session without waiting for the host. Raises RpcError."""
        self.client, result = revisions.answer_initialize(request.params, self.server.instructions)
        return messages.encode_message(id=request.id, result=result)

    def handle_message(self, message: Notification | Response) -> None:
        """Handle a message that needs no answer."""
        if isinstance(message, Response):
            waiting = self._asked.pop(message.id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.result)
        elif message.method == "notifications/cancelled":
            name, reason = message.params.get("requestId"), message.params.get("reason")
            found = self.exchanges.get(name) if isinstance(name, int | str) else None
            if found is not None:  # None if the request was already answered
                # MCP has no code for why a request is cancelled: only this text, which clients write on a timeout.
                found.cancel(timed_out=isinstance(reason, str) and _TIMED_OUT.search(reason) is not None)

    async def ask(self, channel: Channel, params: dict[str, Any]) -> dict[str, Any] | None:
        """Ask the client's user. Return the client's result, or None if the client answered with an error."""
        self._count += 1
        name = f"ask-{self._count}"
        waiting: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._asked[name] = waiting
        channel.send(messages.encode_message(id=name, method=ELICIT, params=params))
        try:
            return await waiting
        except asyncio.CancelledError:
            about = {"requestId": name, "reason": "answered elsewhere, or no longer needed"}
            channel.send(messages.encode_message(method="notifications/cancelled", params=about))
            raise
        finally:
            self._asked.pop(name, None)

    @property
    def is_busy(self) -> bool:
        return bool(self.exchanges) or self.has_running_subagents()

    def find_channel(self) -> Channel | None:
        """Return a channel on which the client can be asked now, or None."""
        return self.channel or next((each.channel for each in self.exchanges.values() if each.channel.is_open), None)

    async def close(self) -> None:
        """End the session of a client that is gone, with its requests and subagents."""
        for exchange in list(self.exchanges.values()):
            exchange.cancel()
        host = await self.server.find_host()
        if host is not None:
            await host.end_session(self)
