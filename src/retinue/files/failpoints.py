"""Failpoints of the delegation folder: places where a process kills itself, so that tests can check crash recovery."""

from __future__ import annotations

import os
import signal

VARIABLE = "RETINUE_FAILPOINT"
PREFIX = "outbox_"


def reach_failpoint(point: str) -> None:
    """Kill this process if a test has set `RETINUE_FAILPOINT` to this point."""
    if os.environ.get(VARIABLE) == f"{PREFIX}{point}":
        os.kill(os.getpid(), signal.SIGKILL)
