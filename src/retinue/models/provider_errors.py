"""Translation of what a provider's library raises into a ModelError: typed, one line, without keys.

Says which errors are worth another attempt (`transient`); `retries.py` makes the attempts.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

from pydantic_ai.exceptions import (
    ModelAPIError,
    ModelConnectionError,
    ModelHTTPError,
    ModelOverloadedError,
    ModelQuotaExceededError,
    ModelRateLimitError,
    ModelServerError,
    ModelTimeoutError,
    ModelUnavailableError,
    UnexpectedModelBehavior,
)

from retinue.core import secrets
from retinue.core.errors import ModelError, StreamCut
from retinue.core.usage import NO_USAGE, Usage

LONGEST = 500
CUT = "the model's stream ended in the middle of its reply"
NO_ANSWER = "answered with something that is not a model's reply (an empty or HTML body): is the base URL right?"
_TRANSIENT = (ModelRateLimitError, ModelUnavailableError, ModelOverloadedError, ModelServerError)


def convert_error(
    error: Exception,
    *,
    host: str,
    now: float,
    idle_seconds: float,
    usage: Usage = NO_USAGE,
    partial: str = "",
    opened: bool = False,
) -> ModelError:
    """Return the typed error. `opened` says that a reply had begun, so that the rest of it was cut off."""
    known: dict[str, Any] = {"usage": usage, "partial": partial}
    if isinstance(error, ModelHTTPError):
        return ModelError(
            to_one_line(_find_message(error.body) or str(error)),
            status=error.status_code,
            transient=_is_transient(error),
            retry_after=parse_retry_after(error.headers or {}, now=now),
            **known,
        )
    if isinstance(error, ModelTimeoutError) and not _is_connecting(error):
        silence = f"nothing came from {host} for {idle_seconds:g} s"
        if opened:
            return StreamCut(f"{CUT}: {silence}", transient=True, **known)
        return ModelError(silence, transient=True, **known)
    if opened:
        return StreamCut(to_one_line(f"{CUT}: {_find_root_text(error)}"), transient=True, **known)
    if isinstance(error, UnexpectedModelBehavior):
        return ModelError(f"{host} {NO_ANSWER}", transient=True, **known)
    if isinstance(error, ModelConnectionError | OSError):
        untrusted = any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _iter_causes(error))
        return ModelError(
            to_one_line(f"cannot reach {host}: {_find_root_text(error)}"), transient=not untrusted, **known
        )
    transient = isinstance(error, _TRANSIENT) or not isinstance(error, ModelAPIError)
    return ModelError(to_one_line(f"{host}: {_find_root_text(error)}"), transient=transient, **known)


def _is_transient(error: ModelHTTPError) -> bool:
    if isinstance(error, ModelQuotaExceededError) or error.provider_retry_hint is False:
        return False
    return error.status_code == 429 or error.status_code >= 500


def parse_retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Return the seconds a provider wants us to wait, from `retry-after-ms`, or Retry-After as seconds or a date."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) / scale
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        when = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return max(0.0, (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now)


def to_one_line(text: str) -> str:
    """Return the text in one line of bounded length, with everything that looks like a key hidden."""
    secrets.learn_secrets(os.environ)
    text = " ".join(secrets.scrub_text(text).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _find_message(body: object) -> str:
    """Return the provider's message in the body of an error; an empty text if there is none."""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, Mapping) else inner
        return message if isinstance(message, str) else ""
    return body if isinstance(body, str) else ""


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _find_root_text(error: BaseException) -> str:
    """Return the text of the innermost cause that has one; the outer ones only say that something failed."""
    texts = [f"{cause}" for cause in _iter_causes(error) if f"{cause}"]
    return texts[-1] if texts else type(error).__name__


def _is_connecting(error: ModelTimeoutError) -> bool:
    return error.phase in ("pool", "connect")
