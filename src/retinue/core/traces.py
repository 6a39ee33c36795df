"""Trace ids as W3C Trace Context has them: where a tree's trace begins, and which id each span of it has. Pure.

`run.spawned` carries the trace's id and the run's span id. Model calls and tool calls have no ids of their own in the
log: theirs follow from the run's and from the place of their event, so anybody can find them and nobody pays for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

BAGGAGE_BYTES = 8192  # the least that the standard asks a program to pass on, and the most that we do
_BAGGAGE_ENTRY = re.compile(r"(?:^|,)[^,;=]*[^,;=\s][^,;=]*=")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Telemetry:
    """The destination of spans and metrics: providers of OpenTelemetry. None is the one your program has made global;
    when it has made none, one as the OTEL_* variables of the environment say."""

    tracer_provider: Any = None
    meter_provider: Any = None


def traceparent_of(text: str) -> str:
    """Return the `traceparent`, if it is one; anything else counts as none, as the standard wants it."""
    text = text.strip()
    return text if _TRACEPARENT.fullmatch(text) else ""


class TraceOrigin(NamedTuple):
    """The span of another program that a tree belongs to, and the baggage that comes with it, as W3C headers."""

    traceparent: str = ""
    baggage: str = ""


NO_ORIGIN = TraceOrigin()


FindOrigin = Callable[[], TraceOrigin]


def baggage_of(text: str) -> str:
    """Return the `baggage` header, if it can be passed on; anything else counts as none."""
    text = text.strip()
    fits = len(text) <= BAGGAGE_BYTES and text.isascii() and text.isprintable()
    return text if fits and _BAGGAGE_ENTRY.search(text) else ""


def span_id_of(run_span_id: str, seq: int) -> str:
    """Return the span id of what began with the event at this place of the tree's order, in the run with that span
    id."""
    return blake2b(f"{run_span_id}:{seq}".encode(), digest_size=8).hexdigest()
