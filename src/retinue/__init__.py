"""Retinue: a runtime for subagents. See and approve everything they do, at any depth, and get one clean result each.

Layout: `core` has the vocabulary, `log` stores events, `supervisor` owns trees of runs, `agent` is the loop, `sandbox`
is where file and shell tools execute, `surfaces` are the ways in and out. The names below are the public API. Each is
imported on first use, so that `import retinue` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retinue import events, models
    from retinue.build.project import load_profile
    from retinue.core.approvals import Allow, Approval, Deny
    from retinue.core.context import Context
    from retinue.core.control import RunHandle
    from retinue.core.errors import ConfigError, RetinueError, SpawnRefused, ToolError
    from retinue.core.events import Event, EventBody
    from retinue.core.limits import Limits
    from retinue.core.ports import Approver
    from retinue.core.profiles import Profile, Task, Team
    from retinue.core.results import Result, RunFailed, Status
    from retinue.core.rounds import Criterion, Rounds
    from retinue.core.teams import Member
    from retinue.core.traces import Telemetry
    from retinue.core.usage import Usage
    from retinue.surfaces.library import OpenOptions, Retinue, open, run_sync
    from retinue.tools.functions import tool

__version__ = "0.1.0"

_HOMES = {
    "Allow": "core.approvals",
    "Approval": "core.approvals",
    "Approver": "core.ports",
    "ConfigError": "core.errors",
    "Context": "core.context",
    "Criterion": "core.rounds",
    "Deny": "core.approvals",
    "Event": "core.events",
    "EventBody": "core.events",
    "Limits": "core.limits",
    "Member": "core.teams",
    "OpenOptions": "surfaces.library",
    "Profile": "core.profiles",
    "Result": "core.results",
    "Retinue": "surfaces.library",
    "RetinueError": "core.errors",
    "Rounds": "core.rounds",
    "RunFailed": "core.results",
    "RunHandle": "core.control",
    "SpawnRefused": "core.errors",
    "Status": "core.results",
    "Task": "core.profiles",
    "Team": "core.profiles",
    "Telemetry": "core.traces",
    "ToolError": "core.errors",
    "Usage": "core.usage",
    "load_profile": "build.project",
    "open": "surfaces.library",
    "run_sync": "surfaces.library",
    "tool": "tools.functions",
}
_MODULES = ("events", "models")

__all__ = [
    "Allow",
    "Approval",
    "Approver",
    "ConfigError",
    "Context",
    "Criterion",
    "Deny",
    "Event",
    "EventBody",
    "Limits",
    "Member",
    "OpenOptions",
    "Profile",
    "Result",
    "Retinue",
    "RetinueError",
    "Rounds",
    "RunFailed",
    "RunHandle",
    "SpawnRefused",
    "Status",
    "Task",
    "Team",
    "Telemetry",
    "ToolError",
    "Usage",
    "events",
    "load_profile",
    "models",
    "open",
    "run_sync",
    "tool",
]


if not TYPE_CHECKING:  # type checkers use the imports above, and so reject unknown names

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"retinue.{name}")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'retinue' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"retinue.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
