"""One connection to one MCP server, and the one task that opens and closes it.

The library's scopes must be left by the task that entered them, so nobody else opens or closes: others wait, call, or
say that it is over. When a connection breaks, its calls fail, and it is opened again, later each time and not for ever.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from retinue.core import secrets
from retinue.core.errors import RetinueError, ToolError
from retinue.core.servers import McpServer, filled, variables
from retinue.processes.group import wait_until
from retinue.tools.command_process import PASSED_VARIABLES
from retinue.tools.mcp import words
from retinue.tools.mcp.calls import Calls, Made
from retinue.tools.mcp.journal import Journal
from retinue.tools.mcp.listing import MOST_TOOLS, Listed, Offered, listed
from retinue.tools.mcp.programs import EXIT_SECONDS, LARGEST_LINE, CannotStart, Program

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

FAILURES = 5
BACK_OFF = 0.5
LONGEST_BACK_OFF = 30.0
STEADY_SECONDS = 60.0
CLOSE_SECONDS = 8.0
PAGES = 100
HTTP_SECONDS = 30.0
REFUSALS = (401, 403, 407)
State = Literal["idle", "starting", "up", "down", "given up", "closed"]
_SECRET_HEADERS = ("authorization", "key", "token", "secret", "cookie")
for _name in ("mcp", "client", "httpx2", "httpcore2"):  # their warnings have words of servers in them
    logging.getLogger(_name).addHandler(logging.NullHandler())


class Connection:
    """Starts when it is first waited for. `tools` are those of the server now, `error` why it is not there,
    `revision` the one of MCP that is spoken. `on_change` is called when tools or state have changed."""

    def __init__(
        self,
        server: McpServer,
        *,
        project: str,
        journal: Path | None,
        environment: Callable[[], Mapping[str, str]],
        calls: Calls,
        on_change: Callable[[], None],
        back_off: float = BACK_OFF,
    ) -> None:
        self.server = server
        self.state: State = "idle"
        self.error = ""
        self.revision = ""
        self.notes: list[str] = []
        self.tools: dict[str, Listed] = {}
        self._project = project
        self._journal = Journal(journal)
        self._environment = environment
        self._calls = calls
        self._on_change = on_change
        self._back_off = back_off
        self._owner: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._tried = asyncio.Event()
        self._news = asyncio.Event()
        self._closing = False
        self._stale = False
        self._broken = ""
        self._program: Program | None = None
        self._refused = ""

    # For others

    def start(self) -> None:
        if self._owner is None and not self._closing:
            self.state = "starting"
            self._owner = asyncio.create_task(self._own(), name=f"mcp {self.server.name}")

    @property
    def was_tried(self) -> bool:
        return self._tried.is_set()

    async def tried(self) -> None:
        """Until it is there, or the first attempt has failed."""
        await self._tried.wait()

    async def call(self, tool: str, args: dict[str, Any], made: Made) -> types.CallToolResult:
        """One tools/call. Cancelling it tells the server so; raises ToolError with words for the model."""
        client = self._client
        if client is None:
            raise ToolError(self.unavailable)
        try:
            return await self._calls.run(client, tool, args, made)
        except MCPError as error:
            if self._client is not client or self._broken or _is_gone(error):
                why = await self._why(words.reason(error))
                raise ToolError(f"the MCP server '{self.server.name}' went away during the call: {why}") from None
            raise ToolError(f"{made.tool}: {words.line(error.error.message, 2000)}") from None
        except (httpx2.HTTPError, OSError) as error:
            self._break(words.reason(error))
            raise ToolError(f"the MCP server '{self.server.name}' cannot be reached: {words.reason(error)}") from None

    @property
    def unavailable(self) -> str:
        if not self.error:
            return f"the MCP server '{self.server.name}' is not available yet: it is being started"
        again = "it is being tried again" if self.server.url else "it is being started again"
        later = "" if self.state == "given up" else f"; {again}"
        return f"the MCP server '{self.server.name}' is not available: {self.error}{later}"

    async def close(self) -> None:
        """Ends it, and what it has started, in a bounded time."""
        self._closing = True
        self._news.set()
        owner = self._owner
        if owner is None:
            return
        if self.state == "starting":
            owner.cancel()  # it may not answer for long
        done, _ = await asyncio.wait({owner}, timeout=CLOSE_SECONDS)
        if not done:
            owner.cancel()
            await asyncio.wait({owner}, timeout=CLOSE_SECONDS)
        self.state = "closed"

    # The owner

    async def _own(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        try:
            while not self._closing:
                began = loop.time()
                last = await self._live()
                if self._closing:
                    break
                failures = 1 if loop.time() - began > STEADY_SECONDS else failures + 1
                if last or failures >= FAILURES:
                    times = f" ({failures} times; it is not tried again)" if failures >= FAILURES else ""
                    self._is_down("given up", f"{self.error}{times}")
                    break
                await self._pause(min(self._back_off * 2 ** (failures - 1), LONGEST_BACK_OFF))
        finally:
            self._client = None
            self._tried.set()
            self._journal.close()

    async def _live(self) -> bool:
        """From opening to closing; whether trying again would not help."""
        server, self._broken, self._refused, self._stale = self.server, "", "", False
        self.state = "starting"
        self._journal.open(server.words)
        try:
            async with asyncio.timeout(server.startup_timeout) as limit:
                async with self._opened() as client:
                    await self._list(client)
                    limit.reschedule(None)
                    self._client, self.state, self.error = client, "up", ""
                    self.revision = client.protocol_version
                    self._tried.set()
                    self._on_change()
                    await self._stay(client)
        except TimeoutError:
            trouble = self._program.trouble if self._program is not None else ""
            why = f"it did not answer within {server.startup_timeout:g} s" + (f"; {trouble}" if trouble else "")
            self._is_down("down", self._broken or why)
        except CannotStart as error:
            self._is_down("down", str(error))
            return True
        except Exception as error:  # noqa: BLE001 - the boundary to servers and the library: told, and tried again
            self._is_down("down", self._broken or self._refused or words.reason(error))
            return isinstance(error, RetinueError) and not self._broken
        finally:
            self._client, self._program = None, None
        return False

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Client]:
        client = Client(
            self._transport(),
            cache=None,
            client_info=types.Implementation(name="retinue", version=version("retinue")),
            elicitation_callback=self._calls.elicit,
            logging_callback=self._logged,
            message_handler=self._heard,
        )
        async with client:
            yield client

    def _is_down(self, state: State, why: str) -> None:
        if self.error != why:
            self._journal.note(why)
        self.state, self.error = state, why  # what tools it has is remembered: they fail, and do not vanish
        self._tried.set()
        self._on_change()

    async def _why(self, otherwise: str) -> str:
        """Why the connection is over: who reads from it knows most, after a moment."""
        await wait_until(lambda: bool(self._broken or self.error), EXIT_SECONDS)
        if not self.error:
            self._break(otherwise)
        return self._broken or self.error

    async def _stay(self, client: Client) -> None:
        """Until it is over; follows what the server says of its tools."""
        follower = asyncio.create_task(self._follow(client))
        try:
            while not self._closing:
                await self._news.wait()
                self._news.clear()
                if self._broken:
                    raise RuntimeError(self._broken)
                if self._stale:
                    self._stale = False
                    async with asyncio.timeout(self.server.startup_timeout):
                        await self._list(client)
                    self._on_change()
        finally:
            self._client = None
            follower.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({follower})
                await self._calls.drop(client)

    async def _follow(self, client: Client) -> None:
        """Where the revision has no notices of its own accord, they are asked for."""
        tools = client.server_capabilities.tools
        if client.session.initialize_result is not None or tools is None or not tools.list_changed:
            return
        with suppress(Exception):  # without it the list stays as it is
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    self._is_stale()

    async def _list(self, client: Client) -> None:
        offered: list[Offered] = []
        cursor: str | None = None
        if client.server_capabilities.tools is not None:
            for _ in range(PAGES):
                page = await client.list_tools(cursor=cursor)
                offered += [
                    Offered(
                        tool.name, tool.title or "", tool.description or "", tool.input_schema, tool.output_schema or {}
                    )
                    for tool in page.tools
                ]
                cursor = page.next_cursor
                if cursor is None or len(offered) > MOST_TOOLS:
                    break
        self.tools, self.notes = listed(self.server.name, offered, self.server.tools)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._closing:
                    self._news.clear()
                    await self._news.wait()

    def _break(self, why: str) -> None:
        self._broken = self._broken or why
        if self.state == "up":  # nobody calls it any more; the owner does the rest
            self._client, self.state, self.error = None, "down", self._broken
        self._news.set()

    def _is_stale(self) -> None:
        self._stale = True
        self._news.set()

    async def _heard(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._is_stale()

    async def _logged(self, params: types.LoggingMessageNotificationParams) -> None:
        self._journal.note(words.line(f"{params.level}: {params.data}", 2000))

    # How it is reached

    def _transport(self) -> AbstractAsyncContextManager[TransportStreams]:
        server = self.server
        if server.url:
            return self._http()
        env = {name: value for name, value in os.environ.items() if name in PASSED_VARIABLES or name.startswith("LC_")}
        env |= {name: os.environ[name] for name in server.inherit_env if name in os.environ}
        env |= {name: filled(value, os.environ) for name, value in server.env.items()}
        secrets.learn(env)
        cwd = str(Path(self._project) / (server.cwd or "."))
        argv = [str(Path(server.command).expanduser()) if server.command[0] == "~" else server.command, *server.args]
        program = self._program = Program(
            argv,
            cwd=cwd,
            env={"PATH": os.defpath, **env, **self._environment()},
            journal=self._journal,
            on_over=self._break,
        )
        return program.streams()

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[TransportStreams]:
        headers = {}
        for name, value in self.server.headers.items():
            headers[name] = filled(value, os.environ)
            if any(word in name.lower() for word in _SECRET_HEADERS):
                secrets.hide(headers[name].rpartition(" ")[2])
                for variable in variables(value):
                    secrets.hide(os.environ[variable])

        async def look(response: httpx2.Response) -> None:
            if response.status_code in REFUSALS:
                key = f"mcp_servers.{self.server.name}.headers"
                self._refused = f"it answered HTTP {response.status_code}; what opens it goes into {key}"

        timeout = httpx2.Timeout(HTTP_SECONDS, read=None)  # how long a call may take is its own affair
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [look]}) as http,
            streamable_http_client(self.server.url, http_client=http, max_sse_event_size=LARGEST_LINE) as streams,
        ):
            yield streams


def _is_gone(error: MCPError) -> bool:
    """Whether it is not the tool but the connection or its session that failed."""
    return error.code == types.CONNECTION_CLOSED or "session terminated" in error.error.message.lower()
