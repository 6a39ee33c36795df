"""The log in memory. An appended event counts as written at once and is lost with the process. Uses no files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from retinue.core.errors import NotFound
from retinue.core.events import Event, encode_event
from retinue.core.ports import OnProblem, Removal, StoredLine, StoredRun, StoredTree, Unfinished, ignore_problem
from retinue.log.feed import Feed, WatchableLog
from retinue.log.tree_index import TreeRow, list_names, summarize_runs


class MemoryLog(WatchableLog):
    """A log that keeps the events of each tree in a list."""

    ahead = True
    location = "the log in memory"
    cure = "start the process again"

    def __init__(self) -> None:
        super().__init__()
        self._trees: defaultdict[str, list[Event]] = defaultdict(list)
        self._is_open = True

    # Writing

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        self._trees[event.tree].append(event)
        if self._feeds and event.tree in self._feeds:
            self._feeds[event.tree].publish(event)
        return None

    async def claim(self, tree: str) -> None:
        if not self._events(tree):
            raise NotFound(f"there is no tree '{tree}' in {self.location}")

    async def flush(self) -> None:
        pass

    async def close(self) -> None:
        self._is_open = False

    # Reading

    async def list_trees(
        self,
        on_problem: OnProblem = ignore_problem,
        *,
        latest: int | None = None,
        only: Unfinished | None = None,
        reported: bool = True,
    ) -> list[StoredTree]:
        trees = [self._describe_tree(events) for events in self._trees.values()]
        found = [
            stored
            for stored in sorted(trees, key=lambda stored: stored.spawned_at)[::-1]
            if (reported or not stored.is_reported)
            and (only is None or (not stored.ended and stored.is_live is (only == "live")))
        ]
        return found[:latest]

    async def count_trees(self, *, reported: bool = True) -> int:
        return len(await self.list_trees(reported=reported))

    async def read_status(self, tree: str) -> StoredTree:
        events = self._events(tree)
        if not events:
            raise NotFound(f"there is no tree '{tree}' in {self.location}")
        return self._describe_tree(events)

    async def read_runs(self, trees: Sequence[str], on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        return [run for tree in trees for run in summarize_runs(self._events(tree))]

    async def find_runs(self, name: str, on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        runs = await self.read_runs([stored.tree for stored in await self.list_trees()])
        return [run for run in runs if any(each.startswith(name) for each in list_names(run))]

    async def read(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        return self._events(tree)[max(after, 0) :][:limit]

    async def read_lines(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[StoredLine]:
        return [StoredLine(event.seq, encode_event(event)) for event in await self.read(tree, after=after, limit=limit)]

    async def read_kind(
        self, kind: str, on_problem: OnProblem = ignore_problem, *, since: float = 0.0
    ) -> AsyncIterator[Event]:
        for events in list(self._trees.values()):
            for event in list(events):
                if event.kind == kind and event.at >= since:
                    yield event

    async def remove_trees(
        self, trees: Mapping[str, int], *, discard: Callable[[str], Awaitable[bool]], dry_run: bool = False
    ) -> Removal:
        found = [
            tree for tree, last_seq in trees.items() if (events := self._events(tree)) and events[-1].seq == last_seq
        ]
        if self._is_open:
            return Removal(held=[self.location] if found else [])
        removed = [tree for tree in found if await discard(tree)]
        for tree in () if dry_run else removed:
            del self._trees[tree]
        return Removal(removed=removed)

    async def adopt_events(self) -> None:
        pass

    async def check_health(self, on_problem: OnProblem = ignore_problem) -> str:
        count = len(await self.list_trees())
        return f"{count} tree{'' if count == 1 else 's'} in memory" if count else ""

    def _describe_tree(self, events: list[Event]) -> StoredTree:
        row = _fold_row(events)
        return row.describe(self.writer, os.getpid()) if self._is_open else row.describe(None, None)

    async def _make_feed(self, tree: str) -> Feed:
        events = self._events(tree)
        return Feed(_fold_row(events) if events else TreeRow(tree, 0.0))

    async def _read_older(self, tree: str, after: int) -> list[Event]:
        return await self.read(tree, after=after)

    def _events(self, tree: str) -> list[Event]:
        return self._trees.get(tree, [])


def _fold_row(events: list[Event]) -> TreeRow:
    row = TreeRow.begin(events[0])
    for event in events:
        row.apply(event)
    return row
