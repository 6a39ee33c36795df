"""The subagents that a client can name: those of its own tree, those it continued elsewhere, and the project's earlier
ones. Each is described as an entry of a reply."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.core.errors import NotFound
from retinue.core.messages import RunRef
from retinue.core.ports import Row, Ticket
from retinue.log.listing import INTERRUPTED, load_listing, load_listings
from retinue.log.lookup import read_run_number
from retinue.log.runs import describe_view
from retinue.protocol.subagents import describe_status
from retinue.surfaces.mcp.backend import CLIENT_NAME, Backend

TASK_CHARACTERS = 100
MAX_LISTED = 100


@dataclass(frozen=True)
class KnownRun:
    """One subagent. `is_here` says that this process made or resumed it, `is_live` that some process has it."""

    tree: str
    row: Row
    is_live: bool
    is_here: bool = False

    @property
    def name(self) -> str:
        return f"{self.tree}/{self.row.run}"

    @property
    def has_ended(self) -> bool:
        return self.row.result is not None

    @property
    def status(self) -> str:
        if self.row.result is not None:
            return describe_status(self.row.result)
        return "running" if self.is_live else INTERRUPTED

    def make_ticket(self, state: Path) -> Ticket:
        row = self.row
        ref = RunRef(self.tree, row.run, row.path, row.label, row.agent, row.subagent_id)
        file = state / "runs" / self.tree / str(row.run) / "full_logs" / "status.json"
        status_file = str(file) if self.is_here or file.exists() else ""
        return Ticket(row.run, ref, row.workspace, row.timeout_seconds, status_file)


@dataclass(frozen=True)
class CommandHints:
    """The commands that replies name. They work in any terminal. `command` is how the user calls us."""

    command: str
    project: Path

    def watch(self, name: str) -> str:
        return self._make_line(f"tail -f {name}")

    def apply(self, name: str) -> str:
        return self._make_line(f"apply {name}")

    def cancel(self, name: str) -> str:
        return self._make_line(f"cancel {name}")

    def approve(self, question: int | str) -> str:
        return self._make_line(f"approve {question}")

    def _make_line(self, words: str) -> str:
        return f"cd {shlex.quote(str(self.project))} && {self.command} {words}"


def describe_run(known: KnownRun, hints: CommandHints, *, own_tree: bool) -> dict[str, Any]:
    """Make the entry of a list. In the client's own tree `agent:N` names a run."""
    row = known.row
    fields: dict[str, Any] = {
        "subagent_id": row.subagent_id,
        "status": known.status,
        "task": row.task[:TASK_CHARACTERS],
        "workspace": row.workspace,
        "session_id": known.name,
        "continuable": known.has_ended,
        "subagent_type": row.agent,
        "watch": hints.watch(known.name),
    }
    if own_tree:
        fields["agent"] = f"agent:{row.run}"
    if known.status == "running":
        fields |= _describe_times(row)
    if row.result is not None and row.result.changed_count:
        fields |= {"changed_count": row.result.changed_count, "apply": hints.apply(known.name)}
    return fields


def _describe_times(row: Row) -> dict[str, Any]:
    elapsed = 0.0 if row.started_at is None else max(0.0, time.time() - row.started_at)
    timeout = row.timeout_seconds
    left = None if timeout is None else round(max(0.0, timeout - elapsed), 1)
    return {"elapsed_seconds": round(elapsed, 1), "timeout_seconds": timeout, "seconds_remaining": left}


class RunRegistry:
    """Finds subagents by the names that clients give."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def find_run(self, name: str, client: str | None, others: Mapping[str, KnownRun]) -> KnownRun:
        """Find a subagent in the tree of a `client`, among `others`, or in the project's logs. Raises NotFound."""
        if client is not None:
            own = _find_row(await self.list_below(client), client, name)
            if own is not None:
                return own
        if name in others:
            return others[name]
        found = await self._backend.control.find_run(name)
        for row in await self._backend.list_live_runs(found.tree):
            if row.run == found.run:
                return KnownRun(found.tree, row, is_live=True, is_here=True)
        if found.run == 0 and found.agent == CLIENT_NAME:
            raise NotFound(f"'{name}' is an MCP client, no subagent; list_subagents says what there is")
        stored = await load_listing(self._backend.log, found.tree)
        return KnownRun(stored.tree, describe_view(stored.runs.runs[found.run], stored.tree), stored.live)

    async def list_below(self, client: str) -> list[KnownRun]:
        """Return all runs of a client's tree but its own, in the order they were made; none after it has left."""
        rows = await self._backend.list_live_runs(client)
        return [KnownRun(client, row, is_live=True, is_here=True) for row in rows if row.run != 0]

    async def list_earlier_runs(self, known: set[str]) -> tuple[list[KnownRun], int]:
        """Return the newest runs of the project but for those `known`, and how many more there are."""
        trees, _ = await load_listings(self._backend.log)
        found = [
            KnownRun(tree.tree, describe_view(view, tree.tree), tree.live)
            for tree in trees
            for view in tree.list_runs()
            if f"{tree.tree}/{view.number}" not in known and not (view.number == 0 and view.agent == CLIENT_NAME)
        ]
        return found[:MAX_LISTED], max(0, len(found) - MAX_LISTED)


def _find_row(runs: list[KnownRun], tree: str, name: str) -> KnownRun | None:
    """Return the newest run of a tree with that name or number."""
    number = name.removeprefix("agent:").removeprefix(f"{tree}/")
    if (wanted := read_run_number(number)) is not None:
        return next((run for run in runs if run.row.run == wanted), None)
    for run in reversed(runs):
        if name in (run.row.subagent_id, run.row.label, run.row.path):
            return run
    return None
