"""Telemetry: whether spans can be sent from here. Whether they are is up to retinue.yaml and the environment."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

from retinue import build
from retinue.surfaces.cli.checkup.check import Check, Look


def checks(_: Look) -> Iterator[Check]:
    providers = importlib.import_module(f"{build.OTEL}.providers")
    if not providers.installed():
        yield Check("telemetry", "ok", f"not installed: {providers.INSTALL}")
        return
    named = "OTEL_EXPORTER_OTLP_ENDPOINT is set" if providers.asked_for(os.environ) else "no collector is named"
    yield Check("telemetry", "ok", f"installed; {named}")
