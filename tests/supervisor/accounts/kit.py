"""Models that spend as a test says, and trees that spend at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from retinue import Event
from retinue.core.events import UsageReported
from retinue.core.messages import Model, Reply, Request
from retinue.core.usage import Usage
from retinue.supervisor.budgets import estimate_worst_case
from tests.supervisor.tree.kit import spawn


class Spender:
    """Says what another model says, and spends `times` the worst case."""

    name = "spender"

    def __init__(self, model: Model, *, times: float = 1.0) -> None:
        self._model = model
        self._times = times
        self.largest = self.at_once = self.most_at_once = 0

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        reply = await self._model.complete(request, on_delta)
        self.at_once -= 1
        worst = estimate_worst_case(request, len(msgspec.json.encode(request.tools)), None).tokens
        output = request.max_output_tokens
        usage = Usage(int((worst - output) * self._times), int(output * self._times))
        self.largest = max(self.largest, usage.total_tokens)
        return replace(reply, usage=usage)


def wide_tree(*, turns: int) -> dict[str, Any]:
    """Depth 3: a lead, two halves, ten leaves each, every leaf with so many turns."""
    look = {"tools": [{"name": "list_agents", "args": {}}], "delay": 0.001}
    leaves = [{"task": f"leaf {n}", "subagent_type": "leaf"} for n in range(10)]
    halves = [{"task": side, "subagent_id": side, "subagent_type": "half"} for side in ("left", "right")]
    return {
        "main": [spawn({"task": "lead", "subagent_type": "lead"}), {"text": "end"}],
        "lead": [spawn(*halves), {"text": "lead done"}],
        "half": [spawn(*leaves), {"text": "half done"}],
        "leaf": [look] * (turns - 1) + [{"text": "leaf done", "delay": 0.001}],
    }


def spent(events: list[Event]) -> int:
    return sum(event.body.usage.total_tokens for event in events if isinstance(event.body, UsageReported))
