"""The tasks of a server: primaries in the log that answer A2A clients. Each task is a tree and has the tree's id.

The list is read from the log at startup and grows with every task. A running task is followed once, so all requests
see the same state. Knows Control and the readable side of the log, but no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from retinue.concurrency import TaskOwner
from retinue.core.control import Control
from retinue.core.errors import RetinueError
from retinue.core.events import Delta, RunSpawned
from retinue.core.ports import LogReader
from retinue.files.trees import remove_tree
from retinue.log.reading import iterate_events
from retinue.surfaces.a2a.options import OperatorScreen, ServerOptions
from retinue.surfaces.a2a.streams import ServedTask, TaskView

SURFACE = "a2a"
_LOG = logging.getLogger(__name__)


class Follower:
    """The view of a running task. When the view changes, the event `changed` is set and replaced by a new one."""

    def __init__(self, view: TaskView) -> None:
        self.view = view
        self.changed = asyncio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ServedTasks:
    """All tasks of one profile, and the followers of the running tasks."""

    def __init__(self, control: Control, log: LogReader, options: ServerOptions, screen: OperatorScreen) -> None:
        self._control, self._log, self._options, self._screen = control, log, options, screen
        self._tasks: dict[str, ServedTask] = {}
        self._messages: dict[tuple[str, str], str] = {}
        self._followers: dict[str, Follower] = {}
        self._owner = TaskOwner(on_error=lambda error: _LOG.error("a task is not followed any more: %s", error))

    # The list

    async def load(self) -> None:
        """Read the tasks from the log, oldest first."""
        trees = [stored.tree for stored in reversed(await self._log.list_trees())]
        for run in await self._log.read_runs(trees):
            first, body = run.first, run.first.body
            is_primary = first.run == 0 and first.agent == self._options.profile.name
            request = body.request if is_primary and isinstance(body, RunSpawned) else None
            if request is not None and request.surface == SURFACE:
                self.add(ServedTask(first.tree, request))

    def add(self, task: ServedTask) -> None:
        self._tasks[task.tree] = task
        self.note_message(task, task.request.message)

    def note_message(self, task: ServedTask, message_id: str) -> None:
        """Record a message of a task, so that a repetition is recognised."""
        self._messages[task.request.client, message_id] = task.tree

    def find(self, task_id: str, client: str) -> ServedTask | None:
        """Return the task if it belongs to this client, else None."""
        found = self._tasks.get(task_id)
        return found if found is not None and found.request.client == client else None

    def find_message(self, client: str, message_id: str) -> ServedTask | None:
        """Return the task that got this message of the client, or None."""
        tree = self._messages.get((client, message_id))
        return None if tree is None else self._tasks[tree]

    def list_tasks(self, client: str, context: str = "") -> list[ServedTask]:
        """Return the tasks of a client, or of its conversation `context`, in order of creation."""
        own = [task for task in self._tasks.values() if task.request.client == client]
        return [task for task in own if task.request.context == context] if context else own

    # The state of tasks

    def is_live(self, task: ServedTask) -> bool:
        return task.tree in self._followers

    def count_live(self) -> int:
        return len(self._followers)

    async def read_view(self, task: ServedTask) -> TaskView:
        """Return the view of a task: from its follower if it is running, else from the log."""
        follower = self._followers.get(task.tree)
        if follower is not None and follower.view.beginning is not None:
            return follower.view
        view = TaskView(task, self._options)
        async for event in iterate_events(self._log, task.tree):
            view.apply(event)
        return view

    async def read_summaries(self, tasks: list[ServedTask]) -> Mapping[str, tuple[float, str | None]]:
        """Return the time of each task's last change, and its final status."""
        found: dict[str, tuple[float, str | None]] = {}
        for run in await self._log.read_runs([task.tree for task in tasks]):
            if run.first.run == 0:
                tally = run.tally
                at = tally.ended_at or tally.started_at or run.first.at
                found[run.first.tree] = at, tally.status
        return found

    async def wait_until(self, task: ServedTask, is_over: Callable[[TaskView], bool]) -> TaskView:
        """Wait until a task has ended or `is_over` returns True for its view, and return the view."""
        while (follower := self._followers.get(task.tree)) is not None and not is_over(follower.view):
            await follower.changed.wait()
        return await self.read_view(task)

    # Following

    def follow(self, task: ServedTask) -> None:
        """Follow a task until its end, after starting or resuming the task here."""
        follower = self._followers[task.tree] = Follower(TaskView(task, self._options))
        self._owner.start(self._follow(task.tree, follower))

    async def _follow(self, tree: str, follower: Follower) -> None:
        try:
            async with AsyncExitStack() as stack:
                if self._options.asks_client:  # keep its questions open for the client
                    await stack.enter_async_context(self._control.attend(tree))
                items = await stack.enter_async_context(aclosing(self._control.watch(tree)))
                async for item in items:
                    if not isinstance(item, Delta):
                        follower.view.apply(item)
                        follower.notify()
        finally:
            del self._followers[tree]
            follower.notify()
            beginning = follower.view.beginning
            if beginning is not None:
                await remove_files(beginning.files)

    async def resume(self) -> None:
        """Resume the tasks that were running when an earlier server was killed."""
        unfinished = {stored.tree for stored in await self._log.list_trees(only="interrupted")}
        for task in [task for task in self._tasks.values() if task.tree in unfinished]:
            try:
                await self._control.resume(task.tree, self._options.overrides)
            except RetinueError as error:
                self._screen.say(f"warning: the task {task.tree} cannot be resumed: {error}")
                continue
            self.follow(task)
            self._screen.show_task(task.tree, task.tree, f"resuming the task {task.tree}")

    async def close(self) -> None:
        await self._owner.close()


async def remove_files(files: Sequence[str]) -> None:
    """Remove the files of a client's message, with their folder."""
    for folder in {Path(file).parent for file in files}:
        await asyncio.to_thread(remove_tree, folder)
