"""Telemetry: a tree's events as OpenTelemetry spans and metrics. Imported by name, only when telemetry is on."""
