"""The gate before the A2A application. It checks each request before reading the body, and parses the body strictly.

It checks Host and Origin, so that no web page can send requests, then the token, then the client's request rate.
Bodies are limited in size and time and must be strict JSON. Errors are answered in the protocol's format. The gate
knows tokens, but no tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from a2a.utils.error_handlers import build_rest_error_payload
from a2a.utils.errors import ContentTypeNotSupportedError, InvalidRequestError
from starlette.authentication import SimpleUser
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retinue.concurrency import RateLimit, TaskOwner
from retinue.http.server import has_bearer_token
from retinue.protocol.a2a import EXTENSION
from retinue.protocol.strict_json import InvalidBody, decode_body, encode_body

CARD_PATH = "/.well-known/agent-card.json"
RPC_PATH = "/"
MAX_BODY_BYTES = 12 * 1024 * 1024
BODY_SECONDS = 30.0
REQUEST_RATE, REQUEST_BURST = 200.0, 2000  # per client: requests per second, and burst
TOO_FAST = "a client may send at most {rate:g} requests a second: try again later"
EXTENSION_HEADERS = ("a2a-extensions", "x-a2a-extensions")  # protocol versions 1.0 and 0.3
GONE = "retinue.gone"
ANONYMOUS = "anyone"
PARSE_ERROR, INVALID_REQUEST, UNSUPPORTED_TYPE = -32700, -32600, -32005
JSON_TYPES = ("application/json", "application/a2a+json")


class Refused(Exception):
    """A refused request, with the HTTP status and the JSON-RPC code of the answer."""

    def __init__(self, status: int, text: str, *, code: int = INVALID_REQUEST) -> None:
        super().__init__(text)
        self.status, self.code = status, code


class Gate:
    """ASGI middleware that admits requests. `tokens` maps client names to secrets; if it is empty, every client is
    admitted. `hosts` and `origins` are the accepted values of the Host and Origin headers."""

    def __init__(self, app: ASGIApp, *, tokens: Mapping[str, str], hosts: frozenset[str], origins: frozenset[str]):
        self._app, self._tokens, self._hosts, self._origins = app, tokens, hosts, origins
        self._rates = {name: RateLimit(REQUEST_RATE, REQUEST_BURST) for name in (*tokens, ANONYMOUS)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        try:
            client = self._admit(scope, headers)
            if self._rates[client].take():
                raise Refused(429, TOO_FAST.format(rate=REQUEST_RATE))
            scope["user"] = SimpleUser(client)
            body = await _read_body(headers, receive)
        except Refused as refused:
            await make_refusal(refused, is_rpc=scope["path"] == RPC_PATH)(scope, receive, send)
            return
        inbox = _Inbox(body, receive)
        scope[GONE] = inbox.gone
        async with TaskOwner() as owner:
            listening = owner.start(inbox.listen())
            try:
                await self._app(scope, inbox.receive, _confirm_extension(headers, send))
            finally:
                listening.cancel()

    def _admit(self, scope: Scope, headers: Headers) -> str:
        """Return the name of the client. Raises Refused."""
        host, origins = headers.get("host", "").lower(), headers.getlist("origin")
        if host not in self._hosts or len(headers.getlist("host")) != 1:
            raise Refused(421, "the Host header does not name this server; --public-url gives it another name")
        if any(origin.lower() not in self._origins for origin in origins):
            raise Refused(403, "requests from web pages of other servers are refused: see the Origin header")
        if not self._tokens or (scope["method"] in ("GET", "HEAD") and scope["path"] == CARD_PATH):
            return ANONYMOUS
        given = headers.get("authorization", "")
        names = [name for name, token in self._tokens.items() if has_bearer_token(given, token)]
        if not names:
            raise Refused(401, "a token is needed: send the header `Authorization: Bearer TOKEN`")
        return names[0]


def _confirm_extension(headers: Headers, send: Send) -> Send:
    """Return a `send` that names our extension in the response, in the same header in which the request asked for
    it."""
    asked = [
        name for name in EXTENSION_HEADERS if EXTENSION in ",".join(headers.getlist(name)).replace(" ", "").split(",")
    ]
    if not asked:
        return send

    async def confirm(message: Message) -> None:
        if message["type"] == "http.response.start":
            for name in asked:
                MutableHeaders(scope=message)[name] = EXTENSION
        await send(message)

    return confirm


async def _read_body(headers: Headers, receive: Receive) -> bytes:
    """Return the body, checked to be JSON without duplicate keys. Raises Refused."""
    if headers.get("content-encoding", "identity") != "identity":
        raise Refused(415, "compressed bodies are not accepted", code=UNSUPPORTED_TYPE)
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise Refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the request ended before its body")
                data += message.get("body", b"")
                if len(data) > MAX_BODY_BYTES:
                    raise Refused(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    if not data:
        return b""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES:
        raise Refused(415, "the body must be JSON: send `Content-Type: application/json`", code=UNSUPPORTED_TYPE)
    try:
        value: Any = decode_body(bytes(data), Any)
    except InvalidBody as error:
        raise Refused(400, str(error), code=PARSE_ERROR) from None
    if isinstance(value, dict) and "method" in value:
        value.setdefault("jsonrpc", "2.0")  # some clients omit it
        return encode_body(value)
    return bytes(data)


def make_refusal(refused: Refused, *, is_rpc: bool) -> JSONResponse:
    """Return the response to a refused request, in the format of its binding. For a JSON-RPC request, invalid JSON is
    a JSON-RPC error with HTTP status 200."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(refused.status)
    if is_rpc:
        status = 200 if refused.code == PARSE_ERROR else refused.status
        said: dict[str, Any] = {"code": refused.code, "message": str(refused)}
        return JSONResponse({"jsonrpc": "2.0", "id": None, "error": said}, status, headers=headers)
    error = ContentTypeNotSupportedError if refused.code == UNSUPPORTED_TYPE else InvalidRequestError
    payload: dict[str, Any] = build_rest_error_payload(error(str(refused)))
    payload["error"]["code"] = refused.status
    return JSONResponse(payload, refused.status, headers=headers)


class _Inbox:
    """The ASGI messages of one request for the application: the body in one piece, then the disconnect. `gone` is set
    when the client has disconnected."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._receive = receive
        self._body: bytes | None = body
        self.gone = asyncio.Event()

    async def listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}
