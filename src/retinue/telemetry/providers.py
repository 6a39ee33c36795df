"""Providers of tracers and meters: those of the program, those in a `Telemetry`, or new ones from OTEL_* variables.

New providers send over OTLP/HTTP and are shut down at the end. Providers of the program are only flushed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from retinue.core.errors import ConfigError
from retinue.core.traces import Telemetry
from retinue.installation import make_install_command

_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


@dataclass(frozen=True)
class Providers:
    """A tracer provider and a meter provider.

    The functions in `finish` are called at the end, each in a thread of its own. `where` names the receiver in
    messages to the user."""

    tracers: Any
    meters: Any
    finish: tuple[Callable[[], object], ...]
    where: str = "the program's own exporter"


def is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def make_telemetry_command() -> str:
    return make_install_command("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


def is_requested(environ: Mapping[str, str]) -> bool:
    """Return True if the environment names a collector and the packages for telemetry are installed."""
    named = any(environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))
    return named and not is_disabled(environ) and is_installed()


def is_disabled(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def make_providers(telemetry: Telemetry) -> Providers:
    if telemetry.tracer_provider is not None or telemetry.meter_provider is not None:
        return _use_program_providers(telemetry.tracer_provider, telemetry.meter_provider)
    if not is_installed():
        raise ConfigError(f"telemetry needs a package that is not installed: {make_telemetry_command()}")
    trace = importlib.import_module("opentelemetry.trace")
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return _use_program_providers(None, None)
    return _make_own_providers(os.environ)


def _use_program_providers(tracers: Any, meters: Any) -> Providers:
    tracers = tracers or importlib.import_module("opentelemetry.trace").get_tracer_provider()
    meters = meters or importlib.import_module("opentelemetry.metrics").get_meter_provider()
    return Providers(tracers, meters, tuple(p.force_flush for p in (tracers, meters) if hasattr(p, "force_flush")))


def _make_own_providers(environ: Mapping[str, str]) -> Providers:
    _check_environment(environ)
    trace = importlib.import_module("opentelemetry.sdk.trace")
    metrics = importlib.import_module("opentelemetry.sdk.metrics")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = resources.Resource.create({} if named else {"service.name": "retinue"})
    tracers = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
    if _is_exported(environ, "TRACES"):
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        tracers.add_span_processor(
            importlib.import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter)
        )
    readers = []
    if _is_exported(environ, "METRICS"):
        exported = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        reader = importlib.import_module("opentelemetry.sdk.metrics.export").PeriodicExportingMetricReader
        readers.append(reader(exported.OTLPMetricExporter()))
    meters = metrics.MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)
    where = urlsplit(environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318").netloc.rpartition("@")[2]
    return Providers(tracers, meters, (tracers.shutdown, meters.shutdown), f"the collector at {where}")


def _is_exported(environ: Mapping[str, str], signal: str) -> bool:
    return (environ.get(f"OTEL_{signal}_EXPORTER") or "otlp").strip().lower() == "otlp"


def _check_environment(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for an unsupported OTEL_* variable, before an exporter fails on it."""
    for signal in ("TRACES", "METRICS"):
        name = f"OTEL_{signal}_EXPORTER"
        if environ.get(name, "otlp").strip().lower() not in ("", "otlp", "none"):
            raise ConfigError(f"telemetry: {name}={environ[name]} is not supported; use otlp or none")
    for middle in ("", "TRACES_", "METRICS_"):
        name = f"OTEL_EXPORTER_OTLP_{middle}PROTOCOL"
        if environ.get(name, "").strip().lower() not in ("", "http/protobuf"):
            raise ConfigError(f"telemetry: {name}={environ[name]} is not supported; use http/protobuf")
        name = f"OTEL_EXPORTER_OTLP_{middle}ENDPOINT"
        if not environ.get(name, "http://").strip().startswith(("http://", "https://")):
            raise ConfigError(f"telemetry: {name} must be an http:// or https:// address, got {environ[name]!r}")
