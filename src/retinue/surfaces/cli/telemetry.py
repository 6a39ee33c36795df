"""Warnings of telemetry, kept off the live screen: the first one becomes a line at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_SPEAKERS = ("opentelemetry", "retinue.telemetry")


class TelemetryWarnings(logging.Handler):
    """A log handler that keeps the first warning, since later ones mostly repeat it; ours go before the library's."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first or record.name == _SPEAKERS[-1]:
            self.first = record.getMessage()


@contextmanager
def catch_telemetry_warnings() -> Iterator[TelemetryWarnings]:
    """Catch what telemetry logs meanwhile."""
    words, loggers = TelemetryWarnings(), [logging.getLogger(name) for name in _SPEAKERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(words)
    try:
        yield words
    finally:
        for logger, propagated in zip(loggers, before, strict=True):
            logger.removeHandler(words)
            logger.propagate = propagated
