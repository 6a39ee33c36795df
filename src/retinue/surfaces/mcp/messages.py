"""JSON-RPC as MCP uses it: one message from bytes, and bytes from one message. Knows no method and no transport.

Loads next to nothing: a client that starts us waits a second for its first answer, and not longer.
"""

from __future__ import annotations

from typing import Any

import msgspec

LARGEST = 4 * 1024 * 1024
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
UNSUPPORTED_VERSION = -32022
BOM = b"\xef\xbb\xbf"
Id = int | str
_LONGEST_ID = 1000


class Problem(Exception):
    """What a peer is told instead of a result; `id` is that of its request, where that is known."""

    def __init__(self, code: int, message: str, data: Any = None, *, id: Id | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data
        self.id = id


class Request(msgspec.Struct, frozen=True, gc=False):
    id: Id
    method: str
    params: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        found = self.params.get("_meta")
        return found if isinstance(found, dict) else {}


class Notification(msgspec.Struct, frozen=True, gc=False):
    method: str
    params: dict[str, Any]


class Response(msgspec.Struct, frozen=True, gc=False):
    """A peer's answer to a request of ours; an error has no result."""

    id: Id
    result: dict[str, Any] | None


Message = Request | Notification | Response


def read(data: bytes) -> Message:
    """The message; a Problem says what it is instead. Nothing a peer can send does worse."""
    try:
        found = msgspec.json.decode(data.removeprefix(BOM))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Problem(PARSE_ERROR, f"Parse error: {_reason(error)}") from None
    if not isinstance(found, dict):
        raise Problem(INVALID_REQUEST, f"a message is one JSON object, not {_kind(found)}")
    if found.get("jsonrpc") != "2.0":
        raise Problem(INVALID_REQUEST, "a message has 'jsonrpc': '2.0'")
    if "method" not in found:
        return _response(found)
    method, params = found["method"], found.get("params")
    if not isinstance(method, str):
        raise Problem(INVALID_REQUEST, f"'method' must be a string, not {_kind(method)}")
    if "id" not in found:
        return Notification(method, params if isinstance(params, dict) else {})
    name = _id(found["id"])
    if params is not None and not isinstance(params, dict):
        raise Problem(INVALID_PARAMS, f"'params' must be an object, not {_kind(params)}", id=name)
    return Request(name, method, params or {})


def _response(found: dict[str, Any]) -> Response:
    if "result" not in found and "error" not in found:
        raise Problem(INVALID_REQUEST, "a message has a 'method', a 'result' or an 'error'")
    result = found.get("result")
    return Response(_id(found.get("id")), result if isinstance(result, dict) else None)


def _id(value: Any) -> Id:
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > _LONGEST_ID:
        raise Problem(INVALID_REQUEST, "'id' must be a string or a whole number")
    return value


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")


# Bytes of a message, without a line's end


def result(id: Id, value: dict[str, Any]) -> bytes:
    return _encode({"jsonrpc": "2.0", "id": id, "result": value})


def error(id: Id | None, problem: Problem) -> bytes:
    about = {"code": problem.code, "message": str(problem)}
    if problem.data is not None:
        about["data"] = problem.data
    return _encode({"jsonrpc": "2.0", "id": id, "error": about})


def request(id: Id, method: str, params: dict[str, Any]) -> bytes:
    return _encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params})


def notification(method: str, params: dict[str, Any]) -> bytes:
    return _encode({"jsonrpc": "2.0", "method": method, "params": params})


def _encode(message: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:  # half a character of a model's
        return msgspec.json.encode(_whole(message))


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_whole(key): _whole(each) for key, each in value.items()}
    return [_whole(each) for each in value] if isinstance(value, list | tuple) else value
