"""Telemetry: a tree's events as OpenTelemetry spans and metrics. Loaded by name, and only when it is asked for."""
