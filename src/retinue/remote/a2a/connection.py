"""The connection to one A2A agent: its checked card, its credentials, and an HTTP client restricted to its hosts.

All data from the agent is untrusted. Requests go only to the configured hosts, redirects are not followed, and answers
are limited in size and not decompressed. Knows the SDK and HTTP, but no runs.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx
from a2a.client import Client, ClientConfig, ClientFactory
from a2a.client.card_resolver import parse_agent_card
from a2a.client.client import ClientCallContext
from a2a.types import AgentCard
from a2a.utils.constants import AGENT_CARD_WELL_KNOWN_PATH, TransportProtocol
from google.protobuf.json_format import MessageToDict, ParseError

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.core.limits import EVENT_BYTES
from retinue.core.remote_agents import A2aAgent, AgentReport
from retinue.core.secrets import forget_secret, hide_secret
from retinue.protocol.a2a import EXTENSION
from retinue.protocol.strict_json import InvalidBody, decode_body

CARD_BYTES = 256 * 1024
ANSWER_BYTES = 16 * 1024 * 1024
STREAM_EVENT_BYTES = 4 * EVENT_BYTES
EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")  # an empty line
TOKEN_BYTES = 64 * 1024
TOKEN_MARGIN_SECONDS = 30.0
CARD_SECONDS = 300.0
MOST_SHOWN = 200
MALFORMED = (ParseError, ValueError, TypeError, AttributeError, KeyError, RecursionError)  # raised by the SDK
BINDINGS: list[str] = [TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON]
OTHER_HOST = (
    "the card of {url} sends us to {host}, which is not allowed: "
    "if you trust it, add it to 'allowed_hosts', or give --allow-host"
)


class Unreachable(RetinueError):
    """Raised when the agent cannot be reached now. Nothing of the request was sent."""


class PeerConnection:
    """The connection to an agent. The first use opens the connection; `close` ends it."""

    def __init__(self, agent: A2aAgent) -> None:
        self.agent = agent
        for name in {*agent.auth.variables} - {agent.auth.client_id_env}:
            hide_secret(os.environ.get(name, "").strip())
        self._http: httpx.AsyncClient | None = None
        self._card: AgentCard | None = None
        self.extension: dict[str, Any] | None = None  # the parameters of ours, if the agent is another Retinue
        self._fetched_at = 0.0
        self._token, self._expires_at = "", 0.0
        self._clients: dict[bool, Client] = {}
        self._loading: asyncio.Task[None] | None = None
        self._tasks = TaskOwner(on_error=lambda _: None)  # callers that wait for the card get the exception
        self.commands = TaskOwner(on_error=lambda _: None)  # of runs at the agent; a failed one shows in their streams

    # The card

    async def open(self) -> AgentCard:
        """Return the agent's card from its well-known URL. Raises Unreachable and RetinueError."""
        if self._card is None or time.monotonic() > self._fetched_at + CARD_SECONDS:
            if self._loading is None or self._loading.done():  # concurrent callers share one fetch
                self._loading = self._tasks.start(self._load_card())
            await asyncio.shield(self._loading)
        return self.card

    async def _load_card(self) -> None:
        url = self.agent.url + AGENT_CARD_WELL_KNOWN_PATH
        try:
            data = await self._read_bounded("GET", url, CARD_BYTES, headers=self._make_static_headers())
            card = parse_agent_card(decode_body(data, dict))
            ours = [each for each in card.capabilities.extensions if each.uri == EXTENSION]
            extension = dict(MessageToDict(ours[0].params)) if ours else None
        except InvalidBody as error:
            raise RetinueError(f"the card of {self.agent.url} cannot be read: {error}") from None
        except MALFORMED as error:
            raise RetinueError(f"the card of {self.agent.url} is not an agent card: {_shorten(error)}") from None
        self._check_card(card)
        self._card, self.extension, self._fetched_at = card, extension, time.monotonic()
        self._clients.clear()

    def forget_card(self) -> None:
        """Fetch the card again at the next use, because the agent may have been restarted."""
        self._fetched_at = -CARD_SECONDS

    def _check_card(self, card: AgentCard) -> None:
        usable = [each for each in card.supported_interfaces if each.protocol_binding in BINDINGS]
        if not usable:
            raise RetinueError(f"the agent at {self.agent.url} offers neither JSON-RPC nor REST")
        for each in usable:
            parts = self._split_url(each.url)
            if parts.scheme not in ("http", "https") or parts.netloc.lower() not in self.agent.origins:
                raise RetinueError(OTHER_HOST.format(url=self.agent.url, host=_shorten(parts.netloc or each.url)))
            if parts.scheme == "http" and self.agent.url.startswith("https:"):
                raise RetinueError(f"the card of {self.agent.url} sends us to an address without TLS: {each.url}")

    def _split_url(self, url: str) -> SplitResult:
        """Return the parts of an address in the card."""
        try:
            httpx.URL(url)  # stricter
            return urlsplit(url)
        except (ValueError, httpx.InvalidURL) as error:
            raise RetinueError(f"the card of {self.agent.url} has an invalid address: {_shorten(error)}") from None

    @property
    def card(self) -> AgentCard:
        assert self._card is not None
        return self._card

    async def inspect(self) -> AgentReport:
        """Fetch and check the card, get a token if needed, and return the facts about the agent."""
        card = await self.open()
        await self._make_headers()
        return AgentReport(
            name=_shorten(card.name),
            description=_shorten(card.description),
            version=_shorten(card.version),
            protocols=tuple(
                f"{_shorten(each.protocol_binding)} {_shorten(each.protocol_version)}"
                for each in card.supported_interfaces[:8]
            ),
            is_streaming=card.capabilities.streaming,
            is_retinue=self.extension is not None,
            notes=self._list_notes(card),
        )

    def _list_notes(self, card: AgentCard) -> tuple[str, ...]:
        auth, notes = self.agent.auth, []
        if card.security_requirements and not auth.variables:
            notes.append("the card asks for credentials, and none are configured: give it 'auth'")
        if self.agent.url.startswith("http:") and auth.variables:
            host = urlsplit(self.agent.url).hostname or ""
            if host not in ("localhost", "127.0.0.1", "::1"):
                notes.append("credentials are sent without TLS")
        return tuple(notes)

    # Calls

    async def get_client(self, *, streaming: bool = True) -> Client:
        """Return the SDK's client for the agent. A client without `streaming` is for commands sent during a stream."""
        card = await self.open()
        if streaming not in self._clients:
            config = ClientConfig(
                httpx_client=self._get_http(), streaming=streaming, supported_protocol_bindings=BINDINGS
            )
            try:
                self._clients[streaming] = ClientFactory(config).create(card)
            except ValueError as error:
                raise RetinueError(f"the agent at {self.agent.url} cannot be called: {_shorten(error)}") from None
        return self._clients[streaming]

    async def make_context(self, **more: str) -> ClientCallContext:
        """Return the headers of one call: the credentials, our extension if the agent supports it, and `more`."""
        headers = await self._make_headers()
        if self.extension is not None:
            headers["A2A-Extensions"] = EXTENSION
        return ClientCallContext(service_parameters={**headers, **more})

    def _make_static_headers(self) -> dict[str, str]:
        auth, headers = self.agent.auth, {}
        if auth.bearer_env:
            headers["Authorization"] = f"Bearer {_read_variable(auth.bearer_env)}"
        elif auth.api_key_env:
            headers[auth.api_key_header] = _read_variable(auth.api_key_env)
        return headers

    async def _make_headers(self) -> dict[str, str]:
        if not self.agent.auth.client_id_env:
            return self._make_static_headers()
        if time.monotonic() > self._expires_at:
            await self._fetch_token()
        return {"Authorization": f"Bearer {self._token}"}

    def forget_token(self) -> bool:
        """Get a new token at the next use, because the agent rejects this one. Return False if no flow is configured
        to get one."""
        self._expires_at = 0.0
        return bool(self.agent.auth.client_id_env)

    async def _fetch_token(self) -> None:
        """Get a token by the client-credentials flow. The card alone never decides where the secret is sent."""
        auth = self.agent.auth
        url = auth.token_url or self._find_token_url()
        form = {"grant_type": "client_credentials", **({"scope": " ".join(auth.scopes)} if auth.scopes else {})}
        client = (_read_variable(auth.client_id_env), _read_variable(auth.client_secret_env))
        data = await self._read_bounded("POST", url, TOKEN_BYTES, data=form, auth=client)
        try:
            found = decode_body(data, dict[str, Any])
            token, seconds = found["access_token"], float(found.get("expires_in", 300))
            if not isinstance(token, str) or not token or not token.isprintable():
                raise ValueError("it has no access_token")
        except (InvalidBody, KeyError, ValueError, TypeError) as error:
            raise RetinueError(f"the token of {url} cannot be used: {_shorten(error)}") from None
        forget_secret(self._token)
        hide_secret(token)
        self._token = token
        self._expires_at = time.monotonic() + max(0.0, min(seconds, 86400.0) - TOKEN_MARGIN_SECONDS)

    def _find_token_url(self) -> str:
        for scheme in self.card.security_schemes.values():
            url = scheme.oauth2_security_scheme.flows.client_credentials.token_url
            if url:
                host = self._split_url(url).netloc
                if host.lower() not in self.agent.origins:
                    raise RetinueError(OTHER_HOST.format(url=self.agent.url, host=_shorten(host)))
                return str(url)
        raise RetinueError(f"no token URL for {self.agent.url}: its card has none, so set 'token_url' in 'auth'")

    # HTTP

    def _get_http(self) -> httpx.AsyncClient:
        if self._http is None:
            agent = self.agent
            self._http = httpx.AsyncClient(
                transport=_BoundedTransport(agent.origins),
                timeout=httpx.Timeout(agent.timeout, read=agent.idle_timeout, pool=None),
                headers={"Accept-Encoding": "identity", "User-Agent": "retinue"},
                follow_redirects=False,
                trust_env=False,
            )
        return self._http

    async def _read_bounded(self, method: str, url: str, limit: int, **options: Any) -> bytes:
        seconds = self.agent.timeout  # for each piece, and in all
        try:
            async with (
                asyncio.timeout(seconds),
                self._get_http().stream(method, url, timeout=seconds, **options) as response,
            ):
                status = response.status_code
                if status != 200:
                    kind = Unreachable if status >= 500 or status == 429 else RetinueError  # the agent may be starting
                    raise kind(f"{url} answers with the HTTP status {status}")
                data = bytearray()
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) > limit:
                        raise RetinueError(f"what {url} answers is larger than {limit} bytes")
                return bytes(data)
        except httpx.HTTPError as error:
            raise Unreachable(f"{url} cannot be reached: {_shorten(error) or type(error).__name__}") from None
        except TimeoutError:
            raise Unreachable(f"{url} has not answered within {seconds:g} s") from None

    async def close(self) -> None:
        forget_secret(self._token)
        await self.commands.close()
        await self._tasks.close()
        if self._http is not None:
            await self._http.aclose()


@contextmanager
def refuse_malformed() -> Iterator[None]:
    """Turn the SDK's errors about malformed answers into RetinueError."""
    try:
        yield
    except MALFORMED as error:
        raise RetinueError(f"the agent sends what cannot be read: {_shorten(error)}") from None


def _read_variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise RetinueError(f"the environment variable {name} is not set; this agent needs it")
    return value


def _shorten(text: object) -> str:
    return " ".join(str(text).split())[:MOST_SHOWN]


class _BoundedTransport(httpx.AsyncBaseTransport):
    """A transport that sends requests only to the addresses in `origins`, and limits the responses."""

    def __init__(self, origins: frozenset[str]) -> None:
        trusted = ssl.create_default_context()  # certificates of the system, or of SSL_CERT_FILE
        limits = httpx.Limits(max_connections=None)
        self._inner = httpx.AsyncHTTPTransport(verify=trusted, limits=limits, trust_env=False)
        self._origins = origins

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.netloc.decode().lower() not in self._origins:
            raise httpx.UnsupportedProtocol(f"requests to {request.url.host} are not allowed", request=request)
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx.RemoteProtocolError("the answer is compressed, which was not asked for", request=request)
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return httpx.Response(
            response.status_code,
            headers=response.headers,
            stream=_BoundedStream(response.stream, is_stream=is_stream),
            extensions=response.extensions,
            request=request,
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx.AsyncByteStream):
    """A body of at most `ANSWER_BYTES`, or an event stream with events of at most `STREAM_EVENT_BYTES`."""

    def __init__(self, inner: httpx.AsyncByteStream, *, is_stream: bool) -> None:
        self._inner, self._is_stream = inner, is_stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, limit = 0, STREAM_EVENT_BYTES if self._is_stream else ANSWER_BYTES
        before = b""  # the end of the piece before, which may have half of the mark that ends an event
        async for piece in self._inner:
            data = before + piece
            ends = [at + len(mark) for mark in EVENT_ENDS if (at := data.rfind(mark)) >= 0] if self._is_stream else []
            size = len(data) - max(ends) if ends else size + len(piece)
            if size > limit:
                raise httpx.RemoteProtocolError(f"the agent sends more than {limit} bytes at once")
            before = data[-2:]
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()
