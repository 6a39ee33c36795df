"""One tree and its live runs, with everything that the log does not hold: slots, clocks, waiters and the order of
events. Also the registry of the live trees of this process.

Writing an event means to number it, fold it into the tree's view and append it to the log. If secrets are known, every
event is redacted first, so that log, results, screens and files are clean alike. A run whose event the log refuses,
because this process may no longer write, is stopped: every run of the tree at its next event.

Knows timers, slots and budgets, but not how a run is spawned, driven or restored. Other modules read the fields of a
Run or a Tree, and change them only through their methods.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from retinue.concurrency import Deadline, StallTimer
from retinue.core import secrets
from retinue.core.context import Context
from retinue.core.errors import LogLost, RetinueError
from retinue.core.events import Body, Delta, Event, RunSpawned, Warned, redact
from retinue.core.messages import RunRef, UserTurn
from retinue.core.plans import Plan, RunHistory
from retinue.core.ports import STATUS_FILE, Clock, Log, Policy, Receipt, RunningTeam, SpawnedRun, Timer
from retinue.core.profiles import Task
from retinue.core.results import Result, Status
from retinue.core.traces import NO_ORIGIN, FindOrigin, TraceOrigin
from retinue.log.runs import FOLDS, Runs, RunView
from retinue.supervisor.budgets import Account
from retinue.supervisor.slots import SlotHolder, Slots
from retinue.workspaces.run_folders import RunFolders

_DIGITS = b"0123456789abcdefghjkmnpqrstvwxyz"  # without letters that look like digits
_DIGIT_OF_BYTE = _DIGITS * 8
_RANDOM = random.Random()  # not the generator of `random` itself, which a program may seed
os.register_at_fork(after_in_child=_RANDOM.seed)
AnswerKey = tuple[int | None, int | None, str]
"""What an answer for more than one call covers: the run (None for all runs), the run at whose peer the tool works (None
for a tool of ours), and the tool with its seal."""
_NO_ANSWERS: Mapping[AnswerKey, StandingAnswer] = {}
W = TypeVar("W", bound=Log)
LEFT_OPEN = "{tree} was left open: `retinue resume {tree}` resumes it"
STALLED = "stalled: nothing has happened in this run for {seconds:g} s; it ends after as long again"
SendToPeer = Callable[[str, str], Awaitable[Receipt]]  # the text, and the message id of a client


def new_tree_id() -> str:
    """Return twelve random characters, unique across processes and machines without coordination. Ids differ from the
    first character on, because people type only the beginning."""
    return _RANDOM.getrandbits(96).to_bytes(12, "big").translate(_DIGIT_OF_BYTE).decode()


def new_span_id() -> str:
    """Return the id of a run's span, as traces write it."""
    return _RANDOM.getrandbits(64).to_bytes(8, "big").hex()


class StandingAnswer(NamedTuple):
    """An answer for more than one call. `words` describe it. An answer `is_restored` if an earlier process got it."""

    words: str
    is_restored: bool


class Tree:
    """The unit of limits, cancellation and event order. `root` is the run that the tree ends with: its primary, or a
    new run that continues an ended run in a finished tree. `is_over` means that the root has ended.

    `asked` counts the questions of the tree. `standing_answers` are answers for more than one call."""

    __slots__ = (
        "_labels", "asked", "clock", "id", "is_over", "log", "now", "root", "runs", "seq", "slots", "standing_answers",
        "trace_id", "trace_origin", "view",
    )  # fmt: skip

    def __init__(
        self,
        log: Log,
        clock: Clock,
        *,
        concurrent: int | None = None,
        trace: FindOrigin | None = None,
        restored: Runs | None = None,
        seq: int = 0,
    ) -> None:
        """Make a new tree, or rebuild the tree of an earlier process from the view `restored`, which ends with the
        event `seq`."""
        self.id = new_tree_id() if restored is None else restored.tree
        self.trace_origin = NO_ORIGIN if trace is None else trace()
        self.trace_id = self.trace_origin.traceparent[3:35] or _RANDOM.getrandbits(128).to_bytes(16, "big").hex()
        self.runs: list[Run] = []
        self.view = Runs(self.id) if restored is None else restored
        self.slots = Slots(concurrent)
        self.log: Log = log
        self.clock = clock
        self.now = clock.wall
        self.root: Run | None = None
        self.is_over = False
        self.seq = seq
        self.asked = 0
        self.standing_answers = _NO_ANSWERS
        self._labels: dict[str, int] = {}
        if restored is not None:
            first = restored.runs[0].spawned
            self.trace_id, self.trace_origin = first.trace_id, TraceOrigin(first.traceparent, first.baggage)
            self._labels = {view.label: 1 for view in restored.runs.values()}

    def add_run(self, run: Run) -> None:
        """Add a run to the tree and to the children of its parent."""
        self.runs.append(run)
        if run.parent is not None:
            run.parent.children += (run,)

    def find_run(self, number: int) -> Run | None:
        return self.runs[number] if 0 <= number < len(self.runs) else None

    def wrap_log(self, wrap: Callable[[Log], W]) -> W:
        """Wrap the tree's log, so that the wrapper sees every event from now on. Return the wrapper."""
        self.log = wrapped = wrap(self.log)
        return wrapped

    def name_next_run(self, parent: Run | None, agent: str, *, label: str, subagent_id: str) -> RunRef:
        """Return the names of the next run of the tree. If the tree has the `label` already, the label of the run ends
        in `-2`, `-3` and so on."""
        number, wanted = len(self.runs), label
        while label in self._labels:
            self._labels[wanted] += 1
            label = f"{wanted}-{self._labels[wanted]}"
        self._labels[label] = 1
        path = "/main" if parent is None else f"{parent.ref.path}/{agent}-{number}"
        return RunRef(tree=self.id, run=number, path=path, label=label, agent=agent, subagent_id=subagent_id)

    def count_question(self) -> int:
        """Count a question, also one that is answered elsewhere. Return its number in the tree."""
        self.asked += 1
        return self.asked

    def remember_answer(self, key: AnswerKey, answer: StandingAnswer) -> None:
        self.standing_answers = {**self.standing_answers, key: answer}

    def kill(self) -> None:
        """Stop all runs at once, without waiting for their cleanup."""
        for run in self.runs:
            run.kill()

    def release(self) -> None:
        """Cut the reference cycles of an ended tree, so that its memory is freed without a garbage collection."""
        for run in self.runs:
            run.release()
        self.runs, self.root, self.is_over = [], None, True


class TreeRegistry(dict[str, Tree]):
    """The live trees of this process, by id, and their log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def add(self, tree: Tree, root: Run) -> None:
        """Add a tree that ends when its `root` ends."""
        tree.root = root
        self[tree.id] = tree

    def find_run(self, tree: str, number: int) -> Run | None:
        """Return a run of a live tree, or None."""
        found = self.get(tree)
        return None if found is None else found.find_run(number)


class Run(msgspec.Struct, eq=False, gc=False):
    """A run and its place in the tree. It is also the TeamPlace and the LocalCalls of its Link."""

    tree: Tree
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
    on_stop: Callable[[Run], Timer] | None = None  # returns the timer that ends the run after its grace period
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
    def peer_number(self) -> int | None:
        """The number of the highest run of the lineage that a peer executes, or None for a run of ours."""
        found = [run for run in self.lineage if run.view.remote is not None or run.view.spawned.remote_id]
        return found[-1].ref.run if found else None

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

    # Its events

    def open(self, body: RunSpawned) -> Awaitable[None] | None:
        """Add the run to its tree, and write its first event."""
        tree, ref = self.tree, self.ref
        tree.add_run(self)
        if secrets.known:
            body = redact(body)
        tree.seq += 1
        # Positional here and in `write`: keywords take 0.5 % of the instructions of a run (`bench counts`).
        event = Event(tree.seq, tree.id, ref.run, ref.path, ref.agent, tree.now(), body)
        self.view = tree.view.spawn(event, body)
        try:
            return tree.log.append(event, True)
        except LogLost as lost:
            return self._stop_unlogged(lost, wait=True)

    def write(self, body: Body, wait: bool = False, /) -> Awaitable[None] | None:
        """Write an event of the run. Does nothing after the ending of the run. With `wait`, the returned awaitable, if
        any, is done when the event is in the log."""
        view, tree = self.view, self.tree
        if view.ended is not None:
            return None
        if secrets.known:
            body = redact(body)
        tree.seq = seq = tree.seq + 1
        if self.stall_timer is not None:
            self.stall_timer.record_activity()
            view.record_event(seq)  # only the state `stalled` asks for the newest event of a live run
        ref, now = self.ref, tree.now  # a local name: `tree.now()` would look for a method first
        event = Event(seq, tree.id, ref.run, ref.path, ref.agent, now(), body)  # type: ignore[arg-type] # one of KINDS
        apply_body = FOLDS[type(body)]  # as in `RunView.apply`: the call alone is 4 % of a run (`bench counts`)
        if apply_body is not None:
            apply_body(view, body, event)
        try:
            return tree.log.append(event, wait)
        except LogLost as lost:
            return self._stop_unlogged(lost, wait=wait)

    def _stop_unlogged(self, lost: LogLost, *, wait: bool) -> Awaitable[None] | None:
        """Stop a run whose event was refused. The awaitable raises `lost`, but not at once: a run that awaits it is
        cancelled first, like any run that is stopped, and can clean up."""
        self.stop("cancelled", failure=str(lost))
        if not wait:
            return None
        loop = asyncio.get_running_loop()
        refused: asyncio.Future[None] = loop.create_future()
        loop.call_soon(_fail_quietly, refused, lost)
        return refused

    def show_delta(self, kind: str, text: str, turn: int = 0, offset: int = 0, *, call_id: str = "") -> None:
        """Show a piece of a reply, with its offset in the reply, or a piece of a call's output. It is never stored."""
        tree, ref = self.tree, self.ref
        if self.ending:
            return
        self.record_activity()
        delta = Delta(
            tree=ref.tree,
            run=ref.run,
            path=ref.path,
            agent=ref.agent,
            text=text,
            kind=kind,
            turn=turn,
            offset=offset,
            call_id=call_id,
        )
        if self.first_write is None:
            tree.log.show(delta)
        else:  # in order, and not before `run.spawned` is written
            self.first_write.add_done_callback(partial(_show_when_written, tree.log, delta))

    def next_approval_id(self) -> str:
        """Return a new approval id, made of the number of the next event. No text of a model or a peer goes into the
        id."""
        return f"{self.tree.id}/{self.ref.run}/{self.tree.seq + 1}"

    # Starting and ending

    def attach_driver(self, task: asyncio.Task[None], on_stop: Callable[[Run], Timer]) -> None:
        """Remember the task that drives the run, and the callback that starts the grace period when the run is
        stopped."""
        self.driver_task, self.on_stop = task, on_stop

    def begin_driving(self) -> None:
        self.driving = True
        self.started = self.tree.clock.monotonic()

    def ask_ahead(self, written: Awaitable[None]) -> None:
        """Let the run ask its model before its first event is on disk."""
        self.first_write = asyncio.ensure_future(written)

    async def wait_for_first_write(self) -> None:
        if self.first_write is not None:
            written, self.first_write = self.first_write, None
            await written

    def start_clocks(self) -> bool:
        """Start the deadline and the stall timer. If no time is left, mark the run as timed out and return False."""
        clock, used = self.tree.clock, 0.0 if self.history is None else self.history.seconds
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
                self.grace_timer = self.on_stop(self)
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
        elif self.waiters:
            self.waiters = (*[each for each in self.waiters if not each.done()], waiter)  # without cancelled ones
        else:
            self.waiters = (waiter,)
        return waiter

    # Clocks

    def set_stall_timer(self, seconds: float | UnsetType | None) -> None:
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
            self.tree.clock,
            parent=parent,
            is_queued=self.is_queued_below,
            warn=partial(self.write, Warned(text, code="stalled")),
            on_expire=self.time_out,
        )

    def is_queued_below(self) -> bool:
        """Return True if the run or a run below it waits for a slot."""
        return self.slot.is_queued or any(child.is_queued_below() for child in self.children)

    def record_activity(self) -> None:
        if self.stall_timer is not None:
            self.stall_timer.record_activity()

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

    def on_question(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        """Call `listener` with True when a person is asked and with False when the question is closed. Questions that
        are open now count as just asked. Return a function that removes the listener."""
        for _ in range(self.questions):
            listener(True)
        self.question_listeners += (listener,)
        return partial(self._remove_question_listener, listener)

    def _remove_question_listener(self, listener: Callable[[bool], None]) -> None:
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

    def measure_duration(self) -> float:
        """Return the seconds that the run has been at work, without the time in which a conversation waited."""
        clock = self.tree.clock
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
        claimed = self.call_ids
        if claimed is None:
            claimed = self.call_ids = {}
        found, number = wanted, 2
        while found in claimed:
            found, number = f"{wanted}-{number}", number + 1
        claimed[found] = None
        return found

    def show_output(self, call_id: str, text: str) -> None:
        """Show a piece of a call's output to current watchers."""
        if text:
            self.show_delta("output", text, call_id=call_id)

    # Its team

    def lead_team(self, team: RunningTeam) -> None:
        self._find_team().set_result(team)

    async def join_team(self) -> RunningTeam:
        assert self.parent is not None
        return await asyncio.shield(self.parent._find_team())

    async def wait_for_others(self, awaited: Awaitable[None]) -> None:
        await self.without_stall_timer(self.slot.wait_without_slot(awaited))

    def _find_team(self) -> asyncio.Future[RunningTeam]:
        """Return a future of the team that this run leads. A member may ask for the team before it has begun."""
        if self.team is None:
            self.team = asyncio.get_running_loop().create_future()
        return self.team

    # Its inbox

    def post_message(self, message: UserTurn) -> None:
        """Put a message in the inbox, to be read at the next turn."""
        self.inbox += (message,)
        self.wake()

    def restore_history(
        self,
        history: RunHistory,
        *,
        inbox: tuple[UserTurn, ...] = (),
        call_ids: Iterable[str] = (),
        remote_tail: tuple[Event, ...] = (),
    ) -> None:
        """Give the run the history left by an earlier process or by the run it continues."""
        self.history, self.inbox, self.remote_tail = history, inbox, remote_tail
        self.call_ids = dict.fromkeys(call_ids) or None

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


def _show_when_written(log: Log, delta: Delta, written: asyncio.Future[None]) -> None:
    if not written.cancelled() and written.exception() is None:
        log.show(delta)


def _fail_quietly(waiter: asyncio.Future[None], error: LogLost) -> None:
    """Fail a waiter, unless it was cancelled. Nobody need await it."""
    if not waiter.done():
        waiter.set_exception(error)
        waiter.exception()
