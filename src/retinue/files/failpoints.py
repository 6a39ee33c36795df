"""Failpoints: places where a process kills itself, so that tests can check crash recovery.

`reach_failpoint` is for the delegation folder. The failpoints of the log are in `log/forwarding_log.py`."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

VARIABLE = "RETINUE_FAILPOINT"
PREFIX = "outbox_"


def reach_failpoint(point: str) -> None:
    """Kill this process if a test has set `RETINUE_FAILPOINT` to this point."""
    if os.environ.get(VARIABLE) == f"{PREFIX}{point}":
        kill_own_process()


def kill_own_process() -> NoReturn:
    """End this process by SIGKILL, as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit  # unreachable: no process survives SIGKILL
