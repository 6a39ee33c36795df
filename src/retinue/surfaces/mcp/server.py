"""One MCP server, whatever it is reached through: sessions, their requests, and what is answered to each.

Answers the handshake by itself and at once. The rest (models, log, walls) is the host's, which is loaded beside the
first answer and waited for by whoever needs it. Knows no transport: those parse, hand requests in, and send answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.surfaces.mcp import catalog, messages, revisions
from retinue.surfaces.mcp.messages import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    Id,
    Notification,
    Problem,
    Request,
    Response,
)
from retinue.surfaces.mcp.revisions import Client

MOST_OPEN = 256
ELICIT = "elicitation/create"
EMPTY = {"prompts/list": "prompts", "resources/list": "resources", "resources/templates/list": "resourceTemplates"}
AGAIN = " (so nothing was run; when it is mended, the next call works)"
UNUSABLE = "[Not usable when this was listed, tell the user: {error}. When it is mended, the next call works.]"
_TIMED_OUT = re.compile(r"time[ds]?[ -]?out", re.IGNORECASE)


class Channel(Protocol):
    """Where a peer hears from us beside its answers, while it is `open`. Never blocks; what nobody reads is dropped."""

    @property
    def open(self) -> bool: ...
    def send(self, message: bytes) -> None: ...


class Host(Protocol):
    """What does the work. `state` is the project's state folder."""

    @property
    def state(self) -> Path: ...
    def tools(self) -> list[dict[str, Any]]: ...
    async def call(self, exchange: Exchange, name: str, args: dict[str, Any]) -> dict[str, Any]: ...
    async def left(self, session: Session) -> None: ...
    async def close(self) -> None: ...
    def kill(self) -> None: ...


class Server:
    """`load` makes the host, or raises what is wrong with the project in words; `say` is for who started us, who is
    told that too, if the server goes on without it."""

    def __init__(
        self,
        load: Callable[[], Awaitable[Host]],
        *,
        say: Callable[[str], None],
        goes_on: bool = True,
        profile: str | None = None,
    ) -> None:
        self._load = load
        self.say = say
        self._goes_on = goes_on
        self._said = ""
        self._tasks = TaskOwner(on_error=lambda _: None)  # whoever awaits the host gets the exception
        self._loading: asyncio.Task[Host] | None = None
        self.profile = profile
        self.instructions = revisions.INSTRUCTIONS if profile is None else revisions.ONE.format(name=profile)

    def begin(self) -> asyncio.Task[Host]:
        """Starts to load the host, if nobody has; again when that failed: the user may have mended it."""
        task = self._loading
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loading = self._tasks.start(self._loaded())
        return task

    async def host(self) -> Host:
        return await asyncio.shield(self.begin())

    async def _loaded(self) -> Host:
        try:
            return await self._load()
        except RetinueError as error:
            if self._goes_on and str(error) != self._said:
                self._said = str(error)
                self.say(self._said)
            raise

    async def tools(self) -> list[dict[str, Any]]:
        try:
            return (await self.host()).tools()
        except RetinueError as error:
            if self.profile is None:
                note = UNUSABLE.format(error=error)
                return [{**tool, "description": f"{note} {tool['description']}"} for tool in catalog.tools()]
            raise Problem(INTERNAL_ERROR, str(error)) from None

    async def _made(self) -> Host | None:
        """The host, if there is or will be one."""
        with suppress(RetinueError):
            return None if self._loading is None else await asyncio.shield(self._loading)
        return None

    async def left(self, session: Session) -> None:
        host = await self._made()
        if host is not None:
            await host.left(session)

    def kill(self) -> None:
        task = self._loading
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            task.result().kill()

    async def close(self) -> None:
        host = await self._made()
        if host is not None:
            await host.close()


class Exchange:
    """One request on its way to an answer. `timed_out` says that the peer does not wait any longer, and that it would
    have: what was begun for it is left alone."""

    def __init__(self, session: Session, request: Request, client: Client, channel: Channel) -> None:
        self.session = session
        self.request = request
        self.client = client
        self.channel = channel
        self.timed_out = False
        token = request.meta.get("progressToken")
        self._token = token if isinstance(token, int | str) and not isinstance(token, bool) else None
        self._told = 0
        self._task = asyncio.current_task()

    @property
    def wants_progress(self) -> bool:
        return self._token is not None

    def progress(self, text: str) -> None:
        """Says how it goes, to who asked for that."""
        if self._token is not None:
            self._told += 1
            params = {"progressToken": self._token, "progress": self._told, "message": text}
            self.channel.send(messages.notification("notifications/progress", params))

    def cancel(self, *, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        if self._task is not None:
            self._task.cancel()


class Session:
    """One client. `about` is how it is reached; `shared` are all that come without a session and have one token."""

    def __init__(self, server: Server, *, about: str, shared: bool = False) -> None:
        self.server = server
        self.about = about
        self.client: Client | None = None
        self.channel: Channel | None = None  # where it can be asked something at any time
        self.open: dict[object, Exchange] = {}
        self.at_work: Callable[[], bool] = lambda: False  # whether subagents of it run
        self._shared = shared
        self._asked: dict[Id, asyncio.Future[dict[str, Any] | None]] = {}
        self._count = 0

    async def answer(self, request: Request, client: Client, channel: Channel) -> bytes:
        """The bytes of the answer. A Problem instead has the request's id; cancelled, there is no answer at all."""
        exchange = Exchange(self, request, client, channel)
        key: object = exchange if self._shared else request.id
        try:
            if key in self.open or len(self.open) >= MOST_OPEN:
                raise Problem(INVALID_REQUEST, f"this id is in use, or more than {MOST_OPEN} requests are open")
            self.open[key] = exchange
            try:
                result = await self._do(exchange)
            finally:
                del self.open[key]
            return messages.result(request.id, revisions.finished(request, client, result))
        except Problem as problem:
            problem.id = request.id
            raise
        except RetinueError as error:
            raise Problem(INTERNAL_ERROR, str(error), id=request.id) from None
        except Exception as error:
            text = f"internal error: {type(error).__name__}: {error}"
            self.server.say(text)
            raise Problem(INTERNAL_ERROR, text, id=request.id) from error

    async def _do(self, exchange: Exchange) -> dict[str, Any]:
        request, modern = exchange.request, exchange.client.modern
        match request.method:
            case "tools/list":
                return {"tools": await self.server.tools()}
            case "tools/call":
                return await self._call(exchange)
            case "server/discover" if modern:
                return revisions.discover(self.server.instructions)
            case "ping" if not modern:
                return {}
            case method if method in EMPTY:
                return {EMPTY[method]: []}
        raise Problem(METHOD_NOT_FOUND, "Method not found", request.method[:100])

    async def _call(self, exchange: Exchange) -> dict[str, Any]:
        params = exchange.request.params
        name, args = params.get("name"), params.get("arguments")
        if not isinstance(name, str):
            raise Problem(INVALID_PARAMS, "tools/call: 'name' must be a string")
        if args is not None and not isinstance(args, dict):
            raise Problem(INVALID_PARAMS, "tools/call: 'arguments' must be an object")
        try:
            host = await self.server.host()
        except RetinueError as error:
            return {"content": [{"type": "text", "text": f"{error}{AGAIN}"}], "isError": True}
        return await host.call(exchange, name, args or {})

    def initialize(self, request: Request) -> bytes:
        """The handshake of a session, answered without waiting for anything."""
        try:
            self.client, result = revisions.initialize(request.params, self.server.instructions)
        except Problem as problem:
            problem.id = request.id
            raise
        return messages.result(request.id, result)

    def heard(self, message: Notification | Response) -> None:
        """What needs no answer."""
        if isinstance(message, Response):
            waiting = self._asked.pop(message.id, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message.result)
        elif message.method == "notifications/cancelled":
            name, reason = message.params.get("requestId"), message.params.get("reason")
            found = self.open.get(name) if isinstance(name, int | str) else None
            if found is not None:  # one that is answered already is not there
                found.cancel(timed_out=isinstance(reason, str) and _TIMED_OUT.search(reason) is not None)

    async def ask(self, channel: Channel, params: dict[str, Any]) -> dict[str, Any] | None:
        """What the client's user says to a question; None when the client does not put it to them."""
        self._count += 1
        name = f"ask-{self._count}"
        waiting: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._asked[name] = waiting
        channel.send(messages.request(name, ELICIT, params))
        try:
            return await waiting
        except asyncio.CancelledError:
            about = {"requestId": name, "reason": "answered elsewhere, or no longer needed"}
            channel.send(messages.notification("notifications/cancelled", about))
            raise
        finally:
            self._asked.pop(name, None)

    @property
    def busy(self) -> bool:
        return bool(self.open) or self.at_work()

    def way(self) -> Channel | None:
        """Where the client can be asked something now."""
        return self.channel or next((each.channel for each in self.open.values() if each.channel.open), None)

    async def close(self) -> None:
        """The client is gone: nobody waits for what it asked, and its subagents end."""
        for exchange in list(self.open.values()):
            exchange.cancel()
        await self.server.left(self)
