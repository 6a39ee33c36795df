"""Which runs have code mode, and what their programs can call: the tools of MCP servers that the run itself has."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from retinue.core.messages import ToolSpec
from retinue.core.plans import HostTool, Plan
from retinue.core.ports import Tool
from retinue.core.rules import CODE_MODE
from retinue.tools.code_mode import ExecutePython

LENT_BYTES = 2 * 1024 * 1024


def offer(tools: dict[str, Tool], host: Mapping[str, HostTool], *, named: bool) -> None:
    """Gives the tool that runs programs the run's own tools to call. A run that has none of those has no use for it,
    unless its profile names it."""
    if isinstance(tools.get(CODE_MODE), ExecutePython):
        lent = _lent(tools, host)
        if lent or named:
            tools[CODE_MODE] = ExecutePython(lent)
        else:
            del tools[CODE_MODE]


def callable_by_programs(plan: Plan) -> tuple[ToolSpec, ...]:
    return _lent(plan.by_name, plan.host)


def _lent(tools: Mapping[str, Tool], host: Mapping[str, HostTool]) -> tuple[ToolSpec, ...]:
    """As many as a link carries at once; who has more than that has the others still as tools of its own."""
    found, left = [], LENT_BYTES
    for name, tool in tools.items():
        if tool.spec.server and name in host:
            left -= len(msgspec.json.encode(tool.spec))
            found += [tool.spec] if left >= 0 else []
    return tuple(found)
