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
from retinue.core.ports import Ticket
from retinue.log.listing import INTERRUPTED, load_listing, load_listings
from retinue.log.lookup import find_run
from retinue.log.runs import RunView
from retinue.protocol.subagents import status_word
from retinue.surfaces.mcp.backend import CLIENT_NAME, Backend, ClientRun, LiveRun

TASK_CHARACTERS = 100
MAX_LISTED = 100
_MAX_DIGITS = 9


@dataclass(frozen=True)
class KnownRun:
    """One subagent. `run` is there while this process has it; `is_live` says that some process does."""

    tree: str
    view: RunView
    is_live: bool
    run: LiveRun | None = None

    @classmethod
    def of(cls, run: LiveRun) -> KnownRun:
        return cls(run.ref.tree, run.view, run.is_at_work, run)

    @property
    def name(self) -> str:
        return f"{self.tree}/{self.view.number}"

    @property
    def has_ended(self) -> bool:
        return self.view.ended is not None

    @property
    def status(self) -> str:
        if self.has_ended:
            return status_word(self.view.result(self.tree))
        return "running" if self.is_live else INTERRUPTED

    def make_ticket(self, state: Path) -> Ticket:
        view = self.view
        ref = RunRef(self.tree, view.number, view.path, view.label, view.agent, view.spawned.subagent_id)
        file = state / "runs" / self.tree / str(view.number) / "full_logs" / "status.json"
        status_file = str(file) if self.run is not None or file.exists() else ""
        return Ticket(view.number, ref, view.spawned.workspace, view.spawned.timeout_seconds, status_file)


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
    view = known.view
    spawned = view.spawned
    fields: dict[str, Any] = {
        "subagent_id": spawned.subagent_id,
        "status": known.status,
        "task": spawned.task[:TASK_CHARACTERS],
        "workspace": spawned.workspace,
        "session_id": known.name,
        "continuable": known.has_ended,
        "subagent_type": view.agent,
        "watch": hints.watch(known.name),
    }
    if own_tree:
        fields["agent"] = f"agent:{view.number}"
    if known.status == "running":
        fields |= _describe_times(view)
    if view.ended is not None and view.ended.changed_count:
        fields |= {"changed_count": view.ended.changed_count, "apply": hints.apply(known.name)}
    return fields


def _describe_times(view: RunView) -> dict[str, Any]:
    elapsed = 0.0 if view.started_at is None else max(0.0, time.time() - view.started_at)
    timeout = view.spawned.timeout_seconds
    left = None if timeout is None else round(max(0.0, timeout - elapsed), 1)
    return {"elapsed_seconds": round(elapsed, 1), "timeout_seconds": timeout, "seconds_remaining": left}


class RunRegistry:
    """Finds subagents by the names that clients give."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def find_run(self, name: str, client: ClientRun | None, others: Mapping[str, LiveRun]) -> KnownRun:
        """Find a subagent below `client`, among `others`, or in the project's logs. Raises NotFound."""
        if client is not None and (own := _find_below(client, name)) is not None:
            return KnownRun.of(own)
        if name in others:
            return KnownRun.of(others[name])
        found = await find_run(self._backend.log, name)
        live = self._backend.find_live_run(found.tree, found.run)
        if live is not None:
            return KnownRun.of(live)
        if found.run == 0 and found.agent == CLIENT_NAME:
            raise NotFound(f"'{name}' is an MCP client, no subagent; list_subagents says what there is")
        stored = await load_listing(self._backend.log, found.tree)
        return KnownRun(stored.tree, stored.runs.runs[found.run], stored.live)

    async def list_earlier_runs(self, known: set[str]) -> tuple[list[KnownRun], int]:
        """Return the newest runs of the project but for those `known`, and how many more there are."""
        trees, _ = await load_listings(self._backend.log)
        found = [
            KnownRun(tree.tree, view, tree.live)
            for tree in trees
            for view in tree.list_runs()
            if f"{tree.tree}/{view.number}" not in known and not (view.number == 0 and view.agent == CLIENT_NAME)
        ]
        return found[:MAX_LISTED], max(0, len(found) - MAX_LISTED)


def _find_below(client: ClientRun, name: str) -> LiveRun | None:
    """Return the newest run of the client's tree with that name or number."""
    runs = client.list_runs()
    number = name.removeprefix("agent:").removeprefix(f"{client.tree}/")
    if number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS:
        return runs[int(number) - 1] if 0 < int(number) <= len(runs) else None
    for run in reversed(runs):
        if name in (run.ref.subagent_id, run.ref.label, run.ref.path):
            return run
    return None
