"""One connection to one MCP server, and the owner task that opens and closes it.

The SDK's scopes must be left by the task that entered them, so only the owner opens and closes the connection. Other
tasks wait, call tools, or mark the connection as broken. The calls of a broken connection fail. The owner then opens
it again, after growing pauses and a limited number of times.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from retinue.concurrency import RateLimit, TaskOwner
from retinue.core import secrets
from retinue.core.errors import RetinueError, ToolError
from retinue.core.ports import Collector
from retinue.core.servers import McpServer, fill_variables, list_variables
from retinue.processes.group import wait_until
from retinue.tools.command_process import PASSED_VARIABLES
from retinue.tools.mcp.calls import CallsInFlight, ServerCall
from retinue.tools.mcp.server_messages import (
    MAX_MESSAGE_BYTES,
    BoundedBody,
    LenientReader,
    SentWatcher,
    ServerRequests,
)
from retinue.tools.mcp.server_output import ServerOutput
from retinue.tools.mcp.server_program import EXIT_SECONDS, ServerProgram, StartFailed
from retinue.tools.mcp.server_text import describe_server_error, to_line
from retinue.tools.mcp.tool_listing import ListedTool, ToolListing

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

MAX_FAILURES = 5
BACK_OFF = 0.5
MAX_BACK_OFF = 30.0
STEADY_SECONDS = 60.0
CLOSE_SECONDS = 8.0
MAX_PAGES = 100
LISTINGS_PER_SECOND, LISTINGS_AT_ONCE = 0.2, 10  # of a server that says again and again that its tools have changed
STREAMS_PER_SECOND, STREAMS_AT_ONCE = 1.0, 10  # of a server at an address
HTTP_SECONDS = 30.0
REFUSALS = (401, 403, 407)
State = Literal["idle", "starting", "up", "down", "given up", "closed"]
_SECRET_HEADERS = ("authorization", "key", "token", "secret", "cookie")
for _name in ("mcp", "client", "httpx2", "httpcore2"):  # their warnings quote servers: keep them off stderr
    logging.getLogger(_name).addHandler(logging.NullHandler())


class Connection:
    """A connection to a server, opened when a run first needs it.

    `tools` are the server's current tools, `error` says why the server is not available, `revision` is the MCP
    revision in use. `tried` is set once the server is available or the first attempt has failed. `on_change` is called
    when the tools or the state have changed."""

    def __init__(
        self,
        server: McpServer,
        *,
        project: str,
        output_file: Path | None,
        collector: Collector | None,
        on_change: Callable[[], None],
        back_off: float = BACK_OFF,
    ) -> None:
        self.server = server
        self.state: State = "idle"
        self.error = ""
        self.revision = ""
        self.notes: list[str] = []
        self.tools: dict[str, ListedTool] = {}
        self._project = project
        self._output = ServerOutput(output_file)
        self.collector = collector
        self._calls = CallsInFlight(server.name)
        self._on_change = on_change
        self._back_off = back_off
        self._tasks = TaskOwner()
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self.tried = asyncio.Event()
        self._news = asyncio.Event()
        self._closing = False
        self._stale = False
        self._broken = ""
        self._program: ServerProgram | None = None
        self._refused = ""

    # For other tasks

    def start(self) -> None:
        if self._owner is None and not self._closing:
            self.state = "starting"
            self._owner = self._tasks.start(self._run_owner(), name=f"mcp {self.server.name}")

    async def call_tool(self, tool: str, args: dict[str, Any], call: ServerCall) -> types.CallToolResult:
        """Call a tool. Cancelling the coroutine notifies the server. Raises ToolError with a text for the model."""
        client = self._client
        if client is None:
            raise ToolError(self.unavailable_reason)
        try:
            return await self._calls.run_call(client, tool, args, call)
        except MCPError as error:
            if self._client is not client or self._broken or _is_gone(error):
                why = await self._wait_for_reason(describe_server_error(error))
                raise ToolError(f"the MCP server '{self.server.name}' went away during the call: {why}") from None
            raise ToolError(f"{call.tool}: {to_line(error.error.message, 2000)}") from None
        except (httpx2.HTTPError, OSError) as error:
            self._mark_broken(describe_server_error(error))
            raise ToolError(
                f"the MCP server '{self.server.name}' cannot be reached: {describe_server_error(error)}"
            ) from None

    @property
    def unavailable_reason(self) -> str:
        if not self.error:
            return f"the MCP server '{self.server.name}' is not available yet: it is being started"
        again = "it is being tried again" if self.server.url else "it is being started again"
        later = "" if self.state == "given up" else f"; {again}"
        return f"the MCP server '{self.server.name}' is not available: {self.error}{later}"

    async def close(self) -> None:
        """Close the connection and end the server's program, in bounded time."""
        self._closing = True
        self._news.set()
        owner = self._owner
        if owner is None:
            return
        if self.state == "starting":
            owner.cancel()  # the server may take long to answer
        done, _ = await asyncio.wait({owner}, timeout=CLOSE_SECONDS)
        if not done:
            owner.cancel()
            await asyncio.wait({owner}, timeout=CLOSE_SECONDS)
        self.state = "closed"

    # For the owner task

    async def _run_owner(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        try:
            while not self._closing:
                began = loop.time()
                last = await self._run_once()
                if self._closing:
                    break
                failures = 1 if loop.time() - began > STEADY_SECONDS else failures + 1
                if last or failures >= MAX_FAILURES:
                    times = f" ({failures} times; it is not tried again)" if failures >= MAX_FAILURES else ""
                    self._mark_down("given up", f"{self.error}{times}")
                    break
                await self._pause(min(self._back_off * 2 ** (failures - 1), MAX_BACK_OFF))
        finally:
            self._client = None
            self.tried.set()
            self._output.close()

    async def _run_once(self) -> bool:
        """Open the connection and keep it until it ends. Return True if another attempt would not help."""
        server, self._broken, self._refused, self._stale = self.server, "", "", False
        self.state = "starting"
        self._output.start_section(server.words)
        try:
            async with asyncio.timeout(server.startup_timeout) as limit, self._make_client() as client:
                client.session.validate_tool_result = self._check_result  # type: ignore[method-assign]
                self.revision = client.protocol_version
                await self._list_tools(client)
                limit.reschedule(None)
                self._client, self.state, self.error = client, "up", ""
                self.tried.set()
                self._on_change()
                await self._serve_until_over(client)
        except TimeoutError:
            trouble = self._program.trouble if self._program is not None else ""
            why = f"it did not answer within {server.startup_timeout:g} s" + (f"; {trouble}" if trouble else "")
            self._mark_down("down", self._broken or why)
        except StartFailed as error:
            self._mark_down("down", str(error))
            return True
        except Exception as error:  # noqa: BLE001 - the boundary to servers and the SDK: reported, and tried again
            self._mark_down("down", self._broken or self._refused or describe_server_error(error))
            return isinstance(error, RetinueError) and not self._broken
        finally:
            self._client, self._program = None, None
        return False

    def _make_client(self) -> Client:
        return Client(
            _read_leniently(self._make_transport(), lambda: self.revision, self._mark_broken),
            cache=None,
            client_info=types.Implementation(name="retinue", version=version("retinue")),
            elicitation_callback=self._calls.answer_elicitation,
            logging_callback=self._handle_log_message,
            message_handler=self._handle_message,
        )

    async def _check_result(self, name: str, result: types.CallToolResult) -> None:
        """Check a result against the tool's output schema. Replaces the SDK's check, which is not bounded."""
        tool = next((tool for tool in self.tools.values() if tool.name == name), None)
        if tool is not None:
            await asyncio.to_thread(tool.check_result, result)

    def _mark_down(self, state: State, why: str) -> None:
        if self.error != why:
            self._output.add_note(why)
        self.state, self.error = state, why  # `tools` stay: calls fail, but the tools do not vanish
        self.tried.set()
        if self.collector is not None:
            self.collector.end_server(self.server.name)
        self._on_change()

    async def _wait_for_reason(self, otherwise: str) -> str:
        """Return why the connection ended. The reader of the server's output knows the reason best, but needs a
        moment. Without a reason from the reader, return `otherwise`."""
        await wait_until(lambda: bool(self._broken or self.error), EXIT_SECONDS)
        if not self.error:
            self._mark_broken(otherwise)
        return self._broken or self.error

    async def _serve_until_over(self, client: Client) -> None:
        """Keep the connection until it ends. List the tools again when they have changed."""
        followers = TaskOwner()
        followers.start(self._follow_list_changes(client))
        listings = RateLimit(LISTINGS_PER_SECOND, LISTINGS_AT_ONCE)
        delay = None
        try:
            while not self._closing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._news.wait()
                self._news.clear()
                if self._broken:
                    raise RuntimeError(self._broken)
                delay = (listings.take() or None) if self._stale else None
                if self._stale and delay is None:
                    self._stale = False
                    async with asyncio.timeout(self.server.startup_timeout):
                        await self._list_tools(client)
                    self._on_change()
        finally:
            self._client = None
            followers.cancel()
            with anyio.CancelScope(shield=True):
                await followers.wait()
                await self._calls.end_calls(client)

    async def _follow_list_changes(self, client: Client) -> None:
        """Subscribe to changes of the tool list. A server of an older MCP revision sends them unasked."""
        tools = client.server_capabilities.tools
        if client.session.initialize_result is not None or tools is None or not tools.list_changed:
            return
        with suppress(Exception):  # without a subscription the list stays as it is
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    self._mark_stale()

    async def _list_tools(self, client: Client) -> None:
        listing = ToolListing(self.server.name, self.server.tools)
        cursor: str | None = None
        if client.server_capabilities.tools is not None:
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                client.session._tool_output_schemas.clear()
                await asyncio.to_thread(listing.add_page, page.tools)
                cursor = page.next_cursor
                if cursor is None or listing.is_full:
                    break
        self.tools, self.notes = listing.tools, listing.list_notes()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._closing:
                    self._news.clear()
                    await self._news.wait()

    def _mark_broken(self, why: str) -> None:
        self._broken = self._broken or why
        if self.state == "up":  # refuse calls from now on; the owner does the rest
            self._client, self.state, self.error = None, "down", self._broken
        self._news.set()

    def _mark_stale(self) -> None:
        self._stale = True
        self._news.set()

    async def _handle_message(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._mark_stale()

    async def _handle_log_message(self, params: types.LoggingMessageNotificationParams) -> None:
        self._output.add_note(to_line(f"{params.level}: {params.data}", 2000))

    # Transports

    def _make_transport(self) -> AbstractAsyncContextManager[TransportStreams]:
        server = self.server
        if server.url:
            return self._open_http()
        env = {name: value for name, value in os.environ.items() if name in PASSED_VARIABLES or name.startswith("LC_")}
        env |= {name: os.environ[name] for name in server.inherit_env if name in os.environ}
        env |= {name: fill_variables(value, os.environ) for name, value in server.env.items()}
        secrets.learn_secrets(env)
        reporting = {} if self.collector is None else self.collector.environment(server.name)
        cwd = str(Path(self._project) / (server.cwd or "."))
        argv = [str(Path(server.command).expanduser()) if server.command[0] == "~" else server.command, *server.args]
        program = self._program = ServerProgram(
            argv,
            cwd=cwd,
            env={"PATH": os.defpath, **env, **reporting},
            output=self._output,
            on_over=self._mark_broken,
        )
        return program.open_streams()

    @asynccontextmanager
    async def _open_http(self) -> AsyncIterator[TransportStreams]:
        headers = {"Accept-Encoding": "identity"}
        for name, value in self.server.headers.items():
            headers[name] = fill_variables(value, os.environ)
            if any(word in name.lower() for word in _SECRET_HEADERS):
                secrets.hide_secret(headers[name].rpartition(" ")[2])
                for variable in list_variables(value):
                    secrets.hide_secret(os.environ[variable])

        async def handle_response(response: httpx2.Response) -> None:
            if response.status_code in REFUSALS:
                key = f"mcp_servers.{self.server.name}.headers"
                self._refused = f"it answered HTTP {response.status_code}; set its credentials in {key}"
            response.stream = BoundedBody(response, on_excess=self._mark_broken)

        streams_opened = RateLimit(STREAMS_PER_SECOND, STREAMS_AT_ONCE)

        async def handle_request(request: httpx2.Request) -> None:
            if request.method == "GET":  # the SDK opens a stream that has ended again, when the server says
                await streams_opened.wait()

        timeout = httpx2.Timeout(HTTP_SECONDS, read=None)  # each call has its own timeout
        hooks: dict[str, list[Any]] = {"request": [handle_request], "response": [handle_response]}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks) as http,
            streamable_http_client(self.server.url, http_client=http, max_sse_event_size=MAX_MESSAGE_BYTES) as streams,
        ):
            yield streams


@asynccontextmanager
async def _read_leniently(
    transport: AbstractAsyncContextManager[TransportStreams],
    get_revision: Callable[[], str],
    on_excess: Callable[[str], None],
) -> AsyncIterator[TransportStreams]:
    list_ids: set[types.RequestId] = set()
    requests = ServerRequests()
    async with transport as (reading, writing):
        reader = LenientReader(
            reading, get_revision=get_revision, list_ids=list_ids, requests=requests, on_excess=on_excess
        )
        yield reader, SentWatcher(writing, list_ids=list_ids, requests=requests)


def _is_gone(error: MCPError) -> bool:
    """Return True if the connection or its session failed, and not the tool."""
    # The SDK's client gives a terminated session the code INVALID_REQUEST, as servers give many errors of their own.
    # Only the text tells them apart.
    return error.code == types.CONNECTION_CLOSED or "session terminated" in error.error.message.lower()
