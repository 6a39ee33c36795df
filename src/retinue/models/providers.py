"""A provider's model behind our port: one adapter over `pydantic_ai.direct`, for every provider that library knows.

Built by `build/models.py`, which loads this module only when a run wants such a model: it takes seconds to import.
Retries are not made here (the SDKs' own are off); keys and base URLs are read by the SDKs from their own environment
variables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast
from urllib.parse import urlsplit

import httpx2
import msgspec
from pydantic_ai.direct import model_request_stream
from pydantic_ai.exceptions import AgentRunError, UserError
from pydantic_ai.messages import (
    ModelMessage,
    ModelResponse,
    ModelResponseStreamEvent,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
)
from pydantic_ai.models import StreamedResponse, infer_model
from pydantic_ai.native_tools import WebSearchTool
from pydantic_ai.settings import ModelSettings

from retinue.core.errors import CallCancelled, ConfigError, ModelError, NotFound, StreamCut
from retinue.core.messages import Reply, Request
from retinue.core.ports import Clock
from retinue.core.usage import NO_USAGE, Usage
from retinue.models.provider_errors import CUT, fault_of, one_line
from retinue.models.provider_messages import messages_of, parameters_of, reply_of, usage_of

IDLE_SECONDS = 120.0
KEY_HEADER = "Idempotency-Key"
CHARACTERS_PER_TOKEN = 4
MOST_PAUSES = 16
PAUSED = "suspended"  # a provider that searches for long lets us ask it to go on
_FAILURES = (AgentRunError, httpx2.HTTPError, httpx2.StreamError, ValueError, OSError)


class ProviderModel:
    """One model of one provider. Owns its connections: `aclose` ends them."""

    def __init__(
        self,
        name: str,
        *,
        clock: Clock,
        idle_seconds: float = IDLE_SECONDS,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._clock = clock
        self._idle = idle_seconds
        self._model = _infer(name)
        self._host = urlsplit(self._model.base_url or "").netloc.rpartition("@")[2] or name
        own: dict[str, Any] = {"timeout": idle_seconds, "max_retries": 0, "cache": True}
        if name.startswith("openai"):
            own["openai_store"] = False  # the thread is in our log; the provider need not keep it too
            own["openai_include_web_search_sources"] = True
        self._settings = cast("ModelSettings", own | dict(settings or {}))
        self._entered = False

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        if not self._entered:
            self._entered = True
            await self._model.__aenter__()
        messages = messages_of(request.system, request.thread, provider=self._model.system)
        response = await self._respond(request, messages, on_delta, key=request.key)
        for part in range(1, MOST_PAUSES):
            if response.state != PAUSED:
                break
            try:
                key = f"{request.key}-{part}"
                following = await self._respond(request, [*messages, response], on_delta, key=key)
            except (ModelError, CallCancelled) as error:
                error.usage = usage_of(response.usage) + error.usage
                raise
            except asyncio.CancelledError:
                raise CallCancelled(usage_of(response.usage), estimated=False) from None
            response = _joined(response, following)
        if response.state == PAUSED:
            words = f"{self._host} paused {MOST_PAUSES} times in one reply"
            raise ModelError(words, usage=usage_of(response.usage))
        return reply_of(response)

    async def _respond(
        self, request: Request, messages: list[ModelMessage], on_delta: Callable[[str, str], None], *, key: str
    ) -> ModelResponse:
        """One response, whole: it may be a part of a reply in which the provider pauses."""
        stream: StreamedResponse | None = None
        try:
            async with model_request_stream(
                self._model,
                messages,
                model_settings=self._settings_for(request, key),
                model_request_parameters=parameters_of(request.tools),
                instrument=False,
            ) as stream:
                async for event in stream:
                    _show(event, on_delta)
                response = stream.get()
        except asyncio.CancelledError:
            if stream is None:
                raise
            raise CallCancelled(_known_usage(stream, request), estimated=True, partial=_text(stream)) from None
        except _FAILURES as error:
            raise self._fault(error, stream) from error
        if not _is_whole(response):
            raise StreamCut(CUT, usage=usage_of(response.usage), partial=_text(stream), transient=True)
        if response.finish_reason == "error":
            words = f"{self._host} says that it failed"
            raise ModelError(words, usage=usage_of(response.usage), partial=_text(stream), transient=True)
        return response

    def _settings_for(self, request: Request, key: str) -> ModelSettings:
        headers = {**(self._settings.get("extra_headers") or {}), KEY_HEADER: key}
        return {**self._settings, "max_tokens": request.max_output_tokens, "extra_headers": headers}

    def searches(self, *, domains: bool) -> bool:
        """Whether the provider searches the web by itself for this model; with `domains`, only where it is told to."""
        asked = WebSearchTool(allowed_domains=["example.com"] if domains else None)
        offered = WebSearchTool in self._model.profile.get("supported_native_tools", ())
        return offered and not self._model.unsupported_native_tool_settings(asked)

    async def aclose(self) -> None:
        """Ends the connections; the next call would open new ones."""
        if self._entered:
            self._entered = False
            await self._model.__aexit__(None, None, None)

    def _fault(self, error: Exception, stream: StreamedResponse | None) -> Exception:
        begun = stream is not None and stream.provider_response_id is not None
        return fault_of(
            error,
            host=self._host,
            now=self._clock.wall(),
            idle_seconds=self._idle,
            usage=NO_USAGE if stream is None else usage_of(stream.usage),
            partial=_text(stream),
            opened=begun or bool(_text(stream)),
        )


def _infer(name: str) -> Any:
    try:
        return infer_model(name)
    except UserError as error:
        words = str(error)
        if words.startswith("Unknown model"):
            raise NotFound(f"unknown model {name!r}{words.partition(name)[2].rstrip('.')}") from None
        words = words.partition(" or pass it")[0].partition(" If you")[0]  # what follows is for programmers
        raise ConfigError(one_line(f"model {name!r}: {words}")) from None
    except ImportError as error:
        raise ConfigError(one_line(f"model {name!r}: {error}")) from None


def _show(event: ModelResponseStreamEvent, on_delta: Callable[[str, str], None]) -> None:
    """Passes text and thinking on as they arrive; calls are shown when they are whole."""
    match event:
        case PartStartEvent(part=TextPart(content=text)) | PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
            kind = "text"
        case PartStartEvent(part=ThinkingPart(content=text)):
            kind = "thinking"
        case PartDeltaEvent(delta=ThinkingPartDelta(content_delta=str() as text)):
            kind = "thinking"
        case _:
            return
    if text:
        on_delta(kind, text)


def _is_whole(response: ModelResponse) -> bool:
    """Whether the provider itself said that it is done: the library's own finish reason may be a guess."""
    details = response.provider_details or {}
    return response.state in ("complete", PAUSED) and bool(details.get("finish_reason") or details.get("refusal"))


def _joined(paused: ModelResponse, following: ModelResponse) -> ModelResponse:
    """One reply of what came before the provider paused and of what came then."""
    return replace(following, parts=[*paused.parts, *following.parts], usage=paused.usage + following.usage)


def _known_usage(stream: StreamedResponse, request: Request) -> Usage:
    """What a call that was broken off has cost: what the provider said by then, and for what it tells only at the end
    an estimate from the characters that were sent and came."""
    said = usage_of(stream.usage)
    sent = len(request.system) + sum(len(turn.text) for turn in request.thread)
    came = sum(len(str(getattr(part, "content", "") or getattr(part, "args", ""))) for part in stream.get().parts)
    return msgspec.structs.replace(
        said,
        input_tokens=said.input_tokens or sent // CHARACTERS_PER_TOKEN,
        output_tokens=max(said.output_tokens, came // CHARACTERS_PER_TOKEN),
    )


def _text(stream: StreamedResponse | None) -> str:
    if stream is None:
        return ""
    return "".join(part.content for part in stream.get().parts if isinstance(part, TextPart))
