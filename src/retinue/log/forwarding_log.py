"""A log around another log. It forwards everything; subclasses override what they want to see or change."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping

from retinue.core.events import Delta, Event
from retinue.core.ports import Log, OnProblem, Removal, StoredLine, StoredTree, TreeStatus, ignore_problem


class ForwardingLog:
    """Closing it closes the log inside."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.ahead = log.ahead

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        return self._log.append(event, wait)

    def appender(self, tree: str) -> Callable[[Event, bool], Awaitable[None] | None]:
        return self.append

    async def claim(self, tree: str) -> None:
        return await self._log.claim(tree)

    def show(self, delta: Delta) -> None:
        self._log.show(delta)

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        return self._log.watch(tree, after=after, deltas=deltas)

    async def close(self) -> None:
        await self._log.close()

    @property
    def location(self) -> str:
        return self._log.location

    async def list_trees(self, on_problem: OnProblem = ignore_problem) -> list[StoredTree]:
        return await self._log.list_trees(on_problem)

    async def find_tree(self, tree: str) -> StoredTree | None:
        return await self._log.find_tree(tree)

    async def read_status(self, tree: str) -> TreeStatus:
        return await self._log.read_status(tree)

    async def read(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        return await self._log.read(tree, after=after, limit=limit)

    async def read_lines(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[StoredLine]:
        return await self._log.read_lines(tree, after=after, limit=limit)

    def read_kind(self, kind: str, on_problem: OnProblem = ignore_problem) -> AsyncIterator[Event]:
        return self._log.read_kind(kind, on_problem)

    async def remove_trees(
        self, trees: Mapping[str, int], *, discard: Callable[[str], bool], dry_run: bool = False
    ) -> Removal:
        return await self._log.remove_trees(trees, discard=discard, dry_run=dry_run)

    async def check_health(self, on_problem: OnProblem = ignore_problem) -> str:
        return await self._log.check_health(on_problem)
