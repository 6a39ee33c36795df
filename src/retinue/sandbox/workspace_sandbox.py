"""A sandbox wrapper that creates a run's copied workspace on first use and records its changes at the end.

A workspace is created from the current state of its source, after the workspaces of its ancestors. Runs without a copy
use the inner sandbox directly, except that a spawned run's own files are published for its siblings.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from retinue.core.errors import Failed, RetinueError
from retinue.core.events import RunStarted, Warned
from retinue.core.messages import Call
from retinue.core.plans import Job, Sandbox
from retinue.core.ports import Emit, Execution, Folders, LocalTool, Outcome, RunSession, SandboxSession, Setup
from retinue.sandbox.in_process import IN_PROCESS
from retinue.tools.local import LOCAL
from retinue.workspaces.create import Workspaces
from retinue.workspaces.recording import publish_snapshot, record_changes
from retinue.workspaces.run_folders import RunFolders
from retinue.workspaces.workspace import ChangesRecord, Workspace, read_record


class WorkspaceSandbox:
    """A wrapper around the sandbox `inner`. `setup` is a command to run in each new copy."""

    def __init__(self, inner: Sandbox, *, setup: Setup | None, workspaces: Workspaces) -> None:
        self._inner, self._setup, self._workspaces = inner, setup, workspaces
        self.name, self.grace = inner.name, inner.grace
        self.started: RunStarted = inner.started

    def open(self, job: Job, emit: Emit) -> RunSession | None:
        inner = self._inner.open(job, emit)
        folders = job.folders
        if not isinstance(folders, RunFolders) or not (_has_copy(folders) or _can_publish(folders, job)):
            return inner
        is_set_up = job.past is not None and job.past.set_up
        setup = None if folders.workspace_copy is None or is_set_up else self._setup
        return _WorkspaceSession(inner, folders, job, emit, setup=setup, workspaces=self._workspaces)


def _can_publish(folders: RunFolders, job: Job) -> bool:
    """Return True if the run has its own folder for its siblings to read, and may put files there."""
    if not folders.snapshots:
        return False
    if job.plan.profile.call is not None or job.task.files:
        return True
    for name in job.plan.tools:  # noqa: SIM110 - runs for every subagent, and `any` takes six times as long
        if name in LOCAL and name not in job.plan.host:
            return True
    return False


def _has_copy(folders: RunFolders | None) -> bool:
    """Return True if the run, or an ancestor whose files it may use, has a workspace that must be created."""
    while folders is not None:
        if folders.workspace_copy is not None or folders.starts_from:
            return True
        folders = folders.parent
    return False


class _WorkspaceSession:
    """The session of one run. Every local call waits for the workspace first."""

    def __init__(
        self,
        inner: RunSession | None,
        own: RunFolders,
        job: Job,
        emit: Emit,
        *,
        setup: Setup | None,
        workspaces: Workspaces,
    ) -> None:
        self._inner, self._own, self._job, self._emit = inner, own, job, emit
        self._workspaces = workspaces
        self.has_copy = _has_copy(own)
        self.needs_workspace = own.moves_start
        self._is_lost = False
        self.setup = setup

    def runs_tool(self, name: str) -> bool:
        return self.has_copy or (self._inner is not None and self._inner.runs_tool(name))

    async def make_workspace(self) -> None:
        if self.has_copy:
            try:
                await self._workspaces.make(self._own, self._emit)
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
        """End the sandbox, then record the changes of the run. Also does so for a cancelled run, while the caller
        waits.

        Changes that are missed here are looked up later."""
        try:
            if self._inner is not None:
                await self._inner.close()
        finally:
            await self._keep_changes()

    def _was_made(self) -> bool:
        """Return True if an earlier process has created the workspace."""
        return self._job.past is not None and read_record(self._own.own, Workspace) is not None

    async def _keep_changes(self) -> None:
        own, copy = self._own, self._own.workspace_copy
        is_continued = bool(own.starts_from) or (copy is not None and copy.continued is not None)
        if is_continued and not (own.is_made or self._was_made() or self._is_lost):
            try:  # carry on the files of the continued run, even if this run did not use them
                await self.make_workspace()
            except Failed as error:
                self._emit(Warned(str(error), code="workspace"))
        if self._is_lost:
            return
        if own.workspace_copy is not None and not own.is_made and not self._was_made():
            own.set_changes(ChangesRecord((), 0))
        elif own.workspace_copy is not None or own.used or self._job.plan.profile.call is not None:
            try:
                found = await asyncio.shield(self._workspaces.start_thread(lambda: _record_results(self._job, own)))
            except (RetinueError, OSError) as error:
                found = [f"what it changed was not looked at: {error}"]
            for text in found:
                self._emit(Warned(text, code="workspace"))


def _record_results(job: Job, folders: RunFolders) -> list[str]:
    """Record the changes of a run and publish its files. Returns warnings for the user."""
    found: list[str] = []
    only: set[str] | None = None
    if folders.workspace_copy is not None:
        changes, only = record_changes(folders.workspace_copy)
        folders.set_changes(changes)
        if changes.skipped:
            found.append(f"not among the changes: {changes.skipped}")
    if folders.snapshots and (only is None or only) and Path(folders.path).is_dir():
        found.append(publish_snapshot(folders, job.ref.label, job.ref.run, only=only))
    return [text for text in found if text]
