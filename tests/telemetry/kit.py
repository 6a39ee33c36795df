"""OpenTelemetry's own in-memory exporters, and a collector on loopback that records its requests."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from retinue import Telemetry
from tests.http.loopback import LoopbackServer


class Memory:
    """Providers that keep all spans and metrics."""

    def __init__(self, **options: Any) -> None:
        self._spans = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False, **options)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.telemetry = Telemetry(self.tracers, self.meters)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._spans.get_finished_spans()

    def span(self, name: str, run: int | None = None, **attributes: Any) -> ReadableSpan:
        """Return the only span of this name, run and attributes."""
        wanted = {name.replace("__", "."): value for name, value in attributes.items()}
        if run is not None:
            wanted["retinue.run"] = run
        [span] = [s for s in self.spans if s.name == name and wanted.items() <= dict(s.attributes or {}).items()]
        return span

    def points(self, metric: str) -> list[tuple[dict[str, Any], Any]]:
        """Return the attributes and the value, or the sum, of each data point of the metric."""
        data = self._reader.get_metrics_data()
        found = []
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for each in scope.metrics:
                    if each.name == metric:
                        found += [
                            (dict(p.attributes), getattr(p, "value", None) or p.sum) for p in each.data.data_points
                        ]
        return found


def ids(span: ReadableSpan) -> tuple[str, str]:
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def parent(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def links(span: ReadableSpan) -> list[str]:
    return [f"{link.context.span_id:016x}" for link in span.links]


class Collector(LoopbackServer):
    """A collector of OTLP over HTTP. With `hangs` it accepts a request and never answers."""

    def __init__(self, *, hangs: bool = False) -> None:
        super().__init__()
        self.hangs = hangs
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers["content-length"]))
            if self.hangs:
                await asyncio.get_running_loop().create_future()
            self._take(head[0], gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()

    def _take(self, line: str, body: bytes) -> None:
        if "/v1/traces" in line:
            self.traces.append(ExportTraceServiceRequest.FromString(body))
        else:
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))

    @property
    def spans(self) -> list[Any]:
        return [s for t in self.traces for r in t.resource_spans for scope in r.scope_spans for s in scope.spans]
