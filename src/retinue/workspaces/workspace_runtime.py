"""A runtime around another one: gives a run its copied workspace before it starts and looks at it when it has ended.

Runs in other workspaces pass through, but for one thing: what a spawned run left in a folder of its own is put where
its siblings can read it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from retinue.core.errors import RetinueError
from retinue.core.events import RunStarted, Warned
from retinue.core.plans import Job, Runtime, Setup
from retinue.core.ports import Link
from retinue.core.results import Ending
from retinue.workspaces.run_folders import RunFolders
from retinue.workspaces.tree_workspaces import Workspaces, publish_snapshot, record_changes
from retinue.workspaces.workspace import Workspace

STOP_SECONDS = 2.0
T = TypeVar("T")


class WorkspaceRuntime:
    """`setup` is run in each new copy, by whoever runs the job."""

    def __init__(self, inner: Runtime, *, setup: Setup | None, workspaces: Workspaces) -> None:
        self._inner = inner
        self._setup = setup
        self._workspaces = workspaces
        self.name, self.grace = inner.name, inner.grace
        self.started: RunStarted | None = inner.started

    def run(self, job: Job, link: Link) -> Awaitable[Ending]:
        folders = job.folders
        if not isinstance(folders, RunFolders) or (folders.workspace_copy is None and not folders.snapshots):
            return self._inner.run(job, link)
        return self._run(job, link, folders)

    async def _run(self, job: Job, link: Link, folders: RunFolders) -> Ending:
        workspace = folders.workspace_copy
        if workspace is not None:
            await self._open(workspace, link)
            if job.past is None or not job.past.set_up:
                job = msgspec.structs.replace(job, setup=self._setup)
        try:
            return await self._inner.run(job, link)
        finally:
            if workspace is not None or folders.used or job.plan.profile.call is not None:
                await self._leave(job, link, folders)

    async def _open(self, workspace: Workspace, link: Link) -> None:
        made = await self._in_thread(lambda stop: self._workspaces.prepare(workspace, stop))
        if made.skipped.count:
            link.emit(Warned(f"not in the workspace: {made.skipped}", code="workspace_skipped"))

    async def _leave(self, job: Job, link: Link, folders: RunFolders) -> None:
        """Also for a run that was told to stop, as long as it is waited for; what is missed here is looked up later."""
        try:
            told = await asyncio.shield(self._beside(lambda: _look(job, folders)))
        except (RetinueError, OSError) as error:
            told = [f"what it changed was not looked at: {error}"]
        for text in told:
            link.emit(Warned(text, code="workspace"))

    async def _in_thread(self, work: Callable[[threading.Event], T]) -> T:
        """Runs it beside the loop. When cancelled, it is told, and waited for a little."""
        stop = threading.Event()
        task = self._beside(lambda: work(stop))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([task], timeout=STOP_SECONDS)
            raise

    def _beside(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """In a thread; whoever closes waits for it, so that nothing is written in a folder that is gone."""
        return self._workspaces.tasks.start_thread(work)


def _look(job: Job, folders: RunFolders) -> list[str]:
    """What is to be told of it."""
    told: list[str] = []
    only: set[str] | None = None
    if folders.workspace_copy is not None:
        folders.changes, only = record_changes(folders.workspace_copy)
        if folders.changes.skipped:
            told.append(f"not among the changes: {folders.changes.skipped}")
    if folders.snapshots and (only is None or only) and Path(folders.path).is_dir():
        told.append(publish_snapshot(folders.path, folders.snapshots, job.ref.label, job.ref.run, only=only))
    return [text for text in told if text]
