"""Trace ids in the format of W3C Trace Context: the origin of a tree's trace, and the id of each span. Pure.

`run.spawned` carries the id of the trace and the span id of the run. The log stores no ids for model calls and tool
calls: theirs are derived from the run's span id and the number of their event, so every reader can compute them and
they cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

BAGGAGE_BYTES = 8192  # the minimum that a program must pass on by the standard, and our maximum
_BAGGAGE_ENTRY = re.compile(r"(?:^|,)[^,;=]*[^,;=\s][^,;=]*=")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Telemetry:
    """The destination of spans and metrics: OpenTelemetry providers. None means the global provider of your program;
    if there is none, a provider configured by the OTEL_* environment variables."""

    tracer_provider: Any = None
    meter_provider: Any = None


def traceparent_of(text: str) -> str:
    """Return `text` if it is a valid `traceparent`, else an empty string, as the standard requires."""
    text = text.strip()
    return text if _TRACEPARENT.fullmatch(text) else ""


class TraceOrigin(NamedTuple):
    """The span of another program that a tree belongs to, and the baggage of the span, as W3C headers."""

    traceparent: str = ""
    baggage: str = ""


NO_ORIGIN = TraceOrigin()


FindOrigin = Callable[[], TraceOrigin]


def baggage_of(text: str) -> str:
    """Return `text` if it is a `baggage` header that can be passed on, else an empty string."""
    text = text.strip()
    fits = len(text) <= BAGGAGE_BYTES and text.isascii() and text.isprintable()
    return text if fits and _BAGGAGE_ENTRY.search(text) else ""


def span_id_of(run_span_id: str, seq: int) -> str:
    """Return the span id of the step that began with event number `seq`, in the run with `run_span_id`."""
    return blake2b(f"{run_span_id}:{seq}".encode(), digest_size=8).hexdigest()
