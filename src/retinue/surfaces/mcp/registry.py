"""The subagents a client can speak of: those of its own tree, those it continued elsewhere, and the project's earlier
ones. Each as an entry of a reply."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.core.errors import NotFound
from retinue.core.messages import RunRef
from retinue.core.ports import Ticket
from retinue.log.archive import Archive
from retinue.log.listing import INTERRUPTED, listing, listings
from retinue.log.lookup import find
from retinue.log.runs import RunView
from retinue.protocol.subagents import status_word
from retinue.supervisor.client_run import NAME, Client
from retinue.supervisor.run import Run
from retinue.supervisor.supervisor import Supervisor

TASK_CHARACTERS = 100
MOST_LISTED = 100


@dataclass(frozen=True)
class Known:
    """One subagent. `node` is there while this process has it in a tree at work; `live` says that some process has."""

    tree: str
    view: RunView
    live: bool
    node: Run | None = None

    @property
    def name(self) -> str:
        return f"{self.tree}/{self.view.number}"

    @property
    def status(self) -> str:
        if self.view.ended is not None:
            return status_word(self.view.result(self.tree))
        return "running" if self.live else INTERRUPTED

    def ticket(self, state: Path) -> Ticket:
        view = self.view
        ref = RunRef(self.tree, view.number, view.path, view.label, view.agent, view.spawned.subagent_id)
        file = state / "runs" / self.tree / str(view.number) / "full_logs" / "status.json"
        status_file = str(file) if self.node is not None or file.exists() else ""
        return Ticket(view.number, ref, view.spawned.workspace, view.spawned.timeout_seconds, status_file)


@dataclass(frozen=True)
class Words:
    """The commands that replies name, which work in any terminal. `command` is how we are called, `project` where."""

    command: str
    project: Path

    def watch(self, name: str) -> str:
        return self._there(f"tail -f {name}")

    def apply(self, name: str) -> str:
        return self._there(f"apply {name}")

    def cancel(self, name: str) -> str:
        return self._there(f"cancel {name}")

    def approve(self, question: int | str) -> str:
        return self._there(f"approve {question}")

    def _there(self, words: str) -> str:
        return f"cd {shlex.quote(str(self.project))} && {self.command} {words}"


def entry(known: Known, words: Words, *, own: bool) -> dict[str, Any]:
    """What a list says of it. `own` says that it is of the client's own tree, where agent:N names it."""
    view = known.view
    spawned = view.spawned
    fields: dict[str, Any] = {
        "subagent_id": spawned.subagent_id,
        "status": known.status,
        "task": spawned.task[:TASK_CHARACTERS],
        "workspace": spawned.workspace,
        "session_id": known.name,
        "continuable": view.ended is not None,
        "subagent_type": view.agent,
        "watch": words.watch(known.name),
    }
    if own:
        fields["agent"] = f"agent:{view.number}"
    if known.status == "running":
        fields |= times(view)
    if view.ended is not None and view.ended.changed_count:
        fields |= {"changed_count": view.ended.changed_count, "apply": words.apply(known.name)}
    return fields


def times(view: RunView) -> dict[str, Any]:
    """How long it has taken, may take, and has left."""
    elapsed = 0.0 if view.started_at is None else max(0.0, time.time() - view.started_at)
    timeout = view.spawned.timeout_seconds
    left = None if timeout is None else round(max(0.0, timeout - elapsed), 1)
    return {"elapsed_seconds": round(elapsed, 1), "timeout_seconds": timeout, "seconds_remaining": left}


class Registry:
    """Finds subagents by what a client calls them."""

    def __init__(self, supervisor: Supervisor, state: Path) -> None:
        self._supervisor = supervisor
        self._archive = Archive(state)

    async def find(self, name: str, top: Client | None, others: dict[str, Run]) -> Known:
        """The subagent of that name: below `top`, among `others`, or in the project's logs; NotFound says what is."""
        if top is not None and (own := _below(top, name)) is not None:
            return _of_node(own)
        if name in others:
            return _of_node(others[name])
        found = await asyncio.to_thread(find, self._archive, name)
        live = self._supervisor.trees.get(found.stored.tree)
        if live is not None and found.run < len(live.runs):
            return _of_node(live.runs[found.run])
        if found.run == 0 and found.stored.first.agent == NAME:
            raise NotFound(f"'{name}' is an MCP client, no subagent; list_subagents says what there is")
        stored = await asyncio.to_thread(listing, self._archive, found.stored)
        return Known(stored.tree, stored.runs.runs[found.run], stored.live)

    async def earlier(self, without: set[str]) -> tuple[list[Known], int]:
        """Those of the project's latest trees that are not named yet, the newest first, and how many more there are."""
        trees, _ = await asyncio.to_thread(listings, self._archive)
        found = [
            Known(tree.tree, view, tree.live)
            for tree in trees
            for view in tree.in_order()
            if f"{tree.tree}/{view.number}" not in without and not (view.number == 0 and view.agent == NAME)
        ]
        return found[:MOST_LISTED], max(0, len(found) - MOST_LISTED)


def own_runs(client: Client) -> Iterator[Known]:
    """All below the client's run, in the order they were made."""
    for node in client.tree.runs[1:] if not client.run.finished else ():
        yield _of_node(node)


def _of_node(node: Run) -> Known:
    return Known(node.ref.tree, node.view, not node.finished, node)


def _below(client: Client, name: str) -> Run | None:
    """The newest run of the client's tree that is called so."""
    if client.run.finished:
        return None
    nodes = client.tree.runs
    number = name.removeprefix("agent:").removeprefix(f"{client.tree.id}/")
    if number.isascii() and number.isdigit() and len(number) < 10:
        return nodes[int(number)] if 0 < int(number) < len(nodes) else None
    for node in reversed(nodes[1:]):
        if name in (node.ref.subagent_id, node.ref.label, node.ref.path):
            return node
    return None
