"""The MCP servers of a supervisor and their tools, shared by all its runs. Implements ServerStarter and ServerTools.

A result becomes an Outcome: text for the model, data for programs, images and other blobs as files.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import mimetypes
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import mcp_types as types
import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.context import Context
from retinue.core.errors import NotFound, RetinueError, ToolError
from retinue.core.messages import ToolSpec
from retinue.core.ports import Collector, Outcome, ServerTool
from retinue.core.profiles import Profile
from retinue.core.servers import PREFIX, McpServer, ServerReport, server_of
from retinue.files.private import write_private_file
from retinue.tools.mcp.calls import ServerCall
from retinue.tools.mcp.connection import BACK_OFF, Connection
from retinue.tools.mcp.server_messages import explain_excess
from retinue.tools.mcp.server_text import strip_unseen, to_line
from retinue.tools.mcp.tool_listing import RUN_ID, ListedTool

PATIENCE_SECONDS = 2.0
GONE = "{tool}: the MCP server '{server}' has no such tool any more"
CHANGED = "{tool} was changed by its server while the arguments were checked, so it was not run. Call it again."
LACKS = "The tools of the MCP server '{server}' are not available."
LACKS_ONE = "The tool {entry} is not available."
INDENTS = 100_000  # levels of indentation in all lines of a JSON text, or
INDENTS_PER_BYTE = 5  # if it is long, for each byte of it
REPEATS = 4  # parts of a result that are compared with its data, for which they are parsed
MAX_FILE_BYTES = 64 * 1024 * 1024
Spill = Callable[[str], Path]


class ConnectedTool:
    """One tool of a server. Stays when the server goes away; its calls then fail."""

    def __init__(self, connection: Connection, listed: ListedTool) -> None:
        self._connection = connection
        self._name = listed.spec.name
        self._last_listed = listed

    @property
    def spec(self) -> ToolSpec:
        self._last_listed = self._connection.tools.get(self._name, self._last_listed)
        return self._last_listed.spec

    async def __call__(self, args: dict[str, Any], context: Context) -> Outcome:
        connection, ref = self._connection, context.ref
        listed = connection.tools.get(self._name)
        if connection.state != "up":
            raise ToolError(connection.unavailable_reason)
        if listed is None:
            raise ToolError(GONE.format(tool=self._name, server=connection.server.name))
        args = await asyncio.to_thread(listed.check_arguments, args)
        if self.spec.seal != listed.spec.seal:
            raise ToolError(CHANGED.format(tool=self._name))
        collector, run_id = connection.collector, ""
        meta = {} if collector is None else dict(collector.meta(ref))
        seconds = None if listed.runs_agents else connection.server.timeout  # an agent may take as long as its run
        call = ServerCall(context=context, tool=self._name, seconds=seconds, meta=meta)
        if listed.runs_agents:
            run_id = uuid.uuid4().hex
            if collector is not None:
                run_id = collector.call(connection.server.name, ref, listed.name, call.give_up)
            args = {**args, RUN_ID: run_id}
        outcome: Outcome | None = None
        try:
            result = await connection.call_tool(listed.name, args, call)
            outcome = await _make_outcome(result, context.spill)
        except ToolError as error:
            outcome = Outcome(str(error), success=False)
            raise
        finally:
            if run_id and collector is not None:
                collector.end_call(run_id, outcome)
        return outcome


class McpServers:
    """The servers of a supervisor. Each is started when a run first needs it, and ended with the supervisor.

    `folder` gets a file with the output of each server. `collector` gets the reports of their subagents. `version`
    counts the changes of tools and states."""

    def __init__(
        self,
        servers: Sequence[McpServer],
        *,
        project: str,
        folder: Path | None,
        collector: Collector | None = None,
        back_off: float = BACK_OFF,
    ) -> None:
        self.version = 0
        self.connections = {
            server.name: Connection(
                server,
                project=project,
                output_file=None if folder is None else folder / f"{server.name}.log",
                collector=collector,
                on_change=self._handle_change,
                back_off=back_off,
            )
            for server in servers
        }
        self._tools: WeakValueDictionary[str, ConnectedTool] = WeakValueDictionary()  # those that a run has

    async def ready(self, profile: Profile | str | None, say: Callable[[str], object] | None = None) -> None:
        needed = self._find_needed_servers(profile)
        wanted = [each for name, each in self.connections.items() if name in needed and not each.tried.is_set()]
        for connection in wanted:
            connection.start()
        async with TaskOwner() as owner:
            for each in wanted:
                owner.start(each.tried.wait())
            is_over = await owner.wait(PATIENCE_SECONDS)
            late = [each.server for each in wanted if not each.tried.is_set()]
            if not is_over and late and say is not None:
                names = ", ".join(f"{server.name} ({server.words})" for server in late)
                say(f"waiting for the MCP server{'s' if len(late) > 1 else ''} {names}")
            await owner.wait()
        if say is not None:
            for each in wanted:  # only the notes: each plan warns of a server that is not available
                for note in each.notes:
                    say(f"warning: the MCP server '{each.server.name}': {note}")

    def find(self, entry: str | None) -> Mapping[str, ServerTool]:
        found: dict[str, ServerTool] = {}
        for connection in self.connections.values():
            if connection.state == "idle" and entry is not None and server_of(entry) == connection.server.name:
                connection.start()  # too late for this run, but in time for later runs
            for name, listed in connection.tools.items():
                if entry is None or _matches_entry(entry, name, connection.server.name):
                    found[name] = self._tools.setdefault(name, ConnectedTool(connection, listed))
        if entry is not None and server_of(entry) not in self.connections:
            there = ", ".join(self.connections) or "none"
            raise NotFound(f"unknown MCP server '{server_of(entry)}' in {entry!r}; available: {there}")
        return found

    def lacks(self, entries: Sequence[Any] | None) -> Sequence[tuple[str, str]]:
        found: dict[str, str] = {}
        for entry in [f"{PREFIX}{name}" for name in self.connections] if entries is None else entries:
            connection = self.connections.get(server_of(entry))
            if connection is None:
                continue
            name = connection.server.name
            if connection.state != "up":
                found[LACKS.format(server=name)] = connection.unavailable_reason
            elif not any(_matches_entry(entry, tool, name) for tool in connection.tools) and entry != f"{PREFIX}{name}":
                found[LACKS_ONE.format(entry=entry)] = f"the MCP server '{name}' has no tool that {entry!r} means"
        return list(found.items())

    def explain_missing(self, tool: str) -> str:
        """Return why a tool is missing, if it belongs to an unavailable server; else ''."""
        connection = self.connections.get(server_of(tool))
        return "" if connection is None or connection.state == "up" else connection.unavailable_reason

    def reports(self) -> Sequence[ServerReport]:
        """Return a report on each server that was tried."""
        return [
            ServerReport(
                name=name,
                words=each.server.words,
                error=each.error,
                tools=len(each.tools),
                revision=each.revision,
                notes=tuple(each.notes),
            )
            for name, each in self.connections.items()
            if each.state != "idle"
        ]

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self.connections.values()))

    def _find_needed_servers(self, profile: Profile | str | None) -> set[str]:
        """Return the servers whose tools a run of the profile, or of a profile among its tools, may use."""
        if not isinstance(profile, Profile) or profile.tools is None or profile.call is not None:
            return set(self.connections)
        found = {server_of(entry) for entry in profile.tools}
        for entry in profile.tools:
            if isinstance(entry, Profile):
                found |= self._find_needed_servers(entry)
        return found

    def _handle_change(self) -> None:
        self.version += 1


def _matches_entry(entry: str, tool: str, server: str) -> bool:
    return entry == tool or entry in (f"{PREFIX}{server}", f"{PREFIX}{server}__*")


async def _make_outcome(result: types.CallToolResult, spill: Spill) -> Outcome:
    """Make the Outcome of a call. `spill` returns the path of a new file of the calling run."""
    parts = [part for block in result.content for part in _render_block(block, spill)]
    data = result.structured_content
    text = await asyncio.to_thread(_make_text, parts, data)  # a large one takes seconds
    return Outcome(text, success=not result.is_error, data=data)


def _make_text(parts: list[str], data: Any) -> str:
    """Return the text of a result: its parts, and its data unless a part repeats them."""
    parts = [strip_unseen(part) for part in parts]
    if data is not None and not any(_is_same_data(part, data) for part in parts[:REPEATS]):
        parts.append(strip_unseen(_format_data(data)))
    return "\n".join(parts)


def _render_block(block: types.ContentBlock, spill: Spill) -> Iterator[str]:
    if isinstance(block, types.TextContent):
        yield block.text
    elif isinstance(block, types.ImageContent):
        yield _save_base64("image", block.data, block.mime_type, spill)
    elif isinstance(block, types.AudioContent):
        yield _save_base64("audio", block.data, block.mime_type, spill)
    elif isinstance(block, types.ResourceLink):
        about = f": {to_line(block.description)}" if block.description else ""
        yield f"[resource {to_line(block.uri)} ({to_line(block.name)}){about}]"
    elif isinstance(block.resource, types.TextResourceContents):
        resource, data = block.resource, block.resource.text.encode("utf-8", "replace")
        yield _save_file("resource", data, resource.mime_type or "text/plain", spill, to_line(resource.uri))
        yield resource.text
    else:
        blob = block.resource
        yield _save_base64("resource", blob.blob, blob.mime_type or "", spill, to_line(blob.uri))


def _save_base64(kind: str, data: str, mime: str, spill: Spill, name: str = "") -> str:
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return f"[{kind} {name}: not kept, its data is not base64]"
    return _save_file(kind, raw, mime, spill, name)


def _save_file(kind: str, data: bytes, mime: str, spill: Spill, name: str = "") -> str:
    what = f"{kind} {name}".strip() + f" ({to_line(mime, 80) or 'unknown type'}, {len(data)} bytes)"
    if len(data) > MAX_FILE_BYTES:
        return f"[{what}: not kept, it is larger than {MAX_FILE_BYTES // 1024 // 1024} MiB]"
    try:
        path = spill(f"{kind}{mimetypes.guess_extension(mime.partition(';')[0].strip()) or '.bin'}")
        write_private_file(path, data)
    except (OSError, RetinueError) as error:
        return f"[{what}: not kept, {getattr(error, 'strerror', None) or error}]"
    return f"[{what} in {path}]"


def _format_data(data: Any) -> str:
    """Return data as indented JSON, or without indentation if many levels would make it much longer."""
    encoded = msgspec.json.encode(data)
    if _count_indents(data) > max(INDENTS, INDENTS_PER_BYTE * len(encoded)):
        return encoded.decode()
    return msgspec.json.format(encoded, indent=2).decode()


def _count_indents(data: Any) -> int:
    """Return the sum of the levels of all values."""
    total, level, values = 0, 0, [data]
    while values:
        total += level * len(values)
        level += 1
        values = [
            member
            for value in values
            if isinstance(value, dict | list)
            for member in (value.values() if isinstance(value, dict) else value)
        ]
    return total


def _is_same_data(text: str, data: Any) -> bool:
    """Return True if the text repeats the data. Servers send both, for clients that read only one."""
    if isinstance(data, dict) and list(data.values()) == [text]:
        return True
    if explain_excess(text.encode()):
        return False  # more values than the whole message had, and `data` with it
    try:
        return bool(msgspec.json.decode(text) == data)
    except (msgspec.DecodeError, RecursionError):
        return False
