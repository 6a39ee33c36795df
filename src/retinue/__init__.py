"""Retinue: a runtime for subagents. See and approve everything they do, at any depth, and get one clean result each.

General layout: `core` is the vocabulary, `log` keeps what happened, `supervisor` owns the tree of runs, `agent` is the
loop, `runtime` is where runs live, `surfaces` are the ways in and out. The names below are the public face; each is
loaded when it is first used, so that importing retinue costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retinue.core.approvals import Allow, Approval, Deny
    from retinue.core.context import Context
    from retinue.core.control import RunHandle
    from retinue.core.errors import ConfigError, RetinueError, SpawnRefused, ToolError
    from retinue.core.events import Event
    from retinue.core.limits import Limits
    from retinue.core.profiles import Profile, Task
    from retinue.core.results import Result, RunFailed, Status
    from retinue.core.traces import Telemetry
    from retinue.core.usage import Usage
    from retinue.surfaces.library import Retinue, open, run_sync
    from retinue.tools.functions import tool

__version__ = "0.1.0"

_HOMES = {
    "Allow": "core.approvals",
    "Approval": "core.approvals",
    "ConfigError": "core.errors",
    "Context": "core.context",
    "Deny": "core.approvals",
    "Event": "core.events",
    "Limits": "core.limits",
    "Profile": "core.profiles",
    "Result": "core.results",
    "Retinue": "surfaces.library",
    "RetinueError": "core.errors",
    "RunFailed": "core.results",
    "RunHandle": "core.control",
    "SpawnRefused": "core.errors",
    "Status": "core.results",
    "Task": "core.profiles",
    "Telemetry": "core.traces",
    "ToolError": "core.errors",
    "Usage": "core.usage",
    "open": "surfaces.library",
    "run_sync": "surfaces.library",
    "tool": "tools.functions",
}

__all__ = [
    "Allow",
    "Approval",
    "ConfigError",
    "Context",
    "Deny",
    "Event",
    "Limits",
    "Profile",
    "Result",
    "Retinue",
    "RetinueError",
    "RunFailed",
    "RunHandle",
    "SpawnRefused",
    "Status",
    "Task",
    "Telemetry",
    "ToolError",
    "Usage",
    "open",
    "run_sync",
    "tool",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'retinue' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"retinue.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
