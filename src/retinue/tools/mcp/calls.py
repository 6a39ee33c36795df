"""The calls in flight on one connection. Each has its own task, its own timeout and a known run.

A server may ask a person something while it works on a call (elicitation). The question goes to the run that made the
call. In the newer MCP revision, and over HTTP, that run is known. An older server on stdio does not say which call it
works on; the question then names all calls in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mcp_types as types
import msgspec
from jsonschema.exceptions import SchemaError
from mcp import Client, MCPError
from mcp.client import ClientRequestContext

from retinue.concurrency import TaskOwner
from retinue.core.context import Context
from retinue.core.errors import ToolError
from retinue.core.servers import PREFIX
from retinue.protocol.inherited_limits import ASKER_KEY
from retinue.tools.bounded_schema import BoundedSchema, SchemaTooCostly, SchemaUnusable
from retinue.tools.mcp.server_messages import SCHEMA_BYTES
from retinue.tools.mcp.server_text import cap_text, clean_server_value, describe_server_error, to_line

_CURRENT: ContextVar[ServerCall | None] = ContextVar("retinue_mcp_call", default=None)
ATTEMPTS = 3
MOST_ASKERS = 4
MAX_DECLINED = 1000  # questions of one call; each is written to the log
UNCERTAIN = "It does not say for which of these calls: {calls}."
GIVEN_UP = "{tool}: the subagent was stopped"
SILENT = "{tool}: the server did not answer within {seconds:g} s, so the call was given up"
YES = "yes"


@dataclass(eq=False)
class ServerCall:
    """One call of a run. `seconds` is how long the server may be silent; None means as long as the run has."""

    context: Context
    tool: str
    seconds: float | None
    meta: dict[str, Any]
    limit: asyncio.Timeout | None = None
    task: asyncio.Task[types.CallToolResult] | None = None
    given_up: bool = False
    declined: int = 0
    asking: set[asyncio.Task[types.ElicitResult]] = field(default_factory=set)

    def give_up(self) -> None:
        """Cancel the call, because its result is no longer wanted."""
        self.given_up = True
        if self.task is not None:
            self.task.cancel()

    def restart_timer(self) -> None:
        """Restart the timeout, because the server is at work. The timeout is paused while a person is asked."""
        if self.limit is None or self.limit.expired() or self.seconds is None:
            return
        self.limit.reschedule(None if self.asking else asyncio.get_running_loop().time() + self.seconds)


class CallsInFlight:
    """The calls in flight to one server."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._tasks = TaskOwner()
        self._calls: dict[asyncio.Task[types.CallToolResult], tuple[Client, ServerCall]] = {}

    async def run_call(self, client: Client, tool: str, args: dict[str, Any], call: ServerCall) -> types.CallToolResult:
        """Make a call. Raises the SDK's exceptions, and ToolError if the call times out or is given up."""
        task = call.task = self._tasks.start(self._send_call(client, tool, args, call))
        self._calls[task] = client, call
        try:
            async with asyncio.timeout(call.seconds) as call.limit:
                return await task
        except TimeoutError:
            raise ToolError(SILENT.format(tool=call.tool, seconds=call.seconds or 0)) from None
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            if call.given_up:
                raise ToolError(GIVEN_UP.format(tool=call.tool)) from None
            raise MCPError(types.CONNECTION_CLOSED, "the connection was closed") from None
        finally:
            call.limit = None
            del self._calls[task]
            for asking in (asked := set(call.asking)):  # nobody waits for these answers any more
                asking.cancel()
            if asked:
                await asyncio.wait(asked)

    async def _send_call(
        self, client: Client, tool: str, args: dict[str, Any], call: ServerCall
    ) -> types.CallToolResult:
        _CURRENT.set(call)

        async def progress(done: float, total: float | None, message: str | None) -> None:
            call.restart_timer()
            call.context.record_activity()

        try:
            return await client.call_tool(tool, args, progress_callback=progress, meta=call.meta or None)  # type: ignore[arg-type]
        except RuntimeError as error:  # a result that does not fit the tool's schema, or endless elicitation
            raise ToolError(f"{call.tool}: {describe_server_error(error)}") from None
        except ValueError as error:
            raise ToolError(f"{call.tool}: the server's answer is not MCP: {describe_server_error(error)}") from None

    async def end_calls(self, client: Client) -> None:
        """Cancel the calls of a connection that has ended, and wait for them."""
        tasks = [task for task, (its, _) in self._calls.items() if its is client]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def answer_elicitation(
        self, context: ClientRequestContext, params: types.ElicitRequestParams
    ) -> types.ElicitResult | types.ErrorData:
        """Ask a person the server's question, in the tree of the run that made the call."""
        in_flight = [each for _, each in self._calls.values()]
        if not in_flight:
            return types.ErrorData(code=types.INVALID_REQUEST, message="no call is in flight, so nobody is asked")
        current, note = _CURRENT.get(), ""
        call = current if current in in_flight else in_flight[0]
        if call is not current and len(in_flight) > 1:
            note = UNCERTAIN.format(calls=", ".join(f"{each.tool} of {each.context.path}" for each in in_flight))
        asking = self._tasks.start(self._ask(call, params, note))
        call.asking.add(asking)
        call.restart_timer()
        try:
            await asyncio.wait({asking})
        finally:
            asking.cancel()
            call.asking.discard(asking)
            call.restart_timer()
        return types.ElicitResult(action="cancel") if asking.cancelled() else asking.result()

    async def _ask(self, call: ServerCall, params: types.ElicitRequestParams, note: str) -> types.ElicitResult:
        if call.declined >= MAX_DECLINED:
            return types.ElicitResult(action="decline")
        try:
            form = ElicitationForm(self._server, params)
        except (ValueError, AttributeError, TypeError):
            return types.ElicitResult(action="cancel")
        asked = f"{form.preview}\n{note}".strip()
        preview, fields = asked, form.fields
        for _ in range(ATTEMPTS):
            answer = await call.context.ask_person(f"{PREFIX}{self._server}", fields, preview, _list_askers(params))
            if answer is None:  # a server that gets "cancel" may keep waiting for another answer
                call.declined += 1
                return types.ElicitResult(action="decline")
            fields = answer
            content = await asyncio.to_thread(form.make_content, fields)
            if not isinstance(content, str):
                return types.ElicitResult(action="accept", content=content)
            preview = f"{asked}\nThat answer does not fit: {content}. Edit the fields, or say no."
        return types.ElicitResult(action="cancel")


def _list_askers(params: types.ElicitRequestParams) -> list[str]:
    """Return the run ids that a question claims to come from. They come from a peer: the link checks them."""
    said: Any = dict(params.meta or {}).get(ASKER_KEY)
    return [text for text in said[:MOST_ASKERS] if isinstance(text, str) and text] if isinstance(said, list) else []


class ElicitationForm:
    """One elicitation, which checks the answer against its schema.

    `fields` are the fields for a person to fill in, with their defaults. `preview` is the question as text."""

    def __init__(self, server: str, params: types.ElicitRequestParams) -> None:
        message = cap_text(params.message)
        self._is_url = isinstance(params, types.ElicitRequestURLParams)
        if isinstance(params, types.ElicitRequestURLParams):
            self.fields: dict[str, Any] = {"url": to_line(params.url, 2000)}
            self.preview = f"The MCP server '{server}' wants you to open this address:\n{message}"
            return
        if len(msgspec.json.encode(params.requested_schema)) > SCHEMA_BYTES:
            raise ValueError(f"its form is larger than {SCHEMA_BYTES // 1024} KiB")
        self._schema = clean_server_value(params.requested_schema)
        found = self._schema.get("properties")
        named = found.items() if isinstance(found, dict) else ()
        self._properties: dict[str, dict[str, Any]] = {name: about for name, about in named if isinstance(about, dict)}
        self._required = self._schema.get("required") or ()
        self.fields = {name: self._find_default(name, about) for name, about in self._properties.items()}
        self.preview = "\n".join([f"The MCP server '{server}' asks:", message, *self._describe_fields()])

    def make_content(self, given: dict[str, Any]) -> dict[str, Any] | str | None:
        """Return the content to send for an answer, None for a URL, or an error text for an invalid answer."""
        if self._is_url:
            return None
        made = {
            name: _convert_value(value, self._properties.get(name, {}))
            for name, value in given.items()
            if value is not None or name not in self._properties
        }
        try:
            error = BoundedSchema(self._schema).find_error(made)
        except (SchemaError, SchemaTooCostly, SchemaUnusable) as problem:
            return f"its form cannot be read: {describe_server_error(problem)}"
        if error is None:
            return made
        where = ".".join(map(str, error.absolute_path))
        return f"{where}: {to_line(error.message)}" if where else to_line(error.message)

    def _find_default(self, name: str, about: dict[str, Any]) -> Any:
        """Return the default of a field. A required choice that includes `yes` defaults to `yes`: an approval means
        yes."""
        means = name in self._required and YES in _list_choices(about)
        return about.get("default", YES if means else None)

    def _describe_fields(self) -> Iterator[str]:
        for name, about in self._properties.items():
            choices = _list_choices(about)
            kind = f"one of {', '.join(map(str, choices))}" if choices else str(about.get("type", "text"))
            must = ", required" if name in self._required else ""
            more = about.get("description") or about.get("title") or ""
            yield to_line(f"  {name} ({kind}{must}) {more}")


def _list_choices(about: dict[str, Any]) -> list[Any]:
    listed, said = about.get("enum"), about.get("oneOf")
    if isinstance(listed, list) and listed:
        return listed
    return [one.get("const") for one in said if isinstance(one, dict)] if isinstance(said, list) else []


def _convert_value(value: Any, about: dict[str, Any]) -> Any:
    """Convert a value that a person typed to the type of its field."""
    kind = about.get("type")
    if kind == "string" and isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if kind in ("integer", "number") and isinstance(value, str):
        for convert in (int, float):
            try:
                return convert(value)
            except ValueError:
                continue
    if kind == "boolean" and isinstance(value, str):
        return {"true": True, "yes": True, "false": False, "no": False}.get(value.strip().lower(), value)
    return value
