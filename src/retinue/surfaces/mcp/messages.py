"""JSON-RPC as MCP uses it: parses messages from bytes and encodes them to bytes. Knows no method and no transport.

Imports little, because a client's first answer waits for this module.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import msgspec

from retinue.protocol.strict_json import InvalidBody, encode_body, refuse_repeated_keys

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
Id = int | str
_MAX_ID = 1000


class ErrorCode(IntEnum):
    """The error codes of JSON-RPC, and the codes that MCP adds."""

    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL_ERROR = -32603
    HEADER_MISMATCH = -32020
    UNSUPPORTED_VERSION = -32022


class RpcError(Exception):
    """An error that the peer gets instead of a result. `id` is the id of an invalid request, if the request has
    one."""

    def __init__(self, code: ErrorCode, message: str, data: Any = None, *, id: Id | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.data = data
        self.id = id


class RpcRequest(msgspec.Struct, frozen=True, gc=False):
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
    """A peer's answer to a request of ours. `result` is None for an error."""

    id: Id
    result: dict[str, Any] | None


Message = RpcRequest | Notification | Response


def parse_message(data: bytes) -> Message:
    """Parse one message. Raises RpcError for any invalid input."""
    data = data.removeprefix(BOM)
    try:
        found = msgspec.json.decode(data)
        refuse_repeated_keys(data)
    except InvalidBody as error:
        raise RpcError(ErrorCode.INVALID_REQUEST, str(error), id=_recover_id(data)) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise RpcError(ErrorCode.PARSE_ERROR, f"Parse error: {why}", id=_recover_id(data)) from None
    if not isinstance(found, dict):
        raise RpcError(ErrorCode.INVALID_REQUEST, f"a message is one JSON object, not {_describe_type(found)}")
    if found.get("jsonrpc") != "2.0":
        raise RpcError(ErrorCode.INVALID_REQUEST, "a message has 'jsonrpc': '2.0'")
    if "method" not in found:
        return _parse_response(found)
    method, params = found["method"], found.get("params")
    if not isinstance(method, str):
        raise RpcError(ErrorCode.INVALID_REQUEST, f"'method' must be a string, not {_describe_type(method)}")
    if "id" not in found:
        return Notification(method, params if isinstance(params, dict) else {})
    name = _parse_id(found["id"])
    if params is not None and not isinstance(params, dict):
        raise RpcError(ErrorCode.INVALID_PARAMS, f"'params' must be an object, not {_describe_type(params)}", id=name)
    return RpcRequest(name, method, params or {})


def _recover_id(data: bytes) -> Id | None:
    """Return the id of a request that is almost JSON or repeats a key, or None. A model may write half of a surrogate
    pair, NaN or a long number. Without an answer the client would wait until its own timeout."""
    try:
        found = json.loads(
            data,
            object_pairs_hook=_drop_repeated_id,
            parse_int=lambda word: int(word) if len(word) <= _MAX_ID else None,
        )
        return _parse_id(found["id"]) if isinstance(found.get("method"), str) else None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, RpcError):
        return None


def _drop_repeated_id(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object, without its id if it has two: nothing tells which of them the client waits for."""
    found = dict(pairs)
    if sum(name == "id" for name, _ in pairs) > 1:
        del found["id"]
    return found


def _parse_response(found: dict[str, Any]) -> Response:
    if "result" not in found and "error" not in found:
        raise RpcError(ErrorCode.INVALID_REQUEST, "a message has a 'method', a 'result' or an 'error'")
    result = found.get("result")
    return Response(_parse_id(found.get("id")), result if isinstance(result, dict) else None)


def _parse_id(value: Any) -> Id:
    if isinstance(value, bool) or not isinstance(value, int | str) or len(str(value)) > _MAX_ID:
        raise RpcError(ErrorCode.INVALID_REQUEST, "'id' must be a string or a whole number")
    return value


def _describe_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null", dict: "an object"}
    return names.get(type(value), "a number")


# Messages as bytes, without a trailing newline


def encode_message(**fields: Any) -> bytes:
    """Encode a message: a notification (`method`, `params`), a request (also `id`), or an answer (`id`, `result`)."""
    return encode_body({"jsonrpc": "2.0", **fields})


def encode_error(id: Id | None, error: RpcError) -> bytes:
    about = {"code": error.code, "message": str(error)}
    if error.data is not None:
        about["data"] = error.data
    return encode_message(id=id, error=about)
