"""The revisions of MCP we speak: with a handshake up to 2025-11-25, with an envelope in each request since 2026-07-28.

Says who asks in which revision and what a result looks like in it. All else of the server is the same for both.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from retinue.surfaces.mcp.messages import HEADER_MISMATCH, INVALID_PARAMS, UNSUPPORTED_VERSION, Problem, Request

HANDSHAKE = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
ENVELOPE = "2026-07-28"
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CLIENT_KEY = "io.modelcontextprotocol/clientInfo"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
SERVER_KEY = "io.modelcontextprotocol/serverInfo"
CACHED = frozenset({"server/discover", "tools/list", "prompts/list", "resources/list", "resources/templates/list"})
NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
INSTRUCTIONS = (
    "Delegate work to supervised subagents. spawn_subagents runs one subagent for each parallel task, each on its own, "
    "in its own workspace and behind a wall, and returns their answers; with background=true it returns at once, and "
    "custom_tool__wait_for_background_tool gives the answers later. list_subagents finds subagents again, also those "
    "of earlier sessions; continue_subagent tells a finished subagent to go on. What a subagent changed stays in its "
    "workspace until the user takes it over with the `apply` command of the reply. Dangerous actions of subagents are "
    "asked of the user."
)
ONE = (
    "Delegate a task to the subagent '{name}': it works on its own, with a context of its own, and returns its answer."
)
_LONGEST = 100


class Client(msgspec.Struct, frozen=True, gc=False):
    """Who asks, as they say of themselves: data, never authority."""

    modern: bool
    version: str
    name: str = ""
    capabilities: dict[str, Any] = {}

    @property
    def can_be_asked(self) -> bool:
        """Whether a person can be shown a form there."""
        can = self.capabilities.get("elicitation")
        return isinstance(can, dict) and ("form" in can or "url" not in can)


NOBODY = Client(False, HANDSHAKE[-1])


def implementation() -> dict[str, str]:
    number: str = sys.modules["retinue"].__version__
    return {"name": "retinue", "title": "Retinue subagents", "version": number}


def initialize(params: dict[str, Any], instructions: str) -> tuple[Client, dict[str, Any]]:
    """The handshake: who the client is, and the answer."""
    wanted = params.get("protocolVersion")
    if not isinstance(wanted, str):
        raise Problem(INVALID_PARAMS, "initialize: 'protocolVersion' must be a string")
    version = wanted if wanted in HANDSHAKE else HANDSHAKE[-1]
    client = Client(False, version, _name(params.get("clientInfo")), _object(params.get("capabilities")))
    return client, {
        "protocolVersion": version,
        "capabilities": {"tools": {}},
        "serverInfo": implementation(),
        "instructions": instructions,
    }


def discover(instructions: str) -> dict[str, Any]:
    return {"supportedVersions": [ENVELOPE], "capabilities": {"tools": {}}, "instructions": instructions}


def is_enveloped(request: Request) -> bool:
    return request.method != "initialize" and VERSION_KEY in request.meta


def enveloped(request: Request, headers: Mapping[str, str] | None = None) -> Client:
    """Who sent a request with an envelope. Over HTTP the headers must say the same; else a Problem."""
    meta = request.meta
    missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]
    if missing:
        raise Problem(INVALID_PARAMS, f"params._meta is missing {', '.join(missing)}")
    version = meta[VERSION_KEY]
    if headers is not None:
        _check_headers(request, version, headers)
    if not isinstance(version, str):
        raise Problem(INVALID_PARAMS, f"{VERSION_KEY} must be a string")
    if version != ENVELOPE:
        wanted = {"supported": [ENVELOPE], "requested": version[:_LONGEST]}
        raise Problem(UNSUPPORTED_VERSION, "Unsupported protocol version", wanted)
    return Client(True, version, _name(meta.get(CLIENT_KEY)), _object(meta.get(CAPABILITIES_KEY)))


def _check_headers(request: Request, version: Any, headers: Mapping[str, str]) -> None:
    if headers.get("mcp-protocol-version") != version:
        raise Problem(HEADER_MISMATCH, "the header MCP-Protocol-Version is not what the request says")
    if headers.get("mcp-method") != request.method:
        raise Problem(HEADER_MISMATCH, "the header Mcp-Method is not the method of the request")
    named = NAMED.get(request.method)
    wanted = None if named is None else request.params.get(named)
    if wanted is not None and headers.get("mcp-name") != wanted:
        raise Problem(HEADER_MISMATCH, f"the header Mcp-Name is not the '{named}' of the request")


def finished(request: Request, client: Client, result: dict[str, Any]) -> dict[str, Any]:
    """The result as the client's revision wants it."""
    if not client.modern:
        return result
    stamped = {"resultType": "complete", **result, "_meta": {SERVER_KEY: implementation()}}
    return stamped if request.method not in CACHED else {"ttlMs": 0, "cacheScope": "private", **stamped}


def _name(value: Any) -> str:
    found = _object(value)
    words = [found.get("name"), found.get("version")]
    return " ".join(word for word in words if isinstance(word, str))[:_LONGEST]


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
