"""One live run as the supervisor holds it: what the log cannot say, such as its task, its slot and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from retinue.core.context import Context
from retinue.core.events import Body, Event, Warned
from retinue.core.messages import RunRef, Turn, UserTurn
from retinue.core.plans import Past, Plan
from retinue.core.ports import Clock, Order, Policy, Receipt, Timer
from retinue.core.profiles import Task
from retinue.core.results import Result, Status
from retinue.log.runs import RunView
from retinue.supervisor.budgets import Account, CallReservation
from retinue.supervisor.slots import SlotHolder
from retinue.supervisor.timers import Deadline, StallTimer
from retinue.workspaces.run_folders import RunFolders

if TYPE_CHECKING:
    from retinue.supervisor.links import RunLink


class After(NamedTuple):
    """The run that another one continues: its tree where that is another one, its number, its thread."""

    tree: str
    run: int
    thread: Sequence[Turn]

    def over(self, node: Node, order: Order) -> Order:
        """Has the run begin with that thread; the order that says so."""
        node.past = Past((*self.thread, UserTurn(node.wish.text)))
        return msgspec.structs.replace(order, continues=self.run, origin=self.tree)


class Node(msgspec.Struct, eq=False):
    """A run and its place in the tree. Made by `Supervisor.spawn` only, which sets at once what has no value here."""

    ref: RunRef
    plan: Plan
    wish: Task
    parent: Node | None
    folders: RunFolders
    policy: Policy
    slot: SlotHolder
    depth: int = 0
    max_depth: int = 0
    max_turns: int | None = None
    seconds: float | None = None
    background: bool = False
    queues: bool = False
    children: tuple[Node, ...] = ()
    view: RunView = None  # type: ignore[assignment]  # set when `run.spawned` is folded
    link: RunLink = None  # type: ignore[assignment]
    task: asyncio.Task[None] | None = None
    context: Context | None = None
    waiters: tuple[asyncio.Future[None], ...] = ()
    finished: bool = False
    grace: Timer | None = None
    started: float = 0.0
    reservation: CallReservation | None = None  # of the model call that is being made, inside a budget
    written: asyncio.Future[None] | None = None  # what the model's first reply waits for
    driving: bool = False
    ending: bool = False
    stopping: Status | None = None
    partial: str = ""
    failure: str = ""
    past: Past | None = None
    account: Account | None = None
    deadline: Deadline | None = None
    stall: StallTimer | None = None
    call_ids: set[str] | None = None
    inbox: tuple[UserTurn, ...] = ()
    news: asyncio.Event | None = None
    remote_tail: tuple[Event, ...] = ()  # of a resumed remote run: what is in the log after its last cursor
    relay: Callable[[str], Awaitable[Receipt]] | None = None  # how words reach a run that lives elsewhere
    asking: int = 0
    persons: tuple[Callable[[bool], None], ...] = ()  # who wants to know that a person is waited for
    seals: dict[str, str] | None = None  # what the calls of MCP tools that may run were judged as

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
        self.slot.stop()
        for child in self.children:
            child.stop("cancelled")
        if self.driving and self.task is not None:
            self.task.cancel()
            self.link.supervisor.give_grace(self)
        return True

    def join(self) -> asyncio.Future[None]:
        """Done when the ending is written."""
        waiter = asyncio.get_running_loop().create_future()
        if self.finished:
            waiter.set_result(None)
        else:
            self.waiters += (waiter,)
        return waiter

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

    def let_go(self) -> None:
        """The tree has ended; only the view is looked at from now on."""
        self.link = None  # type: ignore[assignment]
        self.context = self.deadline = self.stall = None
        self.children = ()

    def time_out(self) -> None:
        self.stop("timed_out")

    def pause(self) -> None:
        """Stops the clocks of the run and of all that wait for it: a person is being waited for."""
        node: Node | None = self
        while node is not None:
            if node.deadline is not None:
                node.deadline.pause()
            node.asking += 1
            for tell in node.persons:
                tell(True)
            node = node.parent
        self.pause_stalls()

    def unpause(self) -> None:
        node: Node | None = self
        while node is not None:
            if node.deadline is not None:
                node.deadline.resume()
            node.asking -= 1
            for tell in node.persons:
                tell(False)
            node = node.parent
        self.resume_stalls()

    def pause_stalls(self) -> None:
        """It is known what the run, and so all above it, wait for."""
        node: Node | None = self
        while node is not None and node.stall is not None:
            node.stall.pause()
            node = node.parent

    def resume_stalls(self) -> None:
        node: Node | None = self
        while node is not None and node.stall is not None:
            node.stall.resume()
            node = node.parent

    async def without_stall_timer(self, awaited: Awaitable[None]) -> None:
        """Waits for what is known to come, which is no stall."""
        self.pause_stalls()
        try:
            await awaited
        finally:
            self.resume_stalls()

    def stop_clocks(self) -> None:
        """For good: the run has its ending."""
        for clock in (self.deadline, self.stall):
            if clock is not None:
                clock.stop()
        if self.grace is not None:
            self.grace.cancel()

    def queued_below(self) -> bool:
        """Whether the run or one below it waits for a slot."""
        return self.slot.is_queued or any(child.queued_below() for child in self.children)

    def tell(self, words: UserTurn) -> None:
        """Puts words in the inbox, to be read at the next turn."""
        self.inbox += (words,)
        self.wake()

    def wake(self) -> None:
        if self.news is not None:
            self.news.set()

    def live_background(self) -> bool:
        return bool(self.children) and any(child.background and not child.finished for child in self.children)


def stall_timer(
    node: Node, seconds: float | UnsetType | None, clock: Clock, write: Callable[[Node, Body], object]
) -> StallTimer | None:
    """Return the stall timer of a run. Inherits the parent's budget if unset. A run without a budget below one that has
    it gets a timer that only reports activity upward."""
    parent = None if node.parent is None else node.parent.stall
    if seconds is UNSET:
        seconds = None if parent is None else parent.seconds
    if seconds is None and parent is None:
        return None
    text = f"stalled: nothing has happened in it for {seconds or 0:g} s; it ends after as long again"
    warn = partial(write, node, Warned(text, code="stalled"))
    return StallTimer(seconds, clock, parent=parent, is_queued=node.queued_below, warn=warn, on_expire=node.time_out)
