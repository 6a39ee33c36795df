"""Trees of an archive as lists of runs: what `ps` and `show` say. A run without an ending whose process is gone is
`interrupted`, so that nothing seems to run for ever."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from retinue.core.events import RunResumed
from retinue.log.archive import Archive, Stored
from retinue.log.runs import Runs, RunView

INTERRUPTED = "interrupted"
LATEST = 10


@dataclass(frozen=True)
class Listing:
    """One tree as its events tell it, whether somebody (`pid`) still writes it, and when it was last heard of."""

    stored: Stored
    runs: Runs
    live: bool
    last_at: float
    pid: int | None = None
    last_seq: int = 0
    away: dict[int, float] = field(default_factory=dict)  # seconds in which no process had the run, by its number

    @property
    def tree(self) -> str:
        return self.stored.tree

    @property
    def ended(self) -> bool:
        """Whether every run has its ending."""
        return all(run.ended is not None for run in self.runs.runs.values())

    def state(self, run: RunView) -> str:
        """The live state, the status of its ending, or that it never got one."""
        return run.state if run.ended is not None or self.live else INTERRUPTED

    def seconds(self, run: RunView, now: float) -> float:
        """How long it took, or has taken until now; of an interrupted one, until the last that is known of its tree."""
        if run.ended is not None:
            return run.ended.duration_ms / 1000
        since = run.spawned_at if run.started_at is None else run.started_at
        return max(0.0, (now if self.live else self.last_at) - since - self.away.get(run.number, 0.0))

    def in_order(self) -> list[RunView]:
        """Parents before children, siblings in the order they were made."""
        primary = self.runs.primary
        return [] if primary is None else list(primary.walk())

    def row(self, run: RunView, now: float) -> dict[str, Any]:
        """One run as `ps --json` prints it. Fields are only ever added."""
        spawned = run.spawned
        return {
            "tree": self.tree,
            "run": run.number,
            "parent": spawned.parent,
            "depth": spawned.depth,
            "path": run.path,
            "label": run.label,
            "agent": run.agent,
            "subagent_id": spawned.subagent_id,
            "state": self.state(run),
            "status": run.status,
            "turns": run.turns,
            "tool_count": run.tool_count,
            "usage": msgspec.to_builtins(run.usage),
            "cost": None if run.unpriced else str(run.cost),
            "spawned_at": run.spawned_at,
            "started_at": run.started_at,
            "ended_at": run.ended_at,
            "duration_ms": round(self.seconds(run, now) * 1000),
            "task": spawned.task,
            "workspace": spawned.workspace,
            "pid": self.pid if run.ended is None else None,
            "continues": None if spawned.continues is None else f"{spawned.origin or self.tree}/{spawned.continues}",
        }

    def result(self, run: RunView, now: float) -> dict[str, Any]:
        """The result of an ended run; for others the same fields, as far as they are known."""
        if run.ended is not None:
            return run.result(self.tree).to_json()
        return {
            "name": run.agent,
            "final_response": "",
            "total_turns": run.turns,
            "tool_count": run.tool_count,
            "tool_logs": [msgspec.to_builtins(line) for line in run.tool_logs],
            "usage": msgspec.to_builtins(run.usage),
            "cost": None if run.unpriced else str(run.cost),
            "success": False,
            "duration_ms": round(self.seconds(run, now) * 1000),
            "status": None,
            "state": self.state(run),
            "tree": self.tree,
            "run": run.number,
            "path": run.path,
            "label": run.label,
            "subagent_id": run.spawned.subagent_id,
            "workspace": run.spawned.workspace,
            "structured": None,
            "partial": run.last_message,
            "children": [self.result(child, now) for child in run.children],
        }


def listing(archive: Archive, stored: Stored) -> Listing:
    """Asks whether it is live before reading, so that an ending written in between is seen."""
    pid = archive.process(stored)
    runs, last_at, last_seq = Runs(stored.tree), stored.at, 0
    away: dict[int, float] = {}
    gone_at = last_at
    for event in archive.events(stored):
        runs.apply(event)
        if isinstance(event.body, RunResumed):  # runs that are resumed together say so in a row
            away[event.run] = away.get(event.run, 0.0) + max(0.0, event.at - gone_at)
        else:
            gone_at = event.at
        last_at, last_seq = event.at, event.seq
    return Listing(stored, runs, pid is not None, last_at, pid, last_seq, away)


def listings(archive: Archive, *, everything: bool = False, since: float | None = None) -> tuple[list[Listing], int]:
    """Trees with live runs and the latest ones (or all since a time), newest first; and how many are left out. Those
    that another process shows are only among everything."""
    trees = [stored for stored in archive.trees() if everything or not stored.reported]
    chosen = [
        stored
        for place, stored in enumerate(trees)
        if (stored.at >= since if since is not None else everything or place < LATEST)
        or (archive.is_live(stored) and not archive.has_ended(stored))
    ]
    return [listing(archive, stored) for stored in chosen], len(trees) - len(chosen)
