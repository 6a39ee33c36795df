"""What telemetry has to say for itself, kept off the live screen: its last words become one line at the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_SPEAKERS = ("opentelemetry", "retinue.telemetry")


class Words(logging.Handler):
    """Keeps the first thing that went wrong, since what follows is mostly the same again; our own words go before."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not self.first or record.name == _SPEAKERS[-1]:
            self.first = record.getMessage()


@contextmanager
def overheard() -> Iterator[Words]:
    """While this lasts, what telemetry logs goes nowhere else."""
    words, loggers = Words(), [logging.getLogger(name) for name in _SPEAKERS]
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
