"""A sandbox around another one: makes a run's copied workspace when a call first needs it, and looks at what the run
left when it has ended.

A workspace is made from its source as it is then, after those of the runs above it. Runs without a copy pass through,
but for one thing: what a spawned run left in a folder of its own is put where its siblings can read it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from retinue.core.errors import Failed, RetinueError
from retinue.core.events import RunStarted, Warned
from retinue.core.messages import Call
from retinue.core.plans import Job, Sandbox
from retinue.core.ports import Execution, Folders, Link, LocalTool, Outcome, RunSession, SandboxSession, Setup
from retinue.sandbox.in_process import IN_PROCESS
from retinue.workspaces.create import CreatedWorkspace
from retinue.workspaces.run_folders import RunFolders
from retinue.workspaces.tree_workspaces import Workspaces, publish_snapshot, record_changes
from retinue.workspaces.workspace import WORKSPACE_FILE, ChangesRecord, Workspace, WorkspaceRecord, read_record

STOP_SECONDS = 2.0


class WorkspaceMaker:
    """Makes the copied workspaces of one process, each once, beside the event loop."""

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces = workspaces
        self._making: dict[str, _Making] = {}

    async def make(self, folders: RunFolders, link: Link) -> None:
        """Make a run's workspace, after those of the runs above it. Raises Failed."""
        if folders.parent is not None:
            await self.make(folders.parent, link)
        copy = folders.workspace_copy
        if copy is None or folders.is_made:
            return
        making = self._making.get(copy.own)
        if making is None:
            making = self._making[copy.own] = _Making(copy, self._workspaces)
        try:
            made = await making.wait()
        except (RetinueError, OSError) as error:
            self._making.pop(copy.own, None)
            raise Failed(str(error)) from None
        except asyncio.CancelledError:
            self._making.pop(copy.own, None)
            raise
        if not folders.is_made:
            folders.is_made = True
            self._making.pop(copy.own, None)
            if made.skipped.count:
                link.emit(Warned(f"not in the workspace: {made.skipped}", code="workspace_skipped"))

    async def make_above(self, job: Job, link: Link) -> None:
        """Make the workspaces of the runs above one, which it may read."""
        if isinstance(job.folders, RunFolders) and job.folders.parent is not None:
            await self.make(job.folders.parent, link)

    def run_beside(self, work: Callable[[], list[str]]) -> asyncio.Future[list[str]]:
        """Run it in a thread. Whoever closes waits for it, so that nothing is written in a folder that is gone."""
        return self._workspaces.tasks.start_thread(work)


class _Making:
    """One workspace that is being made; several calls may wait for it. The last that gives up stops it."""

    def __init__(self, copy: Workspace, workspaces: Workspaces) -> None:
        self._stop = threading.Event()
        self._task = workspaces.tasks.start_thread(lambda: workspaces.prepare(copy, self._stop))
        self._waiting = 0

    async def wait(self) -> CreatedWorkspace:
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._waiting == 1:
                self._stop.set()
                await asyncio.wait([self._task], timeout=STOP_SECONDS)
            raise
        finally:
            self._waiting -= 1


class WorkspaceSandbox:
    """Wraps a sandbox. `setup` is a command that is run in each new copy."""

    def __init__(self, inner: Sandbox, *, setup: Setup | None, maker: WorkspaceMaker) -> None:
        self._inner, self._setup, self._maker = inner, setup, maker
        self.name, self.grace = inner.name, inner.grace
        self.started: RunStarted = inner.started

    def open(self, job: Job, link: Link) -> RunSession | None:
        inner = self._inner.open(job, link)
        folders = job.folders
        if not isinstance(folders, RunFolders) or not (folders.snapshots or _has_copy(folders)):
            return inner
        is_set_up = job.past is not None and job.past.set_up
        setup = None if folders.workspace_copy is None or is_set_up else self._setup
        return _WorkspaceSession(inner, folders, job, link, setup=setup, maker=self._maker)


def _has_copy(folders: RunFolders | None) -> bool:
    """Tell whether the run, or one above it whose files it may use, has a workspace that must be made."""
    while folders is not None:
        if folders.workspace_copy is not None:
            return True
        folders = folders.parent
    return False


class _WorkspaceSession:
    """The session of one run: every local call waits for the workspace first."""

    def __init__(
        self,
        inner: RunSession | None,
        own: RunFolders,
        job: Job,
        link: Link,
        *,
        setup: Setup | None,
        maker: WorkspaceMaker,
    ) -> None:
        self._inner, self._own, self._job, self._link = inner, own, job, link
        self._maker = maker
        self._copies = _has_copy(own)
        self._is_lost = False
        self.setup = setup
        self.folders: Folders = own if inner is None else inner.folders

    def runs_tool(self, name: str) -> bool:
        return self._copies or (self._inner is not None and self._inner.runs_tool(name))

    async def make_workspace(self) -> None:
        if self._copies:
            try:
                await self._maker.make(self._own, self._link)
            except Failed:
                self._is_lost = True
                raise

    async def preview(self, tool: LocalTool, call: Call, folders: Folders) -> str:
        await self.make_workspace()
        return await self._session_of(tool).preview(tool, call, folders)

    async def execute(self, tool: LocalTool, call: Call, execution: Execution) -> Outcome:
        await self.make_workspace()
        return await self._session_of(tool).execute(tool, call, execution)

    def _session_of(self, tool: LocalTool) -> SandboxSession:
        inner = self._inner
        return inner if inner is not None and inner.runs_tool(tool.spec.name) else IN_PROCESS

    async def close(self) -> None:
        """End the sandbox, then look at what the run left; also for one that was told to stop, as long as it is waited
        for. What is missed here is looked up later."""
        try:
            if self._inner is not None:
                await self._inner.close()
        finally:
            await self._keep_changes()

    def _was_made(self) -> bool:
        """Tell whether an earlier process has made the workspace."""
        return self._job.past is not None and read_record(self._own.own, WORKSPACE_FILE, WorkspaceRecord) is not None

    async def _keep_changes(self) -> None:
        own = self._own
        if self._is_lost:
            return
        if own.workspace_copy is not None and not own.is_made and not self._was_made():
            own.changes = ChangesRecord((), 0)
        elif own.workspace_copy is not None or own.used or self._job.plan.profile.call is not None:
            try:
                found = await asyncio.shield(self._maker.run_beside(lambda: _record_results(self._job, own)))
            except (RetinueError, OSError) as error:
                found = [f"what it changed was not looked at: {error}"]
            for text in found:
                self._link.emit(Warned(text, code="workspace"))


def _record_results(job: Job, folders: RunFolders) -> list[str]:
    """Keep what a run left; what is to be told of it."""
    found: list[str] = []
    only: set[str] | None = None
    if folders.workspace_copy is not None:
        folders.changes, only = record_changes(folders.workspace_copy)
        if folders.changes.skipped:
            found.append(f"not among the changes: {folders.changes.skipped}")
    if folders.snapshots and (only is None or only) and Path(folders.path).is_dir():
        found.append(publish_snapshot(folders.path, folders.snapshots, job.ref.label, job.ref.run, only=only))
    return [text for text in found if text]
