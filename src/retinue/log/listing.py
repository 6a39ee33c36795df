"""Stored trees as lists of runs, for `ps` and `show`. A run without an ending whose process is gone is `interrupted`,
so that no run seems to run forever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from retinue.core.events import RunEnded
from retinue.core.ports import LogReader, OnProblem, StoredTree, ignore_problem
from retinue.log.reading import iterate_events
from retinue.log.runs import Runs, RunView
from retinue.protocol.subagent_tools import INTERRUPTED

LATEST = 10
QUEUED = "queued"


class Listing(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The runs of a stored tree, folded from its events."""

    stored: StoredTree
    runs: Runs

    @property
    def tree(self) -> str:
        return self.stored.tree

    @property
    def live(self) -> bool:
        return self.stored.is_live

    @property
    def ended(self) -> bool:
        """Return True if every run has ended."""
        return all(run.ended is not None for run in self.runs.runs.values())

    def state_of(self, run: RunView) -> str:
        """Return the live state of a run, its status if it has ended, or `interrupted`."""
        return run.state if run.ended is not None or self.live else INTERRUPTED

    def find_queue_position(self, run: RunView) -> int | None:
        """Return the place of a queued run in the queue: 1 for the run that begins next. None for a run
        that does not wait for a slot."""
        if self.state_of(run) != QUEUED:
            return None
        queued = [each.number for each in self.runs.runs.values() if each.state == QUEUED]
        return queued.index(run.number) + 1

    def describe_state(self, run: RunView) -> str:
        """Return the state of a run for a person, with its place in the queue if it waits for a slot."""
        position = self.find_queue_position(run)
        return self.state_of(run) if position is None else f"{QUEUED} #{position}"

    def seconds_of(self, run: RunView, now: float) -> float:
        """Return how long a run took, or has taken until `now`. An interrupted run counts until the newest event of
        its tree."""
        if run.ended is not None:
            return run.ended.duration_ms / 1000
        since = run.spawned_at if run.started_at is None else run.started_at
        until = now if self.live else self.stored.last_at
        return max(0.0, until - since - run.measure_idle(until))

    def list_runs(self) -> list[RunView]:
        """Return all runs: parents before children, siblings in the order they were spawned."""
        primary = self.runs.primary
        return [] if primary is None else list(primary.walk())

    def make_row(self, run: RunView, now: float) -> dict[str, Any]:
        """Return one run as `ps --json` prints it. Fields are only ever added."""
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
            "state": self.state_of(run),
            "queue_position": self.find_queue_position(run),
            "status": run.status,
            "turns": run.turns,
            "tool_count": run.tool_count,
            "usage": msgspec.to_builtins(run.usage),
            "cost": None if run.unpriced else str(run.cost),
            "spawned_at": run.spawned_at,
            "started_at": run.started_at,
            "ended_at": run.ended_at,
            "duration_ms": round(self.seconds_of(run, now) * 1000),
            "task": spawned.task,
            "workspace": spawned.workspace,
            "pid": self.stored.pid if run.ended is None else None,
            "continues": None if spawned.continues is None else f"{spawned.origin or self.tree}/{spawned.continues}",
        }

    def make_result(self, run: RunView, now: float) -> dict[str, Any]:
        """Return the result of a run. A run that has not ended has the same fields as far as they are known, and
        `status` null."""
        if run.ended is not None:
            return run.result(self.tree).to_json()
        unfinished = RunEnded("disconnected", "", round(self.seconds_of(run, now) * 1000), partial=run.last_message)
        return {
            **run.make_result(self.tree, unfinished).to_json(),
            "status": None,
            "state": self.state_of(run),
            "children": [self.make_result(child, now) for child in run.children],
        }


async def load_listing(log: LogReader, tree: str) -> Listing:
    """Fold the events of a stored tree into a `Listing`. Raises NotFound.

    Looks up the writing process before reading, to see an ending written in between.
    """
    stored = await log.read_status(tree)
    runs = Runs(tree)
    async for event in iterate_events(log, tree):
        runs.apply(event)
        if event.seq > stored.last_seq:
            stored = structs.replace(stored, last_at=event.at, last_seq=event.seq)
    for run in await log.read_runs([tree]):
        runs.restore(run)  # in case its events are damaged
    return Listing(stored, runs)


async def load_listings(
    log: LogReader,
    on_problem: OnProblem = ignore_problem,
    *,
    everything: bool = False,
    since: float | None = None,
) -> tuple[list[Listing], int]:
    """List trees, newest first, and return the number of trees left out.

    The default is trees with live runs and the LATEST newest ones; with `since`, trees spawned since then and
    unfinished live ones; with `everything`, all trees, including those reported to another process. The runs have no
    texts.
    """
    latest = None if everything or since is not None else LATEST
    trees = await log.list_trees(on_problem, latest=latest, reported=everything)
    count = len(trees) if latest is None else await log.count_trees(reported=everything)
    if latest is not None:
        known = {stored.tree for stored in trees}
        live = await log.list_trees(ignore_problem, only="live", reported=everything)
        trees += [stored for stored in live if stored.tree not in known]
    elif since is not None:
        trees = [stored for stored in trees if stored.spawned_at >= since or stored.is_at_work]
    return await summarize_trees(log, trees, on_problem), count - len(trees)


async def summarize_trees(
    log: LogReader, trees: Sequence[StoredTree], on_problem: OnProblem = ignore_problem
) -> list[Listing]:
    """List the given trees from the index of the log. Trees that were removed meanwhile are left out."""
    listings = {stored.tree: Listing(stored, Runs(stored.tree)) for stored in trees}
    for each in await log.read_runs(list(listings), on_problem):
        listings[each.first.tree].runs.restore(each)
    return [listing for listing in listings.values() if listing.runs.runs]
