"""One live run as the supervisor holds it: what the log cannot say, such as its task, its slot and who waits for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from retinue.core.context import Context
from retinue.core.messages import RunRef, UserTurn
from retinue.core.plans import Plan
from retinue.core.ports import Policy, Timer
from retinue.core.profiles import Task
from retinue.core.results import Result, Status
from retinue.log.runs import RunView
from retinue.runtime.folders import RunFolders
from retinue.supervisor.deadlines import Deadline

if TYPE_CHECKING:
    from retinue.supervisor.links import RunLink


class Node:
    """A run and its place in the tree. Made by `Supervisor.spawn` only."""

    __slots__ = (
        "background", "call_ids", "children", "context", "deadline", "depth", "driving", "ending", "finished",
        "folders", "grace", "holds_slot", "inbox", "inflight", "link", "max_depth", "max_turns", "news",
        "parent", "partial", "place", "plan", "policy", "queues", "ref", "seconds", "started", "stopping",
        "task", "view", "waiters", "waiting", "wish",
    )  # fmt: skip

    def __init__(self, ref: RunRef, plan: Plan, wish: Task, parent: Node | None, folders: RunFolders) -> None:
        self.ref = ref
        self.plan = plan
        self.wish = wish
        self.parent = parent
        self.folders = folders
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.max_depth = 0
        self.max_turns: int | None = None
        self.policy: Policy = None  # type: ignore[assignment]  # set by the supervisor right after
        self.seconds: float | None = None
        self.background = False
        self.queues = False
        self.children: tuple[Node, ...] = ()
        self.view: RunView = None  # type: ignore[assignment]  # set when `run.spawned` is folded
        self.task: asyncio.Task[None] | None = None
        self.context: Context | None = None
        self.link: RunLink = None  # type: ignore[assignment]  # set by the supervisor right after
        self.waiters: tuple[asyncio.Future[None], ...] = ()
        self.finished = False
        self.grace: Timer | None = None
        self.started = 0.0
        self.driving = False
        self.ending = False
        self.stopping: Status | None = None
        self.partial = ""
        self.deadline: Deadline | None = None
        self.place: asyncio.Future[None] | None = None
        self.holds_slot = False
        self.inflight = 0
        self.call_ids: set[str] = set()
        self.waiting = 0
        self.inbox: tuple[UserTurn, ...] = ()
        self.news: asyncio.Event | None = None

    @property
    def name(self) -> str:
        return self.ref.agent

    @property
    def ended(self) -> bool:
        return self.view.ended is not None

    def result(self) -> Result[Any]:
        result = self.view.result(self.ref.tree)
        return result if self.plan.parse is None else msgspec.structs.replace(result, parse=self.plan.parse)

    def stop(self, status: Status) -> bool:
        """Asks the run, and first everything below it, to stop; False when it already has an ending coming."""
        if self.ending or self.stopping is not None:
            return False
        self.stopping = status
        for child in self.children:
            child.stop("cancelled")
        if self.driving and self.task is not None:
            self.task.cancel()
            self.link.supervisor.give_grace(self)
        return True

    async def join(self) -> None:
        """Waits until the ending is written."""
        if not self.finished:
            waiter = asyncio.get_running_loop().create_future()
            self.waiters += (waiter,)
            await waiter

    def finish(self) -> None:
        """The ending is written: wakes whoever waits, once."""
        self.finished = True
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.waiters = ()
        self.task = None
        if self.parent is not None:
            self.parent.wake()

    def time_out(self) -> None:
        self.stop("timed_out")

    def pause(self) -> None:
        """Stops the clocks of the run and of all that wait for it: a person is being waited for."""
        node: Node | None = self
        while node is not None:
            if node.deadline is not None:
                node.deadline.pause()
            node = node.parent

    def unpause(self) -> None:
        node: Node | None = self
        while node is not None:
            if node.deadline is not None:
                node.deadline.resume()
            node = node.parent

    def tell(self, words: UserTurn) -> None:
        """Puts words in the inbox, to be read at the next turn."""
        self.inbox += (words,)
        self.wake()

    def wake(self) -> None:
        if self.news is not None:
            self.news.set()

    def live_background(self) -> bool:
        return any(child.background and not child.finished for child in self.children)
