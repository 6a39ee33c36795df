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
from retinue.supervisor.nodes import Node
from retinue.supervisor.places import row_of
from retinue.supervisor.supervisor import Supervisor

CLIENT_LEFT = "The client has left."


class LocalControl:
    """The commands on one supervisor. Closing it closes the supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        supervisor.control = self

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
        parent = None if tree is None or not 0 <= below.run < len(tree.nodes) else tree.nodes[below.run]
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
        return self.handle_of(tree.nodes[ticket.run], since=since)

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
        await self.supervisor.prepare()
        return self.handle_of(await self.supervisor.resume(tree, overrides))

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        await self.supervisor.prepare()
        return self.handle_of(await self.supervisor.continue_run(tree, run, text, overrides))

    def handle_of(self, node: Node, *, since: int = 0) -> RunHandle:
        """Return the handle of a run. It keeps the run, so that its result stands even if the log lost it."""
        return RunHandle(self, node.ref, wait=partial(_wait, node), since=since)

    # Steering runs

    async def send(self, tree: str, run: int, text: str, *, source: str = "user") -> Receipt:
        return await self.supervisor.send(tree, run, text, source=source)

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
        desk = self.supervisor.desk
        desk.add_attendant(tree)
        try:
            yield
        finally:
            desk.remove_attendant(tree)

    # Looking

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        node = self._find_live(tree, run)
        if node is not None:
            return await _wait(node)
        view = await self._find_view(tree, run)
        if view.ended is None:
            raise ConfigError(f"{tree}/{run} was interrupted: `retinue resume {tree}` resumes it")
        return view.result(tree)

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        node = self._find_live(tree, run)
        if node is not None:
            return node.result() if node.finished else None
        view = await self._find_view(tree, run)
        return None if view.ended is None else view.result(tree)

    async def describe_run(self, tree: str, run: int = 0) -> Row:
        return row_of(await self._find_view(tree, run), tree)

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        log, at_work = self.supervisor.log, self.supervisor.trees
        found = [_describe(tree.runs, os.getpid()) for tree in at_work.values()]
        stored = [] if live else [stored.tree for stored in await log.list_trees() if stored.tree not in at_work]
        for tree in stored:
            status = await log.read_status(tree)
            pid = None if status.ended or status.writer == os.getpid() else status.writer
            found.append(_describe(Runs.of(tree, await log.read(tree)), pid))
        return sorted(found, key=lambda info: info.runs[0].created_at, reverse=True)

    async def find_run(self, name: str) -> RunRef:
        tree, _, number = name.partition("/")
        run = int(number) if number.isascii() and number.isdigit() else 0
        view = await self._find_view(tree, run)
        return RunRef(tree, run, view.path, view.label, view.agent, view.spawned.subagent_id)

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        if tree in self.supervisor.trees:
            return self.supervisor.watch(tree, after=after, deltas=deltas)
        return self._replay(tree, after)

    async def _replay(self, tree: str, after: int) -> AsyncGenerator[Event | Delta]:
        """Yield the events of a tree that nobody runs here: what is written of it is all there will be."""
        for event in await self._read(tree):
            if event.seq > after:
                yield event

    def _find_live(self, tree: str, run: int) -> Node | None:
        found = self.supervisor.trees.get(tree)
        return None if found is None or not 0 <= run < len(found.nodes) else found.nodes[run]

    async def _find_view(self, tree: str, run: int) -> RunView:
        live = self.supervisor.trees.get(tree)
        runs = Runs.of(tree, await self._read(tree)) if live is None else live.runs
        view = runs.runs.get(run)
        if view is None:
            raise NotFound(f"{tree} has no run {run}")
        return view

    async def _read(self, tree: str) -> Sequence[Event]:
        events = await self.supervisor.log.read(tree)
        if not events:
            raise NotFound(f"there is no tree '{tree}' in the log")
        return events

    # Changes

    async def changes(self, tree: str, run: int = 0) -> Changes:
        copied = await self._find_copied(tree, run, ended=True)
        return await asyncio.to_thread(apply_changes.describe, copied)

    async def diff(self, tree: str, run: int = 0) -> str:
        copied, node = await self._find_copied(tree, run, ended=False), self._find_live(tree, run)
        live = node is not None and not node.finished
        shown = await asyncio.to_thread(apply_changes.diff, copied, "-p", "-M", live=live)
        return shown.decode("utf-8", "backslashreplace")

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        return await asyncio.to_thread(apply_changes.take_over, await self._find_copied(tree, run, ended=True))

    async def _find_copied(self, tree: str, run: int, *, ended: bool) -> apply_changes.Copied:
        view, node = await self._find_view(tree, run), self._find_live(tree, run)
        if ended and node is not None and not node.finished:
            raise RetinueError(f"{view.path} has not ended yet")
        copied = apply_changes.copied(str(self.supervisor.state.folder), tree, run)
        if copied is None:
            raise RetinueError(apply_changes.no_copy(view.path, view.spawned))
        return copied

    async def close(self) -> None:
        await self.supervisor.close()


async def _wait(node: Node) -> Result[Any]:
    if not node.finished:
        await node.join()
    return node.result()


def _describe(runs: Runs, pid: int | None) -> TreeInfo:
    rows = [row_of(view, runs.tree) for view in runs.runs.values()]
    return TreeInfo(runs.tree, pid is not None, rows, pid)
