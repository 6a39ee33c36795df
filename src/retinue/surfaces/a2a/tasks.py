"""The tasks of a server: primaries in the log that answer A2A clients. Each is a tree, whose id is the task's.

The list is read from the log when the server starts and grows with every task; a task at work is followed, so that
everybody who asks or waits sees the same. Knows Control and the log as it is read, nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
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
    """The view of a task at work. `changed` is set, and replaced, when the view has changed."""

    def __init__(self, view: TaskView) -> None:
        self.view = view
        self.changed = asyncio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ServedTasks:
    """All tasks of one profile, and the followers of those at work."""

    def __init__(self, control: Control, log: LogReader, options: ServerOptions, screen: OperatorScreen) -> None:
        self._control, self._log, self._options, self._screen = control, log, options, screen
        self._tasks: dict[str, ServedTask] = {}
        self._messages: dict[tuple[str, str], str] = {}
        self._followers: dict[str, Follower] = {}
        self._owner = TaskOwner(on_error=lambda error: _LOG.error("a task is not followed any more: %s", error))

    # The list

    async def load(self) -> None:
        """Read the tasks that the log has, the oldest first."""
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
        """Remember a message of a task, so that it counts once."""
        self._messages[task.request.client, message_id] = task.tree

    def find(self, task_id: str, client: str) -> ServedTask | None:
        """Return a task of this client; those of others are not there."""
        found = self._tasks.get(task_id)
        return found if found is not None and found.request.client == client else None

    def find_message(self, client: str, message_id: str) -> ServedTask | None:
        """Return the task that a message of the client was for."""
        tree = self._messages.get((client, message_id))
        return None if tree is None else self._tasks[tree]

    def list_tasks(self, client: str, context: str = "") -> list[ServedTask]:
        """Return the tasks of a client, or those of one of its conversations, in the order they were made."""
        own = [task for task in self._tasks.values() if task.request.client == client]
        return [task for task in own if task.request.context == context] if context else own

    # How they stand

    def is_live(self, task: ServedTask) -> bool:
        return task.tree in self._followers

    def count_live(self) -> int:
        return len(self._followers)

    async def read_view(self, task: ServedTask) -> TaskView:
        """Return how a task stands: as it is followed, or as the log has it."""
        follower = self._followers.get(task.tree)
        if follower is not None and follower.view.beginning is not None:
            return follower.view
        view = TaskView(task, self._options)
        async for event in iterate_events(self._log, task.tree):
            view.apply(event)
        return view

    async def read_summaries(self, tasks: list[ServedTask]) -> Mapping[str, tuple[float, str | None]]:
        """Return when each task changed last, and the status it has ended with."""
        found: dict[str, tuple[float, str | None]] = {}
        for run in await self._log.read_runs([task.tree for task in tasks]):
            if run.first.run == 0:
                tally = run.tally
                at = tally.ended_at or tally.started_at or run.first.at
                found[run.first.tree] = at, tally.status
        return found

    async def wait_until(self, task: ServedTask, is_over: Callable[[TaskView], bool]) -> TaskView:
        """Wait until a task has ended or stands as wanted; return how it stands."""
        while (follower := self._followers.get(task.tree)) is not None and not is_over(follower.view):
            await follower.changed.wait()
        return await self.read_view(task)

    # Following

    def follow(self, task: ServedTask) -> None:
        """Follow a task that has just begun or goes on here, to its end."""
        follower = self._followers[task.tree] = Follower(TaskView(task, self._options))
        self._owner.start(self._follow(task.tree, follower))

    async def _follow(self, tree: str, follower: Follower) -> None:
        files: tuple[str, ...] = ()
        try:
            async with AsyncExitStack() as stack:
                if self._options.asks_client:  # its questions wait for the client then
                    await stack.enter_async_context(self._control.attend(tree))
                items = await stack.enter_async_context(aclosing(self._control.watch(tree)))
                async for item in items:
                    if isinstance(item, Delta):
                        continue
                    if isinstance(item.body, RunSpawned) and item.run == 0:
                        files = item.body.files
                    follower.view.apply(item)
                    follower.notify()
                    self._screen.show(item)
        finally:
            del self._followers[tree]
            follower.notify()
            for folder in {Path(file).parent for file in files}:
                await asyncio.to_thread(remove_tree, folder)

    async def resume(self) -> None:
        """Go on with the tasks that an earlier server was working on when it was killed."""
        unfinished = {stored.tree for stored in await self._log.list_trees(only="interrupted")}
        for task in [task for task in self._tasks.values() if task.tree in unfinished]:
            try:
                await self._control.resume(task.tree, self._options.overrides)
            except RetinueError as error:
                self._screen.say(f"warning: the task {task.tree} cannot go on: {error}")
                continue
            self.follow(task)
            self._screen.say(f"going on with the task {task.tree}")

    async def close(self) -> None:
        await self._owner.close()
