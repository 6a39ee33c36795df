"""Points of the delegation folder at which a process kills itself, so that tests can see what a crash leaves."""

from __future__ import annotations

import os
import signal

VARIABLE = "RETINUE_FAILPOINT"
PREFIX = "outbox_"


def reach_failpoint(point: str) -> None:
    """Kill this process if a test has armed this point."""
    if os.environ.get(VARIABLE) == f"{PREFIX}{point}":
        os.kill(os.getpid(), signal.SIGKILL)
