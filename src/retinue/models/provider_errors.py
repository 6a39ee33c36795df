"""Whatever a provider's library raises as one ModelError: one line, typed, without a key in it.

Knows what is worth asking again (`transient`); does not ask again itself (`retries.py`).
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
_PASSING = (ModelRateLimitError, ModelUnavailableError, ModelOverloadedError, ModelServerError)


def fault_of(
    error: Exception,
    *,
    host: str,
    now: float,
    idle_seconds: float,
    usage: Usage = NO_USAGE,
    partial: str = "",
    opened: bool = False,
) -> ModelError:
    """The typed error. `opened` says that a reply had begun: then what is missing of it was cut off."""
    known: dict[str, Any] = {"usage": usage, "partial": partial}
    if isinstance(error, ModelHTTPError):
        return ModelError(
            one_line(_body_text(error.body) or str(error)),
            status=error.status_code,
            transient=_may_pass(error),
            retry_after=retry_after(error.headers or {}, now=now),
            **known,
        )
    if isinstance(error, ModelTimeoutError) and not _connecting(error):
        silence = f"nothing came from {host} for {idle_seconds:g} s"
        if opened:
            return StreamCut(f"{CUT}: {silence}", transient=True, **known)
        return ModelError(silence, transient=True, **known)
    if opened:
        return StreamCut(one_line(f"{CUT}: {_root_text(error)}"), transient=True, **known)
    if isinstance(error, UnexpectedModelBehavior):
        return ModelError(f"{host} {NO_ANSWER}", transient=True, **known)
    if isinstance(error, ModelConnectionError | OSError):
        untrusted = any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error))
        return ModelError(one_line(f"cannot reach {host}: {_root_text(error)}"), transient=not untrusted, **known)
    transient = isinstance(error, _PASSING) or not isinstance(error, ModelAPIError)
    return ModelError(one_line(f"{host}: {_root_text(error)}"), transient=transient, **known)


def _may_pass(error: ModelHTTPError) -> bool:
    if isinstance(error, ModelQuotaExceededError) or error.provider_retry_hint is False:
        return False
    return error.status_code == 429 or error.status_code >= 500


def retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """The seconds a provider wants us to wait: `retry-after-ms`, or Retry-After as seconds or as a date."""
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


def one_line(text: str) -> str:
    """The text in one line of bounded length, with everything that looks like a key hidden."""
    secrets.learn(os.environ)
    text = " ".join(secrets.scrub(text).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _body_text(body: object) -> str:
    """The provider's own words in the body of an error."""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        words = inner.get("message") if isinstance(inner, Mapping) else inner
        return words if isinstance(words, str) else ""
    return body if isinstance(body, str) else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _root_text(error: BaseException) -> str:
    """What the innermost cause that has words says; the outer ones only say that something failed."""
    texts = [f"{cause}" for cause in _causes(error) if f"{cause}"]
    return texts[-1] if texts else type(error).__name__


def _connecting(error: ModelTimeoutError) -> bool:
    return error.phase in ("pool", "connect")
