"""One live run in the supervisor, with everything that the log does not hold, such as its slot, its clocks and its
waiters.

Knows timers, slots and budgets, but not how a run is spawned, driven or restored. Other modules read the fields of a
Run, and change them only through its methods.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from retinue.concurrency import Deadline, StallTimer
from retinue.core.context import Context
from retinue.core.errors import RetinueError
from retinue.core.events import Body, Event, Warned
from retinue.core.messages import RunRef, UserTurn
from retinue.core.plans import Plan, RunHistory
from retinue.core.ports import STATUS_FILE, Clock, Policy, Receipt, RunningTeam, SpawnedRun, Timer
from retinue.core.profiles import Task
from retinue.core.results import Result, Status
from retinue.log.runs import RunView
from retinue.supervisor.budgets import Account
from retinue.supervisor.slots import SlotHolder
from retinue.workspaces.run_folders import RunFolders

LEFT_OPEN = "{tree} was left open: `retinue resume {tree}` resumes it"
STALLED = "stalled: nothing has happened in this run for {seconds:g} s; it ends after as long again"
SendToPeer = Callable[[str, str], Awaitable[Receipt]]  # the text, and the message id of a client


class Run(msgspec.Struct, eq=False, gc=False):
    """A run and its place in the tree."""

    ref: RunRef
    plan: Plan
    task: Task
    parent: Run | None
    folders: RunFolders
    policy: Policy
    slot: SlotHolder
    account: Account | None = None
    depth: int = 0
    max_depth: int = 0
    max_turns: int | None = None
    seconds: float | None = None
    background: bool = False
    queues: bool = False  # its parent waits for it without holding a slot
    history: RunHistory | None = None  # of a run that was restored, or continues another one
    remote_tail: tuple[Event, ...] = ()  # of a resumed remote run: the events after its last cursor
    children: tuple[Run, ...] = ()
    view: RunView = None  # type: ignore[assignment]  # set when `run.spawned` is folded
    context: Context | None = None

    # Its life
    driver_task: asyncio.Task[None] | None = None
    on_stop: Callable[[Run], None] | None = None
    waiters: tuple[asyncio.Future[None], ...] = ()
    driving: bool = False
    stopping: Status | None = None
    ending: bool = False
    finished: bool = False
    partial: str = ""
    failure: str = ""

    # Its clocks
    started: float = 0.0
    idle_before: float = 0.0  # seconds of waiting for messages, in earlier processes
    deadline: Deadline | None = None
    stall_timer: StallTimer | None = None
    grace_timer: Timer | None = None
    questions: int = 0  # open questions of the run and of the runs below it
    question_listeners: tuple[Callable[[bool], None], ...] = ()

    # Its calls
    first_write: asyncio.Future[None] | None = None  # of `run.spawned`; the first reply waits for it
    call_ids: dict[str, None] | None = None  # not a set: the garbage collector skips a dict of texts
    sealed_calls: dict[str, str] | None = None  # the seal of the MCP tool that each allowed call was judged by

    # Its conversation
    message_task: asyncio.Task[Any] | None = None  # the turns of the current message
    withheld_calls: frozenset[str] | None = None  # of an interrupted turn: calls that were not approved
    leaving: bool = False  # the conversation has been ended
    left_open: bool = False  # the process closes while it waits: it can be resumed

    # Its team
    team: asyncio.Future[RunningTeam] | None = None  # set if the run leads a team

    # Its inbox
    inbox: tuple[UserTurn, ...] = ()
    news: asyncio.Event | None = None
    relay: SendToPeer | None = None  # carries messages to a remote run

    @property
    def name(self) -> str:
        return self.ref.agent

    @property
    def is_primary(self) -> bool:
        return self.parent is None

    @property
    def lineage(self) -> Iterator[Run]:
        """The run and all runs above it, up to the primary."""
        run: Run | None = self
        while run is not None:
            yield run
            run = run.parent

    @property
    def peer_root(self) -> Run | None:
        """The highest run of the lineage that a peer executes, or None for a run of ours."""
        found = [run for run in self.lineage if run.view.remote is not None or run.view.spawned.remote_id]
        return found[-1] if found else None

    def is_below(self, other: Run) -> bool:
        """Return True if `other` is above this run, at any level."""
        above = self.parent
        while above is not None and above is not other:
            above = above.parent
        return above is not None

    def find_own_account(self) -> Account | None:
        """Return the account that was made for this run, or None if the run spends from its parent's account or without
        a limit. A primary without a limit of its own has the account of the process, if there is one."""
        return None if self.parent is not None and self.account is self.parent.account else self.account

    @property
    def ended(self) -> bool:
        return self.view.ended is not None

    @property
    def is_stopping(self) -> bool:
        """True if the run gets nothing more: it was told to stop, or its ending is on the way."""
        return self.stopping is not None or self.ending

    @property
    def is_at_work(self) -> bool:
        """True until the ending is written and the parent knows it, except while the run waits for a message and has
        none to read."""
        return not self.finished and (bool(self.inbox) or not self.view.waits)

    def result(self) -> Result[Any]:
        """Return the result of an ended run, with the parser of its output type."""
        result = self.view.result(self.ref.tree)
        return result if self.plan.parse is None else msgspec.structs.replace(result, parse=self.plan.parse)

    async def wait_for_result(self) -> Result[Any]:
        if not self.finished:
            await self.join()
        if self.left_open:
            raise RetinueError(LEFT_OPEN.format(tree=self.ref.tree))
        return self.result()

    def check_wanted(self) -> None:
        """Raise CancelledError if the run was told to stop or is ending. A run that ignores the cancel gets nothing
        more."""
        if self.stopping is not None or self.ending:
            raise asyncio.CancelledError

    def to_spawned_run(self) -> SpawnedRun:
        """Return this run as the tool that spawned it sees it."""
        return SpawnedRun(
            run=self.ref.run,
            ref=self.ref,
            workspace=self.folders.path,
            timeout_seconds=self.seconds,
            status_file=f"{self.folders.own}/{STATUS_FILE}",
        )

    def lasting_path(self) -> str:
        """Return a path made of the run's position among its parent's children, which does not depend on other
        runs."""
        path, run = "", self
        while run.parent is not None:
            siblings = [child for child in run.parent.children if not child.view.spawned.server]
            path = f"/{run.name}-{siblings.index(run) + 1}{path}"
            run = run.parent
        return f"{run.ref.path}{path}"

    # Its place in the tree

    def add_child(self, child: Run) -> None:
        self.children += (child,)

    def attach_view(self, view: RunView) -> None:
        self.view = view

    def attach_context(self, context: Context) -> None:
        self.context = context

    def release(self) -> None:
        """Drop everything that only a live tree needs, so that its memory is freed without a garbage collection."""
        if self.children:
            self.children = ()
        if self.context is not None:
            self.context = None
        self.deadline = self.stall_timer = None  # of an adopted run, which has no driver
        if self.team is not None:
            self.team = None

    # Starting and ending

    def attach_driver(self, task: asyncio.Task[None], on_stop: Callable[[Run], None]) -> None:
        """Remember the task that drives the run, and the callback that starts the grace period when the run is
        stopped."""
        self.driver_task, self.on_stop = task, on_stop

    def begin_driving(self, now: float) -> None:
        self.driving = True
        self.started = now

    def ask_ahead(self, written: Awaitable[None]) -> None:
        """Let the run ask its model before its first event is on disk."""
        self.first_write = asyncio.ensure_future(written)

    async def wait_for_first_write(self) -> None:
        if self.first_write is not None:
            written, self.first_write = self.first_write, None
            await written

    def start_clocks(self, clock: Clock) -> bool:
        """Start the deadline and the stall timer. If no time is left, mark the run as timed out and return False."""
        used = 0.0 if self.history is None else self.history.seconds
        self.started = clock.monotonic() - used
        if self.task.conversation:
            self.idle_before = self.view.measure_idle(clock.wall())
        if self.seconds is not None:
            if self.seconds <= used:
                self.stopping = "timed_out"
                return False
            self.deadline = Deadline(self.seconds - used, clock, self.time_out)
        if self.stall_timer is not None:
            self.stall_timer.start()
        return True

    def stop(self, status: Status, *, failure: str = "") -> bool:
        """Ask the run and all runs below it to stop. Return False if it is stopping or has ended already. With a
        `failure`, the run ends `failed` with this text."""
        if self.is_stopping:
            return False
        self.failure = failure
        self.mark_stopping(status)
        for child in self.children:
            child.stop("cancelled")
        if self.driving and self.driver_task is not None:
            self.driver_task.cancel()
            if self.on_stop is not None:
                self.on_stop(self)
        return True

    def mark_stopping(self, status: Status) -> None:
        self.stopping = status
        self.slot.stop()

    def attach_message(self, task: asyncio.Task[Any] | None) -> None:
        """Remember the task that runs the turns of the current message, or None when they are over."""
        self.message_task = task
        if task is not None:
            self.withheld_calls = None

    def change_model(self, plan: Plan) -> None:
        """Use the model of another plan from the next turn on."""
        self.plan = replace(self.plan, model=plan.model, model_name=plan.model_name)

    @property
    def is_interrupted(self) -> bool:
        return self.withheld_calls is not None

    def interrupt_turn(self) -> bool:
        """Break off the turn of a conversation, and the runs that the turn waits for. Background runs continue. Return
        False if there is no turn, or if the run is stopping."""
        if self.message_task is None or self.message_task.done() or self.is_stopping:
            return False
        if self.withheld_calls is None:
            self.withheld_calls = frozenset(asked.call_id for asked in self.view.approvals)
        for child in self.children:
            if not child.background:
                child.stop("cancelled")
        self.message_task.cancel()
        return True

    def end_conversation(self) -> bool:
        """Let a conversation end as `done`, and break off a turn in progress. Return False if there is no conversation
        to end."""
        if not self.task.conversation or self.leaving or self.is_stopping:
            return False
        self.leaving = True
        self.interrupt_turn()
        self.wake()
        return True

    def leave_open(self) -> None:
        """Stop a waiting conversation without an ending, so that it can be resumed. Runs below are cancelled."""
        self.left_open = True
        self.begin_ending()
        for child in self.children:
            child.stop("cancelled")
        if self.driver_task is not None:
            self.driver_task.cancel()

    def time_out(self) -> None:
        self.stop("timed_out")

    def kill(self) -> None:
        """Stop the run, and cut its cleanup short."""
        self.stop("cancelled")
        if self.driver_task is not None and self.driving and not self.ending:
            self.driver_task.cancel()

    def keep_partial(self, text: str) -> None:
        """Remember the text so far of a run that does not finish."""
        self.partial = text

    def begin_ending(self) -> None:
        self.ending = True
        self.slot.stop()

    def mark_ended(self) -> None:
        """Mark a run of an earlier process as ended: its ending is in the log."""
        self.ending = self.finished = True

    def finish(self) -> None:
        """Wake everybody who waits for the run, once its ending is written."""
        self.finished = True
        self.driver_task = None
        self.stall_timer = None  # not earlier: the ending counts as activity of the runs above
        if self.waiters:
            waiters, self.waiters = self.waiters, ()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        if self.parent is not None:
            self.parent.wake()

    def join(self) -> asyncio.Future[None]:
        """Return a future that is done when the ending is written."""
        waiter = asyncio.get_running_loop().create_future()
        if self.finished:
            waiter.set_result(None)
        else:
            self.waiters = (*[each for each in self.waiters if not each.done()], waiter)  # without cancelled ones
        return waiter

    # Clocks

    def set_stall_timer(
        self, seconds: float | UnsetType | None, clock: Clock, write: Callable[[Run, Body], object]
    ) -> None:
        """Give the run its stall timer. If `seconds` is unset, use the time of the parent. A run without a stall time,
        below a run with one, gets a timer that only reports activity upward."""
        parent = None if self.parent is None else self.parent.stall_timer
        if seconds is UNSET:
            seconds = None if parent is None else parent.seconds
        if seconds is None and parent is None:
            return
        text = STALLED.format(seconds=seconds or 0)
        self.stall_timer = StallTimer(
            seconds,
            clock,
            parent=parent,
            is_queued=self.is_queued_below,
            warn=partial(write, self, Warned(text, code="stalled")),
            on_expire=self.time_out,
        )

    def is_queued_below(self) -> bool:
        """Return True if the run or a run below it waits for a slot."""
        return self.slot.is_queued or any(child.is_queued_below() for child in self.children)

    def record_activity(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.record_activity()

    def start_grace(self, timer: Timer) -> None:
        """Remember the timer that ends the run after its grace period."""
        self.grace_timer = timer

    def pause_for_person(self) -> None:
        """Pause the clocks of the run and of all runs above it, while a person is asked."""
        for run in self.lineage:
            if run.deadline is not None:
                run.deadline.pause()
            run.questions += 1
            for listener in run.question_listeners:
                listener(True)
        self._pause_stall_timers()

    def resume_after_person(self) -> None:
        for run in self.lineage:
            if run.deadline is not None:
                run.deadline.resume()
            run.questions -= 1
            for listener in run.question_listeners:
                listener(False)
        self._resume_stall_timers()

    def add_question_listener(self, listener: Callable[[bool], None]) -> None:
        """Call `listener` with True when a person is asked and with False when the question is closed. Questions that
        are open now count as just asked."""
        for _ in range(self.questions):
            listener(True)
        self.question_listeners += (listener,)

    def remove_question_listener(self, listener: Callable[[bool], None]) -> None:
        self.question_listeners = tuple(each for each in self.question_listeners if each is not listener)

    def _pause_stall_timers(self) -> None:
        for run in self.lineage:
            if run.stall_timer is not None:
                run.stall_timer.pause()

    def _resume_stall_timers(self) -> None:
        for run in self.lineage:
            if run.stall_timer is not None:
                run.stall_timer.resume()

    async def without_stall_timer(self, awaited: Awaitable[None]) -> None:
        """Await something whose time does not count as a stall."""
        self._pause_stall_timers()
        try:
            await awaited
        finally:
            self._resume_stall_timers()

    def measure_duration(self, clock: Clock) -> float:
        """Return the seconds that the run has been at work, without the time in which a conversation waited."""
        seconds = clock.monotonic() - self.started
        if self.task.conversation:
            seconds = max(0.0, seconds - self.view.measure_idle(clock.wall()) + self.idle_before)
        return seconds

    def stop_clocks(self) -> None:
        """Stop every clock for good: the run has its ending."""
        if self.deadline is not None:
            self.deadline.stop()
            self.deadline = None
        if self.stall_timer is not None:
            self.stall_timer.stop()
        if self.grace_timer is not None:
            self.grace_timer.cancel()

    # Calls

    def claim_call_id(self, wanted: str) -> str:
        """Return a call id that no earlier call of the run has. Answers, approvals and results refer to calls by this
        id."""
        if self.call_ids is None:
            self.call_ids = {}
        found, number = wanted, 2
        while found in self.call_ids:
            found, number = f"{wanted}-{number}", number + 1
        self.call_ids[found] = None
        return found

    def restore_call_ids(self, call_ids: Iterable[str]) -> None:
        self.call_ids = dict.fromkeys(call_ids) or None

    def seal_call(self, call_id: str, seal: str) -> None:
        """Remember the seal of the MCP tool that a call was judged by."""
        if self.sealed_calls is None:
            self.sealed_calls = {}
        self.sealed_calls[call_id] = seal

    def take_seal(self, call_id: str) -> str | None:
        """Return and forget the seal of a call, or None if no call of the run has one."""
        return self.sealed_calls.pop(call_id, "") if self.sealed_calls else None

    # Team

    def find_team(self) -> asyncio.Future[RunningTeam]:
        """Return a future of the team that this run leads. A member may ask for the team before it has begun."""
        if self.team is None:
            self.team = asyncio.get_running_loop().create_future()
        return self.team

    # Inbox

    def post_message(self, message: UserTurn) -> None:
        """Put a message in the inbox, to be read at the next turn."""
        self.inbox += (message,)
        self.wake()

    def restore_history(
        self, history: RunHistory, *, inbox: tuple[UserTurn, ...] = (), remote_tail: tuple[Event, ...] = ()
    ) -> None:
        """Give the run the history left by an earlier process or by the run it continues."""
        self.history = history
        self.inbox = inbox
        self.remote_tail = remote_tail

    def take_messages(self) -> tuple[UserTurn, ...]:
        messages, self.inbox = self.inbox, ()
        return messages

    def set_relay(self, relay: SendToPeer | None) -> None:
        self.relay = relay

    def wake(self) -> None:
        if self.news is not None:
            self.news.set()

    @property
    def waits_for_news(self) -> bool:
        """True while a background child lives and the inbox is empty."""
        if not self.inbox:
            for child in self.children:
                if child.background and not child.finished:
                    return True
        return False

    async def wait_for_news(self) -> None:
        """Wait until a message arrives or no background child is left."""
        news = self.news = asyncio.Event()
        while self.waits_for_news:
            news.clear()
            await news.wait()

    async def wait_for_message(self) -> None:
        """Wait until a message arrives or the conversation ends. The clocks are paused meanwhile."""
        if self.deadline is not None:
            self.deadline.pause()
        self._pause_stall_timers()
        news = self.news = asyncio.Event()
        try:
            while not self.inbox and not self.leaving:
                news.clear()
                await news.wait()
        finally:
            if self.deadline is not None:
                self.deadline.resume()
            self._resume_stall_timers()
