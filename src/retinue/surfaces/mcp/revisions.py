"""The MCP revisions we speak: with a handshake up to 2025-11-25, with an envelope in each request since 2026-07-28.

This module reads the client and the revision of a request, and adapts results to the revision. The rest of the server
is the same for both kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from retinue.surfaces.mcp.messages import ErrorCode, RpcError, RpcRequest

HANDSHAKE = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
ENVELOPE = "2026-07-28"
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CLIENT_KEY = "io.modelcontextprotocol/clientInfo"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
_CACHED = frozenset({"server/discover", "tools/list"})
_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
INSTRUCTIONS = (
    "Delegate work to supervised subagents. spawn_subagents runs one subagent for each parallel task, each on its own, "
    "in its own workspace and sandbox, and returns their answers; with background=true it returns at once, and "
    "custom_tool__wait_for_background_tool gives the answers later. list_subagents finds subagents again, also those "
    "of earlier sessions; continue_subagent gives a finished subagent a new message. What a subagent changed stays in "
    "its workspace until the user applies it with the `apply` command of the reply. Dangerous actions of subagents are "
    "asked of the user."
)
PROFILE_INSTRUCTIONS = (
    "Delegate a task to the subagent '{name}': it works on its own, with a context of its own, and returns its answer."
)
_MAX_TEXT = 100


class ClientInfo(msgspec.Struct, frozen=True, gc=False):
    """A client's own description of itself. It has no influence on permissions."""

    modern: bool
    version: str
    name: str = ""
    capabilities: dict[str, Any] = {}

    @property
    def can_be_asked(self) -> bool:
        """Return True if the client can show its user a form."""
        can = self.capabilities.get("elicitation")
        return isinstance(can, dict) and ("form" in can or "url" not in can)


UNKNOWN_CLIENT = ClientInfo(False, HANDSHAKE[-1])
SERVER_INFO = {"name": "retinue", "title": "Retinue subagents", "version": sys.modules["retinue"].__version__}


def answer_initialize(params: dict[str, Any], instructions: str) -> tuple[ClientInfo, dict[str, Any]]:
    """Return the client's description and the answer to its handshake. Raises RpcError."""
    wanted = params.get("protocolVersion")
    if not isinstance(wanted, str):
        raise RpcError(ErrorCode.INVALID_PARAMS, "initialize: 'protocolVersion' must be a string")
    version = wanted if wanted in HANDSHAKE else HANDSHAKE[-1]
    client = _describe_client(version, params.get("clientInfo"), params.get("capabilities"), modern=False)
    return client, {
        "protocolVersion": version,
        "capabilities": {"tools": {}},
        "serverInfo": SERVER_INFO,
        "instructions": instructions,
    }


def is_enveloped(request: RpcRequest) -> bool:
    return request.method != "initialize" and VERSION_KEY in request.meta


def read_envelope(request: RpcRequest, headers: Mapping[str, str] | None = None) -> ClientInfo:
    """Return the client described in a request's envelope. Over HTTP, `headers` must match the envelope. Raises
    RpcError."""
    meta = request.meta
    missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]
    if missing:
        raise RpcError(ErrorCode.INVALID_PARAMS, f"params._meta is missing {', '.join(missing)}")
    version = meta[VERSION_KEY]
    if headers is not None:
        _check_headers(request, version, headers)
    if not isinstance(version, str):
        raise RpcError(ErrorCode.INVALID_PARAMS, f"{VERSION_KEY} must be a string")
    if version != ENVELOPE:
        wanted = {"supported": [ENVELOPE], "requested": version[:_MAX_TEXT]}
        raise RpcError(ErrorCode.UNSUPPORTED_VERSION, "Unsupported protocol version", wanted)
    return _describe_client(version, meta.get(CLIENT_KEY), meta.get(CAPABILITIES_KEY), modern=True)


def _check_headers(request: RpcRequest, version: Any, headers: Mapping[str, str]) -> None:
    if headers.get("mcp-protocol-version") != version:
        raise RpcError(ErrorCode.HEADER_MISMATCH, "the header MCP-Protocol-Version is not what the request says")
    if headers.get("mcp-method") != request.method:
        raise RpcError(ErrorCode.HEADER_MISMATCH, "the header Mcp-Method is not the method of the request")
    named = _NAMED.get(request.method)
    wanted = None if named is None else request.params.get(named)
    if wanted is not None and headers.get("mcp-name") != wanted:
        raise RpcError(ErrorCode.HEADER_MISMATCH, f"the header Mcp-Name is not the '{named}' of the request")


def finish_result(request: RpcRequest, client: ClientInfo, result: dict[str, Any]) -> dict[str, Any]:
    """Add the fields that the client's revision requires to a result."""
    if not client.modern:
        return result
    stamped = {"resultType": "complete", **result, "_meta": {SERVER_KEY: SERVER_INFO}}
    return stamped if request.method not in _CACHED else {"ttlMs": 0, "cacheScope": "private", **stamped}


def _describe_client(version: str, about: Any, capabilities: Any, *, modern: bool) -> ClientInfo:
    words = [about.get("name"), about.get("version")] if isinstance(about, dict) else []
    name = " ".join(word for word in words if isinstance(word, str))[:_MAX_TEXT]
    return ClientInfo(modern, version, name, capabilities if isinstance(capabilities, dict) else {})
