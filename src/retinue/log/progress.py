"""The fold of a tree's events into seed 001's progress: one value when a subagent's tool starts, one when it ends.

Stands on the fold of runs, so its counts are those of the result. Does not know who is told.
"""

from __future__ import annotations

from typing import Any

import msgspec

from retinue.core.events import Event, RunSpawned, ToolCall, ToolResult
from retinue.log.runs import Runs, RunView
from retinue.log.summaries import describe_call

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1


class SubagentProgress(msgspec.Struct, frozen=True):
    """The state of a subagent at the start (`completed` False) or end of one tool call.

    `child_thread_id` is the run as `TREE/N`, `child_root_task_id` the primary above it; `subagent_task_id` is for
    runs that are tasks of another system, which a local one is not."""

    subagent_id: str
    subagent_name: str
    nickname: str | None
    child_thread_id: str
    child_root_task_id: str
    subagent_task_id: str | None
    max_turns: int | None
    current_turn: int
    model: str | None
    tool_name: str
    tool_context: str
    completed: bool
    success: bool
    tool_count: int
    total_tokens: int


class Progress:
    """Progress of one run of a tree, or without `run` of all its subagents. The primary is nobody's subagent."""

    __slots__ = ("_nicknames", "_run", "runs")

    def __init__(self, tree: str, *, run: int | None = None) -> None:
        self._run = run
        self.runs = Runs(tree)
        self._nicknames: dict[int, str | None] = {}

    def apply(self, event: Event) -> SubagentProgress | None:
        """Fold one event; return the progress it means, if any."""
        if event.run == 0 or (self._run is not None and event.run != self._run):
            return None
        body = event.body
        run = self.runs.runs.get(event.run)
        over = run is None or run.ended is not None
        self.runs.apply(event)
        if isinstance(body, RunSpawned) and run is None:
            self._nicknames[event.run] = _read_nickname(body.profile)
        if over or run is None:
            return None
        match body:
            case ToolCall(name=name, args=args):
                return self._make_progress(run, name, describe_call(name, args), completed=False, success=False)
            case ToolResult(name=name, success=success):
                return self._make_progress(run, name, run.tool_logs[-1].context, completed=True, success=success)
        return None

    def _make_progress(
        self, run: RunView, tool: str, about: str, *, completed: bool, success: bool
    ) -> SubagentProgress:
        tree, spawned = self.runs.tree, run.spawned
        return SubagentProgress(
            subagent_id=spawned.subagent_id,
            subagent_name=run.agent,
            nickname=self._nicknames.get(run.number),
            child_thread_id=f"{tree}/{run.number}",
            child_root_task_id=f"{tree}/0",
            subagent_task_id=None,
            max_turns=None if spawned.max_turns is None else min(spawned.max_turns, U32_MAX),
            current_turn=min(run.turns, U32_MAX),
            model=spawned.model or None,
            tool_name=tool,
            tool_context=about,
            completed=completed,
            success=success,
            tool_count=min(run.tool_count, U32_MAX),
            total_tokens=min(run.usage.total_tokens, U64_MAX),
        )


def _read_nickname(profile: msgspec.Raw | dict[str, Any]) -> str | None:
    fields = profile if isinstance(profile, dict) else msgspec.json.decode(profile)
    name = fields.get("nickname") if isinstance(fields, dict) else None
    return name if isinstance(name, str) else None
