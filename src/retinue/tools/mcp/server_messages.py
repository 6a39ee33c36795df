"""Messages from MCP servers, bounded before they are parsed and repaired before the SDK checks them.

A hostile server must not cost much more memory than the bytes that it sends, and one part that the SDK cannot read must
not fail the whole message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import mcp_types as types
import msgspec
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.shared.dispatcher import coerce_request_id
from mcp_types import methods
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from retinue.tools.mcp.server_text import describe_invalid_part, describe_server_error, to_line
from retinue.tools.mcp.tool_listing import MAX_TOOLS, UNREADABLE

if TYPE_CHECKING:
    from mcp.client._transport import ReadStream, WriteStream
    from mcp.shared.message import SessionMessage

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_PARTS = 1_000_000
SCHEMA_BYTES = 128 * 1024
TOO_LARGE = f"it sent a message of more than {MAX_MESSAGE_BYTES // 1024 // 1024} MiB"
TOO_MANY_PARTS = f"it sent a message with more than {MAX_PARTS:,} values"
_PARTS = re.compile(rb'"[^"]*+"?|[,[{]')
# Half of a character: an escape of half a surrogate pair without the escape of the other half.
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
_MARKS = (b'"', b",", b"[", b"{")
MAX_BLOCKS = 1000
MAX_REQUESTS = 256
TOO_MANY_REQUESTS = f"it sent more than {MAX_REQUESTS} requests without waiting for answers"
CANCELLED = "notifications/cancelled"
_EVENT_END = re.compile(rb"(?>\r\n|\r|\n){2}")
_UNUSED = ("_meta", "annotations", "execution", "icons")
_USED_OF_PAGE = frozenset({"cacheScope", "nextCursor", "resultType", "tools", "ttlMs"})
_BLOCK: TypeAdapter[types.ContentBlock] = TypeAdapter(types.ContentBlock)


def explain_excess(message: bytes) -> str:
    """Return why a message in JSON is not parsed, or an empty text.

    A parser needs up to a hundred times the bytes of a message, for the strings, lists, objects and commas in it."""
    if len(message) > MAX_MESSAGE_BYTES:
        return TOO_LARGE
    if len(message) <= MAX_PARTS or sum(map(message.count, _MARKS)) <= MAX_PARTS:
        return ""
    without_escapes = message.replace(rb"\\", b"").replace(rb"\"", b"")
    is_costly = next(islice(_PARTS.finditer(without_escapes), MAX_PARTS, None), None) is not None
    return TOO_MANY_PARTS if is_costly else ""


def parse_server_message(line: bytes) -> types.JSONRPCMessage | None:
    """Return the message of a line, or None. Repairs a text that was cut within a character."""
    return _parse_message(line) or _parse_message(_replace_half_characters(line))


def _parse_message(line: bytes) -> types.JSONRPCMessage | None:
    try:
        return types.jsonrpc_message_adapter.validate_python(_parse_json(line), by_name=False)
    except (ValueError, RecursionError):
        return None


def _parse_json(line: bytes) -> Any:
    """Return the value of a line. Only `from_json` reads NaN and Infinity, which Python's `json` writes; only msgspec
    reads more than 200 levels of nesting."""
    try:
        return from_json(line)
    except ValueError:
        return msgspec.json.decode(line)


def _replace_half_characters(line: bytes) -> bytes:
    """Remove a byte order mark and replace escaped lone surrogates: a server may cut a text within a character."""
    line = line.removeprefix(b"\xef\xbb\xbf")
    if rb"\u" not in line or b"\0" in line:  # JSON has no null bytes
        return line
    without_backslashes = line.replace(rb"\\", b"\0\0")  # so that each backslash that is left begins an escape
    return _HALF.sub(rb"\\ufffd", without_backslashes).replace(b"\0\0", rb"\\")


class BoundedBody(httpx2.AsyncByteStream):
    """The body of an HTTP response, passed on in whole messages. Raises StreamError for one that is not parsed. Calls
    `on_excess` with the reason if it is too costly: the SDK does not pass the reason on."""

    def __init__(self, response: httpx2.Response, *, on_excess: Callable[[str], None]) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._inner = response.stream
        self._on_excess = on_excess
        self._is_packed = response.headers.get("content-encoding", "identity") != "identity"
        self._is_events = response.headers.get("content-type", "").lower().startswith("text/event-stream")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_packed:
            raise httpx2.StreamError("it compressed its answer, which was not asked for")
        waiting = bytearray()
        async for chunk in self._inner:
            waiting += chunk
            if len(waiting) > MAX_MESSAGE_BYTES:
                raise self._refuse_excess(TOO_LARGE)
            ends = _EVENT_END.finditer(waiting, max(0, len(waiting) - len(chunk) - 3)) if self._is_events else ()
            if end := max((found.end() for found in ends), default=0):
                yield self._check_excess(bytes(waiting[:end]))
                del waiting[:end]
        yield self._check_excess(bytes(waiting))

    async def aclose(self) -> None:
        await self._inner.aclose()

    def _check_excess(self, data: bytes) -> bytes:
        if why := explain_excess(data):
            raise self._refuse_excess(why)
        return data

    def _refuse_excess(self, why: str) -> httpx2.StreamError:
        self._on_excess(why)
        return httpx2.StreamError(why)


class ServerRequests:
    """The requests of a server that are not answered yet. The SDK serves each in a task of its own, without a limit."""

    def __init__(self) -> None:
        self._counts: Counter[types.RequestId] = Counter()

    @property
    def are_too_many(self) -> bool:
        return self._counts.total() > MAX_REQUESTS

    def note_received(self, message: types.JSONRPCMessage) -> None:
        """Count a request. Forget a request that the server cancels: it gets no answer."""
        if isinstance(message, types.JSONRPCRequest):
            self._counts[coerce_request_id(message.id)] += 1
        elif isinstance(message, types.JSONRPCNotification) and message.method == CANCELLED:
            self._forget((message.params or {}).get("requestId"))

    def note_sent(self, message: types.JSONRPCMessage) -> None:
        """Forget a request that has been answered."""
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            self._forget(message.id)

    def _forget(self, number: Any) -> None:
        if not isinstance(number, str | int):
            return
        number = coerce_request_id(number)
        if self._counts[number] > 1:
            self._counts[number] -= 1
        else:
            self._counts.pop(number, None)


class LenientReader(ObjectReceiveStream["SessionMessage | Exception"]):
    """A stream of a server's messages. Replaces a content block or a tool that the SDK cannot read by one that says so,
    since it would fail the whole result or the whole list of tools. Bounds what the SDK's check of them can cost.

    `list_ids` are the ids of the requests to list tools, added by a SentWatcher: any other result may have a field
    `tools` too, which means nothing here. If too many of the server's own `requests` wait for an answer, calls
    `on_excess` with the reason, and ends the stream."""

    def __init__(
        self,
        inner: ReadStream[SessionMessage | Exception],
        *,
        get_revision: Callable[[], str],
        list_ids: set[types.RequestId],
        requests: ServerRequests,
        on_excess: Callable[[str], None],
    ) -> None:
        self._inner = inner
        self._get_revision = get_revision
        self._list_ids = list_ids
        self._requests = requests
        self._on_excess = on_excess

    @property
    def last_context(self) -> Any:
        return getattr(self._inner, "last_context", None)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def receive(self) -> SessionMessage | Exception:
        item = await self._inner.receive()
        if isinstance(item, Exception):
            return item
        message = item.message
        self._requests.note_received(message)
        if self._requests.are_too_many:
            self._on_excess(TOO_MANY_REQUESTS)
            raise anyio.EndOfStream
        if isinstance(message, types.JSONRPCResponse):
            if isinstance(content := message.result.get("content"), list):
                _repair_content(content)
            number = coerce_request_id(message.id)  # as the SDK finds the request of an answer
            if number in self._list_ids and isinstance(tools := message.result.get("tools"), list):
                _repair_tools(tools, message.result, self._get_revision())
            self._list_ids.discard(number)
        return item


class SentWatcher(ObjectSendStream["SessionMessage"]):
    """A stream of messages to a server. Adds the id of each request to list tools to `list_ids`. Removes a request of
    the server from `requests` when its answer is sent."""

    def __init__(
        self, inner: WriteStream[SessionMessage], *, list_ids: set[types.RequestId], requests: ServerRequests
    ) -> None:
        self._inner = inner
        self._list_ids = list_ids
        self._requests = requests

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def send(self, item: SessionMessage) -> None:
        message = item.message
        if isinstance(message, types.JSONRPCRequest) and message.method == "tools/list":
            self._list_ids.add(coerce_request_id(message.id))  # first: the answer may come before `send` returns
        await self._inner.send(item)
        self._requests.note_sent(message)


def _repair_content(content: list[Any]) -> None:
    """Replace the blocks that the SDK would refuse, and cut the list after `MAX_BLOCKS`."""
    more = len(content) - MAX_BLOCKS
    del content[MAX_BLOCKS:]
    for index, block in enumerate(content):
        try:
            content[index] = _drop_unused_fields(block)
            _BLOCK.validate_python(content[index])
        except (ValueError, RecursionError):
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            content[index] = _make_note(
                f"content of the type '{to_line(str(kind), 80)}' was left out: it cannot be read here"
            )
    if more > 0:
        content.append(_make_note(f"{more} more parts were left out: {MAX_BLOCKS} are enough"))


def _make_note(text: str) -> dict[str, Any]:
    return {"type": "text", "text": f"[{text}]"}


def _repair_tools(tools: list[Any], page: dict[str, Any], revision: str) -> None:
    """Replace the tools of a page that the SDK would refuse; a ToolListing leaves the replacements out. Drop the
    tools and fields of the page that are not used here: each tool is checked together with the other fields."""
    del tools[MAX_TOOLS + 1 :]
    for field in page.keys() - _USED_OF_PAGE:
        del page[field]
    for index, each in enumerate(tools):
        tools[index] = tool = _drop_unused_fields(each)
        if why := _explain_unreadable(tool, page, revision):
            name = tool.get("name") if isinstance(tool, dict) else None
            tools[index] = {
                "name": name if isinstance(name, str) else f"number {index + 1}",
                "inputSchema": {"type": "object"},
                "_meta": {UNREADABLE: why},
            }


def _explain_unreadable(tool: Any, page: dict[str, Any], revision: str) -> str:
    """Return why the SDK would refuse a tool of a page, or an empty text."""
    try:
        if isinstance(tool, dict):
            if _is_large(tool.get("outputSchema")):
                del tool["outputSchema"]  # the tool works without it
            if _is_large(tool.get("inputSchema")):
                return f"its schema is larger than {SCHEMA_BYTES // 1024} KiB"
        methods.validate_server_result("tools/list", revision, {**page, "tools": [tool]})
    except ValidationError as error:
        return describe_invalid_part(error, ("tools", 0))
    except (ValueError, RecursionError) as error:
        return describe_server_error(error)
    return ""


def _is_large(schema: Any) -> bool:
    return len(msgspec.json.encode(schema)) > SCHEMA_BYTES


def _drop_unused_fields(value: Any) -> Any:
    """Return a tool or a block of content without the fields that are not used here, which the SDK would check."""
    return {name: each for name, each in value.items() if name not in _UNUSED} if isinstance(value, dict) else value
