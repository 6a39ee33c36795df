"""The supervisor: makes runs, drives them, and sees that each ends exactly once. The one place that spawns.

Models, tools, profiles and places to run reach it as plans, people as an approver. It holds only what
the log cannot (tasks, slots, timers); everything else is a fold of the events it writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from msgspec import UNSET

from retinue.agent.runs import run_job
from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.caller import NOBODY, Caller
from retinue.core.context import CURRENT
from retinue.core.control import NO_OVERRIDES, Control, ResumeOverrides
from retinue.core.errors import DEPTH_EXCEEDED, NO_SLOT, ConfigError, LogError, NoSlot, RetinueError, SpawnRefused
from retinue.core.events import Delta, Event, Warned
from retinue.core.limits import DEFAULT_CONCURRENT, DEFAULT_DEPTH, DEFAULT_TURNS, Limits, Timeouts, clamp_asked
from retinue.core.messages import RunRef, UserTurn
from retinue.core.plans import Job, Plan, Planner
from retinue.core.ports import Approver, Clock, Log, Order, Policy, Prices, Receipt, Row, RuleBook, Ticket, ToolServers
from retinue.core.profiles import Profile, Task
from retinue.core.results import Ending, Status
from retinue.files.private import make_private_folder
from retinue.log.threads import read_histories
from retinue.remote.port import RemoteRun
from retinue.remote.runtime import RemoteRuntime
from retinue.remote.validator import Bounds
from retinue.supervisor import caller_limits as called
from retinue.supervisor import continued, steering
from retinue.supervisor import resume as going_on
from retinue.supervisor.adoption import Adoption, Peer
from retinue.supervisor.approvals import Desk, Terms
from retinue.supervisor.budgets import Account, open_account
from retinue.supervisor.endings import body_of, ending_of, stopped
from retinue.supervisor.links import RunLink
from retinue.supervisor.nodes import After, Node, stall_timer
from retinue.supervisor.places import context_of, folders_of, may_ask_ahead, row_of, spawned_of, system_of, ticket_of
from retinue.supervisor.policy import narrowed
from retinue.supervisor.remote_driver import drive_remote_run
from retinue.supervisor.resume import Ground
from retinue.supervisor.runfiles import RunFiles
from retinue.supervisor.scrubbing import tree_for
from retinue.supervisor.slots import SlotHolder
from retinue.supervisor.timers import Deadline
from retinue.supervisor.trees import Tree
from retinue.workspaces.run_folders import StateFolder, resolve_context_paths

DEFAULTS = Limits(turns=DEFAULT_TURNS, depth=DEFAULT_DEPTH, concurrent=DEFAULT_CONCURRENT)
LABEL_CHARACTERS = 30
_LOG = logging.getLogger(__name__)


def require_set(value: Any) -> Any:
    """Return a limit that has a value after all defaults are applied."""
    assert value is not UNSET
    return value


def child_seconds(order: Order, limits: Limits, timeouts: Timeouts) -> float | None:
    """Return the timeout of a child: the one asked for, its profile's, or the default. A model's wish is clamped."""
    own = timeouts.default if limits.seconds is UNSET else limits.seconds
    asked = order.task.timeout_seconds
    if asked is None:
        return own
    if not order.asked_by_model:
        return asked
    asked = clamp_asked(asked, (timeouts.minimum, timeouts.maximum))
    return asked if own is None or limits.seconds is UNSET else min(asked, own)


class Supervisor:
    """Owns every tree of one process and log."""

    def __init__(  # noqa: PLR0913 - every port it stands on, each by name
        self,
        log: Log,
        *,
        planner: Planner,
        state: StateFolder,
        clock: Clock,
        policy: Policy,
        approver: Approver | None,
        terms: Terms,
        book: RuleBook | None,
        limits: Limits,
        timeouts: Timeouts,
        prices: Prices,
        trace: Callable[[], str] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.log = log
        self.policy = policy
        self.desk = Desk(clock, approver=approver, terms=terms, book=book, project=state.project)
        self.prices = prices
        self.trees: dict[str, Tree] = {}
        self.servers: ToolServers | None = None
        self.control: Control = None  # type: ignore[assignment]  # set by the Control that owns the supervisor
        self._planner = planner
        self.state = self._state = state
        self._clock = clock
        self._limits = limits.over(DEFAULTS)
        self._timeouts = timeouts
        self.files = RunFiles(self.watch, state)
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._trace, self._on_close, self.caller = trace, on_close, NOBODY
        self.settle: Callable[[Node], Awaitable[None]] | None = None  # what a run waits for before it may have ended

    @property
    def is_unattended(self) -> bool:
        """True if nothing asks here: the mode is `yes`."""
        return getattr(self.policy, "mode", "") == "yes"

    # Spawning

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        """To be awaited before a run is spawned or taken up: the MCP servers it has tools from are there then, or have
        failed; `say` is told what is waited for. None stands for any profile."""
        if self.servers is not None:
            await self.servers.ready(profile, say)

    def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        after: After | None = None,
        caller: Caller | None = None,
    ) -> Node:
        """A primary run in a tree of its own. A wrong profile or model is a ConfigError, and then no run exists.
        One that a run elsewhere asked for is within what is left to that `caller`, of whose levels it takes one."""
        if self._closing:
            raise RetinueError("this Retinue is closed")
        call = called.CALL.get()
        caller = caller or (self.caller if call is None else call.caller)
        if caller.depth == 0:
            raise SpawnRefused(DEPTH_EXCEEDED.format(depth=0, limit=0, name=getattr(profile, "name", profile)))
        plan = self._planner.plan(profile, task=task, parent=None)
        own = plan.profile.limits
        whole = self._limits if limits is None else limits.over(self._limits)
        merged = own.over(self._limits) if limits is None else limits.over(own.over(self._limits))
        trace, kept = self._trace, limits
        if narrow is not None:
            whole, merged = narrow.narrow(whole), narrow.narrow(merged)
            kept = narrow.narrow(limits or Limits())
        if caller is not NOBODY:
            whole, merged = caller.narrow(whole), caller.narrow(merged)
            trace, kept = caller.trace or trace, caller.kept(limits, merged)
        account = open_account("", (whole, own), None, plan, self.prices)
        readable = resolve_context_paths(task.context_paths, base=self._state.project) if task.context_paths else []
        tree = tree_for(self.log, self._clock, require_set(merged.concurrent), trace)
        node = tree.root = self._add(tree, None, plan, task, readable, SlotHolder(None))
        node.max_depth, node.max_turns = require_set(merged.depth), require_set(merged.turns)
        seconds = merged.seconds if task.timeout_seconds is None else task.timeout_seconds
        node.seconds = caller.seconds(seconds, self._clock.wall())
        node.account = account
        if merged.stall is not UNSET:
            node.stall = stall_timer(node, merged.stall, self._clock, tree.write)
        order = Order(plan.profile, task, limits=kept)
        self._begin(tree, node, order if after is None else after.over(node, order))
        self.trees[tree.id] = tree
        return node

    def spawn_children(self, tree: Tree, parent: Node, orders: Sequence[Order]) -> list[Ticket]:
        """Runs below `parent`, all of them or none: SpawnRefused comes before the first is made."""
        checked = [(order, *self._check(parent, order)) for order in orders]
        return [ticket_of(self.make(tree, parent, *each)) for each in checked]

    def _check(self, parent: Node, order: Order) -> tuple[Plan, list[str], Account | None]:
        """Whether this may be, whoever asks. Depth is the registry's, never what a child says."""
        name = order.profile if isinstance(order.profile, str) else order.profile.name
        if parent.ending or parent.stopping is not None:
            raise SpawnRefused(f"Cannot spawn subagent '{name}': its parent is stopping.")
        call = called.CALL.get()
        if parent.depth >= parent.max_depth or (call is not None and not call.caller.may_spawn):
            limit = min(parent.depth, parent.max_depth)
            raise SpawnRefused(DEPTH_EXCEEDED.format(depth=parent.depth, limit=limit, name=name))
        try:
            plan = self._planner.plan(
                order.profile, task=order.task, parent=parent.plan, given=not order.asked_by_model
            )
            base = parent.folders.path if order.asked_by_model else self._state.project
            readable = resolve_context_paths(order.task.context_paths, base=base) if order.task.context_paths else []
            above = parent.account if call is None else call.shared(parent.account)
            account = open_account(name, (plan.profile.limits,), above, plan, self.prices)
        except ConfigError as error:
            raise SpawnRefused(str(error)) from None
        return plan, readable, account

    def make(
        self, tree: Tree, parent: Node, order: Order, plan: Plan, readable: list[str], account: Account | None
    ) -> Node:
        slot = SlotHolder(tree.slots)
        if order.queue and tree.slots.limit != 0:
            slot.acquire_or_enqueue()
        elif not slot.try_acquire():
            raise NoSlot(NO_SLOT.format(name=plan.profile.name))
        node = self._add(tree, parent, plan, order.task, readable, slot)
        limits = plan.profile.limits
        node.max_depth = parent.max_depth if limits.depth is UNSET else min(parent.max_depth, node.depth + limits.depth)
        node.max_turns = require_set(self._limits.turns) if limits.turns is UNSET else limits.turns
        node.seconds = child_seconds(order, limits, self._timeouts)
        called.narrow(node, self._clock)
        node.account = account
        if limits.stall is not UNSET or parent.stall is not None:
            node.stall = stall_timer(node, limits.stall, self._clock, tree.write)
        node.background = order.background
        node.queues = order.queue
        self._begin(tree, node, order)
        return node

    def _add(
        self, tree: Tree, parent: Node | None, plan: Plan, task: Task, readable: list[str], slot: SlotHolder
    ) -> Node:
        number = len(tree.nodes)
        agent = plan.profile.name
        if parent is None:
            path, wanted = "/main", "main"
        else:
            path, wanted = f"{parent.ref.path}/{agent}-{number}", " ".join(task.text.split())[:LABEL_CHARACTERS]
        label = tree.unique_label(task.label or task.subagent_id or wanted or agent)
        subagent_id = task.subagent_id or f"{agent}_{hex(time.time_ns())[2:]}"
        ref = RunRef(tree.id, number, path, label, agent, subagent_id)
        folders = folders_of(self._state, ref, parent, plan, task, readable)
        policy = self.policy if parent is None else parent.policy
        policy = narrowed(policy, plan.profile.approvals, self._state.project)
        node = Node(ref, plan, task, parent, folders, policy, slot)
        tree.nodes.append(node)
        if parent is not None:
            node.depth = parent.depth + 1
            parent.children += (node,)
        return node

    def _begin(self, tree: Tree, node: Node, order: Order) -> None:
        """Writes `run.spawned` before anything else can be said of the run, then starts driving it."""
        ref = node.ref
        node.link = RunLink(self, tree, node, ref)
        written = tree.open(node, spawned_of(tree, node, order))
        for note in node.plan.notes:
            tree.write(node, note)
        if node.parent is not None:
            _LOG.info("Spawned sub-agent %d with label '%s'", ref.run, ref.label)
        if order.files:
            self.files.keep(tree.id, ref.run)
        self._go(tree, node, written)

    def adopt_runs(self, tree: str, peer: Peer, remote: RemoteRun, *, bounds: Bounds | None = None) -> Adoption | None:
        """Return what adopts the runs that a peer reports in a tree; None when the tree is not at work."""
        found = self.trees.get(tree)
        if found is None:
            return None
        return Adoption(found, peer, remote, clock=self._clock, state=self._state, desk=self.desk, bounds=bounds)

    async def resume(self, tree: str, given: ResumeOverrides = NO_OVERRIDES) -> Node:
        """Goes on with a tree whose process is gone; the run it ends with. A ConfigError says why it cannot, LogHeld
        that another process has the right to write it."""
        await self.log.claim(tree)
        return going_on.resume(self._ground(), tree, await read_histories(self.log, tree), given)

    async def continue_run(self, tree: str, run: int, text: str, given: ResumeOverrides = NO_OVERRIDES) -> Node:
        """A new run that begins with the thread of one that has ended, and these words."""
        histories = await read_histories(self.log, tree)
        if run != 0 and tree in histories:  # a primary is continued in a tree of its own
            await self.log.claim(tree)
        return continued.continue_run(self._ground(), tree, run, text, histories, given)

    def _ground(self) -> Ground:
        of_tree = self.log, self._planner, self._state, self._clock, self._limits
        return Ground(self, *of_tree, self.files.keep, self._go)

    def _go(self, tree: Tree, node: Node, written: Awaitable[None] | None) -> None:
        node.task = self._loop.create_task(self._drive(tree, node, written), name=node.ref.path)

    # Driving

    async def _drive(self, tree: Tree, node: Node, written: Awaitable[None] | None) -> None:
        """One run from `run.spawned` to `run.ended`, whatever happens in between."""
        node.driving = True
        node.started = self._clock.monotonic()
        try:
            job = None
            if node.stopping is None:
                if written is not None and may_ask_ahead(tree, node):
                    node.written = asyncio.ensure_future(written)
                elif written is not None:
                    await written
                await node.slot.acquire()
                job = self._start(tree, node)
            ending = stopped(node) if job is None else await self._work(tree, node, job)
            if self.settle is not None:
                await self.settle(node)
            if node.stopping is not None:
                ending = stopped(node)
        except asyncio.CancelledError:
            ending = stopped(node)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to everything a run can do
            ending = ending_of(node, error) if node.stopping is None else stopped(node)
        if not node.ending:
            await self._end(tree, node, ending)

    async def _work(self, tree: Tree, node: Node, job: Job) -> Ending:
        runtime = node.plan.runtime
        if not isinstance(runtime, RemoteRuntime) or runtime.adapter is None:
            return await run_job(job, node.link)
        if runtime.prepare is not None:
            await runtime.prepare(job, node.link)
        return await drive_remote_run(tree, node, runtime.adapter, clock=self._clock, state=self._state, desk=self.desk)

    def _start(self, tree: Tree, node: Node) -> Job | None:
        """What the runtime gets, from now on the clock; None for a run that has no time at all."""
        past = node.past
        used = 0.0 if past is None else past.seconds
        node.started = self._clock.monotonic() - used
        if node.seconds is not None:
            if node.seconds <= used:
                node.stopping = "timed_out"
                return None
            node.deadline = Deadline(node.seconds - used, self._clock, node.time_out)
        if node.stall is not None:
            node.stall.start()
        started = node.plan.runtime.started
        if started is not None and (past is None or node.view.place != started):
            tree.write(node, started)
        if self.files.keeps(tree.id, node.ref.run):
            make_private_folder(node.folders.path)
        plan, task = node.plan, node.wish
        if plan.host or plan.profile.call is not None:
            CURRENT.set(context_of(node))
        elif CURRENT.get() is not None:  # the parent's, which is not this run's
            CURRENT.set(None)
        return Job(
            ref=node.ref,
            plan=plan,
            task=task,
            system=system_of(node),
            max_turns=node.max_turns,
            thread=(UserTurn(task.text),) if past is None else past.thread,
            folders=node.folders,
            tools=plan.by_name,
            context=node.context,
            past=past,
        )

    async def _end(self, tree: Tree, node: Node, ending: Ending) -> None:
        """Ends what is below, then the run; the ending is written before anybody is told."""
        node.ending = True
        node.slot.stop()
        try:
            for child in node.children:
                child.stop("cancelled")
            for child in node.children:
                if not child.finished:
                    await child.join()
        except asyncio.CancelledError:
            pass  # told twice; the ending below is written all the same
        node.stop_clocks()
        node.slot.leave()
        if ending.status == "done" and not ending.text and ending.structured is None:
            tree.write(node, Warned("the run ended without any text", code="empty_result"))
        duration = round((self._clock.monotonic() - node.started) * 1000)
        written = tree.write(node, body_of(node, ending, duration_ms=duration), True)
        try:
            if written is not None:
                await written
        except (LogError, asyncio.CancelledError):
            pass  # the result stands; that the log did not take it is told by whoever closes the log
        if node is tree.root:
            self.trees.pop(tree.id, None)
            self.desk.forget(tree.id)
            tree.let_go()
        elif node.background and node.parent is not None and not node.parent.ending:
            steering.notify(tree, node.parent, node)
        node.finish()

    def give_grace(self, node: Node) -> None:
        """Some time to stop, from now on."""
        node.grace = self._clock.call_later(node.plan.runtime.grace, lambda: self._abandon(node))

    def _abandon(self, node: Node) -> None:
        """A run that does not stop when told is ended without it; whatever it still says is not heard."""
        tree = self.trees.get(node.ref.tree)
        if tree is None or node.ending:
            return
        grace = node.plan.runtime.grace
        tree.write(node, Warned(f"did not stop within {grace:g} s and was abandoned", code="abandoned"))
        node.task = asyncio.create_task(self._end(tree, node, stopped(node)))

    # Looking and commanding

    def rows_below(self, tree: Tree, node: Node) -> list[Row]:
        """Every run below this one, in the order they were made; ended ones stay listed."""
        return [
            row_of(view, tree.id) for view in sorted(node.view.walk(), key=lambda v: v.number) if view is not node.view
        ]

    def pending(self, tree: str | None = None) -> list[Approval]:
        """The questions that wait for an answer, in the order they came."""
        return self.desk.pending(tree)

    def answer(self, approval_id: str, decision: Decision, *, by: str, digest: str = "") -> Answered:
        """Answers a question, whoever else was asked: the first answer is taken, a later one is stale. With a digest
        it counts only for exactly the action that was shown with it."""
        return self.desk.answer(approval_id, decision, by=by, digest=digest)

    async def cancel(self, tree: str, run: int = 0, *, status: Status = "cancelled") -> bool:
        """Stops a run and all below it; False when there is nothing to stop (ended, stopping already, unknown)."""
        found = self.trees.get(tree)
        if found is None or not 0 <= run < len(found.nodes):
            return False
        return found.nodes[run].stop(status)

    async def send(self, tree: str, run: int, text: str, *, source: str = steering.SOURCE) -> Receipt:
        """The user's words for a run, read at its next turn; `source` says whose they are if not the user's."""
        return await steering.send(self.trees.get(tree), run, text, source=source)

    def kill(self, tree: str) -> None:
        """The second Ctrl-C: whatever still cleans up is told again, and ends at once."""
        found = self.trees.get(tree)
        for node in found.nodes if found is not None else ():
            node.stop("cancelled")
            if node.task is not None and node.driving and not node.ending:
                node.task.cancel()

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        return self.log.watch(tree, after=after, deltas=deltas)

    async def close(self) -> None:
        """Cancels what still runs, waits for the endings, and lets the log go."""
        self._closing = True
        primaries = [tree.root for tree in self.trees.values() if tree.root is not None]
        for node in primaries:
            node.stop("cancelled")
        for node in primaries:
            await node.join()
        await self.desk.close()
        try:
            if self._on_close is not None:
                await self._on_close()
        finally:
            await self.files.close()
            await self.log.close()
            self._state.remove_temporary()
