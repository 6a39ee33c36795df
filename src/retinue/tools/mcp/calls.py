"""The calls in flight on one connection: each in a task of its own, with its own clock, and known to be whose.

A server that asks a person something while it works (elicitation) asks the run whose call it works on. By the newer
revision, and over HTTP, that is certain; on stdio an older server does not say, and the question tells so when several
calls are in flight.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
from mcp import Client, MCPError
from mcp.client import ClientRequestContext

from retinue.core.approvals import Deny
from retinue.core.errors import ToolError
from retinue.core.ports import Hosting, Link
from retinue.core.servers import PREFIX
from retinue.tools.mcp import words
from retinue.tools.mcp.forms import Action, Form

CURRENT: ContextVar[Made | None] = ContextVar("retinue_mcp_call", default=None)
ATTEMPTS = 3
UNCERTAIN = "It does not say for which of these calls: {calls}."
GIVEN_UP = "{tool}: the subagent was stopped"
SILENT = "{tool}: the server did not answer within {seconds:g} s, so the call was given up"


@dataclass(eq=False)
class Made:
    """One call: whose it is, and how long it may be silent (None: as long as its run has)."""

    link: Link
    tool: str
    seconds: float | None
    meta: dict[str, Any]
    limit: asyncio.Timeout | None = None
    task: asyncio.Task[types.CallToolResult] | None = None
    given_up: bool = False
    asking: set[asyncio.Task[types.ElicitResult]] = field(default_factory=set)

    def give_up(self) -> None:
        """Nobody wants what it would give any more."""
        self.given_up = True
        if self.task is not None:
            self.task.cancel()

    def heard(self) -> None:
        """The server is at work on it: its time begins again, unless a person is being waited for."""
        if self.limit is None or self.limit.expired() or self.seconds is None:
            return
        self.limit.reschedule(None if self.asking else asyncio.get_running_loop().time() + self.seconds)


class Calls:
    """Those of one server. `hosting` reaches the runs."""

    def __init__(self, server: str, hosting: Hosting) -> None:
        self._server = server
        self._hosting = hosting
        self._made: dict[asyncio.Task[types.CallToolResult], tuple[Client, Made]] = {}

    async def run(self, client: Client, tool: str, args: dict[str, Any], made: Made) -> types.CallToolResult:
        """Raises what the library raises, or ToolError when the time is over."""
        task = made.task = asyncio.create_task(self._call(client, tool, args, made))
        self._made[task] = client, made
        try:
            async with asyncio.timeout(made.seconds) as made.limit:
                return await task
        except TimeoutError:
            raise ToolError(SILENT.format(tool=made.tool, seconds=made.seconds or 0)) from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if made.given_up:
                raise ToolError(GIVEN_UP.format(tool=made.tool)) from None
            raise MCPError(types.CONNECTION_CLOSED, "the connection was closed") from None
        finally:
            made.limit = None
            del self._made[task]
            for asking in (asked := set(made.asking)):  # nobody waits for the answer any more
                asking.cancel()
            if asked:
                await asyncio.wait(asked)

    async def _call(self, client: Client, tool: str, args: dict[str, Any], made: Made) -> types.CallToolResult:
        CURRENT.set(made)

        async def progress(done: float, total: float | None, message: str | None) -> None:
            made.heard()
            self._hosting.alive(made.link)

        try:
            return await client.call_tool(tool, args, progress_callback=progress, meta=made.meta or None)  # type: ignore[arg-type]
        except RuntimeError as error:  # an answer that is not what the tool says it gives, or asking without end
            raise ToolError(f"{made.tool}: {words.reason(error)}") from None
        except ValueError as error:
            raise ToolError(f"{made.tool}: the server's answer is not MCP: {words.reason(error)}") from None

    async def drop(self, client: Client) -> None:
        """The connection is over: so are its calls."""
        tasks = [task for task, (its, _) in self._made.items() if its is client]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def elicit(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        """A question of the server, asked in the tree of the run it works for."""
        made, others = CURRENT.get(), list[Made]()
        if made not in (flying := self._all()):
            made, others = (flying[0], flying[1:]) if flying else (None, [])
        if made is None:
            return types.ErrorData(code=types.INVALID_REQUEST, message="no call is in flight, so nobody is asked")
        calls = ", ".join(f"{each.tool} of {each.link.ref.path}" for each in (made, *others)) if others else ""
        asking = asyncio.create_task(self._ask(made, params, UNCERTAIN.format(calls=calls) if calls else ""))
        made.asking.add(asking)
        made.heard()
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()
            made.asking.discard(asking)
            made.heard()
        return types.ElicitResult(action="cancel") if asking.cancelled() else asking.result()

    def _all(self) -> list[Made]:
        return [made for _, made in self._made.values()]

    async def _ask(self, made: Made, params: types.ElicitRequestParams, note: str) -> types.ElicitResult:
        try:
            form = Form(self._server, params)
        except (ValueError, AttributeError, TypeError):
            return types.ElicitResult(action="cancel")
        asked = f"{form.preview}\n{note}".strip()
        preview, fields = asked, form.fields
        for _ in range(ATTEMPTS):
            decision = await self._hosting.ask(made.link, f"{PREFIX}{self._server}", fields, preview)
            if decision is None or isinstance(decision, Deny):
                action: Action = "cancel" if decision is None else "decline"
                return types.ElicitResult(action=action)
            fields = fields if decision.args is None else decision.args
            content = form.content(fields)
            if not isinstance(content, str):
                return types.ElicitResult(action="accept", content=content)
            preview = f"{asked}\nThat answer does not fit: {content}. Edit the fields, or say no."
        return types.ElicitResult(action="cancel")
