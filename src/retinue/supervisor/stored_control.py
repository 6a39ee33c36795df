"""Control of trees without a living process: reads the log, and applies changes. Starts, steers and asks nothing.

`LocalControl` answers from it for every tree that does not run in its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.caller import Caller
from retinue.core.control import (
    NO_OVERRIDES,
    Changes,
    ClientHandle,
    ClientOptions,
    ResumeOverrides,
    RunHandle,
    SpawnBelow,
    TreeInfo,
)
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Receipt, Row
from retinue.core.profiles import Profile, Task
from retinue.core.results import ChangedFile, Result
from retinue.log.runs import Runs, RunView
from retinue.supervisor import apply_changes
from retinue.supervisor.run_services import describe_view

NO_PROCESS = "no process runs this: {what} needs one"
MAX_CANDIDATES = 10


class StoredTrees(Protocol):
    """The log that is read."""

    def read(self, tree: str) -> Sequence[Event]: ...

    def trees(self) -> Sequence[str]: ...


class StoredControl:
    """Control of the trees of a log. `state` is the folder with the workspaces of their runs."""

    def __init__(self, log: StoredTrees, state: str) -> None:
        self._log = log
        self._state = state

    # Looking

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        result = await self.result(tree, run)
        if result is None:
            raise ConfigError(f"{tree}/{run} was interrupted: `retinue resume {tree}` resumes it")
        return result

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        view = self.find_view(tree, run)
        return None if view.ended is None else view.result(tree)

    async def describe_run(self, tree: str, run: int = 0) -> Row:
        return describe_view(self.find_view(tree, run), tree)

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        found = [] if live else [describe_tree(self._fold(tree)) for tree in self._log.trees()]
        return sorted(found, key=lambda info: info.runs[0].created_at, reverse=True)

    async def find_run(self, name: str) -> RunRef:
        return find_named_run(name, [self._fold(tree) for tree in self._log.trees()])

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield what is written: that is all there will be."""
        return _yield_events(self._read(tree), after)

    def find_view(self, tree: str, run: int) -> RunView:
        view = self._fold(tree).runs.get(run)
        if view is None:
            raise NotFound(f"{tree} has no run {run}")
        return view

    def _fold(self, tree: str) -> Runs:
        return Runs.of(tree, self._read(tree))

    def _read(self, tree: str) -> Sequence[Event]:
        events = self._log.read(tree)
        if not events:
            raise NotFound(f"there is no tree '{tree}' in the log")
        return events

    # Changes

    async def changes(self, tree: str, run: int = 0) -> Changes:
        return await asyncio.to_thread(apply_changes.describe, self._find_copied(tree, run))

    async def diff(self, tree: str, run: int = 0, *, live: bool = False) -> str:
        copied = self._find_copied(tree, run)
        shown = await asyncio.to_thread(apply_changes.diff, copied, "-p", "-M", live=live)
        return shown.decode("utf-8", "backslashreplace")

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        return await asyncio.to_thread(apply_changes.take_over, self._find_copied(tree, run))

    def _find_copied(self, tree: str, run: int) -> apply_changes.Copied:
        view = self.find_view(tree, run)
        copied = apply_changes.copied(self._state, tree, run)
        if copied is None:
            raise RetinueError(apply_changes.no_copy(view.path, view.spawned))
        return copied

    # Commands that need a process

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        """Do nothing: no run is started here."""

    async def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        below: SpawnBelow | None = None,
        caller: Caller | None = None,
    ) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="a new run"))

    async def open_client(self, options: ClientOptions) -> ClientHandle:
        raise ConfigError(NO_PROCESS.format(what="a client"))

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="resuming a tree"))

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="continuing a run"))

    async def send(self, tree: str, run: int, text: str) -> Receipt:
        return Receipt("too_late", why="no such run is at work here")

    async def cancel(self, tree: str, run: int = 0) -> bool:
        return False

    async def kill(self, tree: str) -> None:
        """Do nothing: no run is at work here."""

    async def pending(self, tree: str | None = None) -> list[Approval]:
        return []

    async def answer(self, approval_id: str, decision: Decision, *, by: str, digest: str = "") -> Answered:
        return "unknown"

    @asynccontextmanager
    async def attend(self, tree: str | None = None) -> AsyncIterator[None]:
        yield  # nothing asks here

    async def close(self) -> None:
        """Do nothing: the log is read when it is asked for."""


async def _yield_events(events: Sequence[Event], after: int) -> AsyncGenerator[Event | Delta]:
    for event in events:
        if event.seq > after:
            yield event


def describe_tree(view: Runs, *, pid: int | None = None, root: int = 0) -> TreeInfo:
    rows = [describe_view(each, view.tree) for each in view.runs.values()]
    return TreeInfo(tree=view.tree, live=pid is not None, runs=rows, pid=pid, root=root)


def find_named_run(name: str, trees: Sequence[Runs]) -> RunRef:
    """Return the run of that name. Exact names win over prefixes. Raises NotFound, and ConfigError if it could be
    several."""
    runs = [_make_ref(tree.tree, view) for tree in trees for view in tree.runs.values()]
    exact = [ref for ref in runs if name in _names_of(ref)]
    found = exact or [ref for ref in runs if any(each.startswith(name) for each in _names_of(ref))]
    primaries = [ref for ref in found if ref.run == 0 and ref.tree.startswith(name)]
    found = primaries or found  # the beginning of a tree's id means its primary
    if not found:
        raise NotFound(f"no run is called '{name}'")
    if len(found) > 1:
        names = ", ".join(f"{ref.tree}/{ref.run}" for ref in found[:MAX_CANDIDATES])
        raise ConfigError(f"'{name}' could be any of {names}")
    return found[0]


def _names_of(ref: RunRef) -> tuple[str, ...]:
    own = (ref.tree,) if ref.run == 0 else ()
    return (*own, f"{ref.tree}/{ref.run}", ref.path, ref.label, ref.subagent_id)


def _make_ref(tree: str, view: RunView) -> RunRef:
    return RunRef(tree, view.number, view.path, view.label, view.agent, view.spawned.subagent_id)
