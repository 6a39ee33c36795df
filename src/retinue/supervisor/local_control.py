"""Control of the trees of this process: the supervisor as every surface sees it.

Turns the commands into calls of the supervisor's parts and hands out run handles. Holds no state of its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.caller import NOBODY, Caller
from retinue.core.context import Context
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
from retinue.core.ports import Order, Receipt, Row
from retinue.core.profiles import Profile, Task
from retinue.core.results import ChangedFile, Result
from retinue.log.runs import Runs, RunView
from retinue.supervisor import apply_changes
from retinue.supervisor.run import Run
from retinue.supervisor.run_services import describe_view
from retinue.supervisor.supervisor import Supervisor

CLIENT_LEFT = "The client has left."


class LocalControl:
    """The commands on one supervisor. Closing it closes the supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        supervisor.attach_control(self)

    # Starting runs

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        await self.supervisor.prepare(profile, say)

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
        if below is not None:
            if limits is not None or narrow is not None:
                raise ConfigError("a run below another one has the limits of its profile: give it no others")
            return self._spawn_below(profile, task, below)
        if self.supervisor.servers is not None:
            await self.supervisor.prepare(profile)
        return self.handle_of(self.supervisor.spawn(profile, task, limits=limits, narrow=narrow, caller=caller))

    def _spawn_below(self, profile: Profile | str, task: Task, below: SpawnBelow) -> RunHandle:
        tree = self.supervisor.trees.get(below.tree)
        parent = None if tree is None else tree.find_run(below.run)
        if tree is None or parent is None:
            raise NotFound(f"no run {below.tree}/{below.run} is at work here")
        order = Order(
            profile,
            task,
            call_id=below.call_id,
            background=below.background,
            queue=below.queue,
            files=below.files,
            asked_by_model=False,
        )
        since = tree.seq
        [ticket] = self.supervisor.spawn_children(tree, parent, [order])
        return self.handle_of(tree.runs[ticket.run], since=since)

    async def open_client(self, options: ClientOptions) -> ClientHandle:
        leaving = asyncio.Event()

        async def stay(task: str, ctx: Context) -> str:
            await leaving.wait()
            return CLIENT_LEFT

        profile = Profile(options.name, call=stay, description=options.description, tools=options.tools)
        caller = self.supervisor.caller if options.caller is NOBODY else options.caller
        if self.supervisor.servers is not None:
            await self.supervisor.prepare(profile)
        node = self.supervisor.spawn(profile, Task(options.task), limits=options.limits, caller=caller.as_client())

        async def leave() -> None:
            leaving.set()
            await node.join()

        return ClientHandle(self, node.ref, leave=leave)

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> RunHandle:
        self.supervisor.open_stored(tree)
        await self.supervisor.prepare()
        return self.handle_of(self.supervisor.resume(tree, overrides))

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        if run != 0:  # a primary is continued in a tree of its own
            self.supervisor.open_stored(tree)
        await self.supervisor.prepare()
        return self.handle_of(self.supervisor.continue_run(tree, run, text, overrides))

    def handle_of(self, node: Run, *, since: int = 0) -> RunHandle:
        """Return the handle of a run. It keeps the run, so that its result stands even if the log lost it."""
        tree = self.supervisor.trees.get(node.ref.tree)
        start = 1 if tree is None else tree.seq
        return RunHandle(self, node.ref, wait=partial(_wait, node), since=since, start_seq=start)

    # Steering runs

    async def send(self, tree: str, run: int, text: str) -> Receipt:
        return await self.supervisor.send(tree, run, text)

    async def cancel(self, tree: str, run: int = 0) -> bool:
        return await self.supervisor.cancel(tree, run)

    async def kill(self, tree: str) -> None:
        self.supervisor.kill(tree)

    async def pending(self, tree: str | None = None) -> list[Approval]:
        return self.supervisor.pending(tree)

    async def answer(self, approval_id: str, decision: Decision, *, by: str, digest: str = "") -> Answered:
        return self.supervisor.answer(approval_id, decision, by=by, digest=digest)

    @asynccontextmanager
    async def attend(self, tree: str | None = None) -> AsyncIterator[None]:
        approvals = self.supervisor.approvals
        approvals.add_attendant(tree)
        try:
            yield
        finally:
            approvals.remove_attendant(tree)

    # Looking

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        node = self._find_live(tree, run)
        if node is not None:
            return await _wait(node)
        view = self._find_view(tree, run)
        if view.ended is None:
            raise ConfigError(f"{tree}/{run} was interrupted: `retinue resume {tree}` resumes it")
        return view.result(tree)

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        node = self._find_live(tree, run)
        if node is not None:
            return node.result() if node.finished else None
        view = self._find_view(tree, run)
        return None if view.ended is None else view.result(tree)

    async def describe_run(self, tree: str, run: int = 0) -> Row:
        return describe_view(self._find_view(tree, run), tree)

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        at_work = self.supervisor.trees
        names = [tree for tree in self.supervisor.log.trees() if tree not in at_work]
        found = [] if live else [_describe(Runs.of(name, self.supervisor.read_stored(name)), None) for name in names]
        found += [_describe(tree.view, os.getpid()) for tree in at_work.values()]
        return sorted(found, key=lambda info: info.runs[0].created_at, reverse=True)

    async def find_run(self, name: str) -> RunRef:
        tree, _, number = name.partition("/")
        run = int(number) if number.isascii() and number.isdigit() else 0
        view = self._find_view(tree, run)
        return RunRef(tree, run, view.path, view.label, view.agent, view.spawned.subagent_id)

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        if tree in self.supervisor.trees:
            return self.supervisor.watch(tree, after=after, deltas=deltas)
        return _replay(self._read(tree), after)

    def _find_live(self, tree: str, run: int) -> Run | None:
        return self.supervisor.trees.find_run(tree, run)

    def _find_view(self, tree: str, run: int) -> RunView:
        live = self.supervisor.trees.get(tree)
        runs = Runs.of(tree, self._read(tree)) if live is None else live.view
        view = runs.runs.get(run)
        if view is None:
            raise NotFound(f"{tree} has no run {run}")
        return view

    def _read(self, tree: str) -> Sequence[Event]:
        events = self.supervisor.read_stored(tree)
        if not events:
            raise NotFound(f"there is no tree '{tree}' in the log")
        return events

    # Changes

    async def changes(self, tree: str, run: int = 0) -> Changes:
        copied = self._find_copied(tree, run, ended=True)
        return await asyncio.to_thread(apply_changes.describe, copied)

    async def diff(self, tree: str, run: int = 0) -> str:
        copied, node = self._find_copied(tree, run, ended=False), self._find_live(tree, run)
        live = node is not None and not node.finished
        shown = await asyncio.to_thread(apply_changes.diff, copied, "-p", "-M", live=live)
        return shown.decode("utf-8", "backslashreplace")

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        return await asyncio.to_thread(apply_changes.take_over, self._find_copied(tree, run, ended=True))

    def _find_copied(self, tree: str, run: int, *, ended: bool) -> apply_changes.Copied:
        view, node = self._find_view(tree, run), self._find_live(tree, run)
        if ended and node is not None and not node.finished:
            raise RetinueError(f"{view.path} has not ended yet")
        copied = apply_changes.copied(str(self.supervisor.state.folder), tree, run)
        if copied is None:
            raise RetinueError(apply_changes.no_copy(view.path, view.spawned))
        return copied

    async def close(self) -> None:
        await self.supervisor.close()


async def _wait(node: Run) -> Result[Any]:
    if not node.finished:
        await node.join()
    return node.result()


async def _replay(events: Sequence[Event], after: int) -> AsyncGenerator[Event | Delta]:
    """Yield the events of a tree that nobody runs here: what is written of it is all there will be."""
    for event in events:
        if event.seq > after:
            yield event


def _describe(runs: Runs, pid: int | None) -> TreeInfo:
    rows = [describe_view(view, runs.tree) for view in runs.runs.values()]
    return TreeInfo(runs.tree, pid is not None, rows, pid)
