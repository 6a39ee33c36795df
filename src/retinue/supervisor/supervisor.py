"""The supervisor: makes runs, drives them, and sees that each ends exactly once. The one place that spawns.

Models, tools, profiles and places to run reach it as plans, people as an approver. It holds only what
the log cannot (tasks, slots, timers); everything else is a fold of the events it writes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from msgspec import UNSET

from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.context import CURRENT, METADATA_MAX_SUBAGENT_DEPTH, METADATA_SUBAGENT_DEPTH, Context
from retinue.core.errors import ConfigError, LogError, NoSlot, RetinueError, SpawnRefused, ToolError
from retinue.core.events import Delta, Event, Inbox, RunSpawned, Warned
from retinue.core.limits import DEFAULT_CONCURRENT, DEFAULT_DEPTH, DEFAULT_TURNS, Limits
from retinue.core.messages import RunRef, UserTurn
from retinue.core.plans import Job, Plan, Planner
from retinue.core.ports import Approver, Clock, Log, Order, Policy, Prices, Receipt, Row, RuleBook, Ticket
from retinue.core.profiles import Profile, Task
from retinue.core.results import Ending, Result, Status
from retinue.runtime.folders import StateFolder, context_paths, private_folder
from retinue.supervisor import seats, steering
from retinue.supervisor.approvals import Desk, Terms
from retinue.supervisor.budgets import Account
from retinue.supervisor.deadlines import Deadline
from retinue.supervisor.endings import body_of, ending_of, stopped
from retinue.supervisor.links import RunLink
from retinue.supervisor.nodes import Node
from retinue.supervisor.places import folders_of, row_of, system_of
from retinue.supervisor.policy import narrowed
from retinue.supervisor.runfiles import RunFiles
from retinue.supervisor.spending import account_of
from retinue.supervisor.stalls import stall_of
from retinue.supervisor.timeouts import Timeouts, child_seconds
from retinue.supervisor.trees import Tree

DEPTH_EXCEEDED = (
    "Subagent depth limit exceeded ({depth}/{limit}). "
    "Cannot spawn nested subagent '{name}' \u2014 maximum nesting depth reached."
)
NO_SLOT = (
    "Cannot spawn subagent '{name}': maximum concurrent subagent limit reached. "
    "Try again when another subagent completes."
)
DEFAULTS = Limits(turns=DEFAULT_TURNS, depth=DEFAULT_DEPTH, concurrent=DEFAULT_CONCURRENT)
LABEL_CHARACTERS = 30
_LOG = logging.getLogger(__name__)


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
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.log = log
        self.policy = policy
        self.desk = Desk(clock, approver=approver, terms=terms, book=book, project=state.project)
        self.prices = prices
        self.trees: dict[str, Tree] = {}
        self._planner = planner
        self._state = state
        self._clock = clock
        self._limits = limits.over(DEFAULTS)
        self._timeouts = timeouts
        self._files = RunFiles(log, state)
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._on_close = on_close

    # Spawning

    def spawn(self, profile: Profile | str, task: Task, *, limits: Limits | None = None) -> Node:
        """A primary run in a tree of its own. A wrong profile or model is a ConfigError, and then no run exists."""
        if self._closing:
            raise RetinueError("this Retinue is closed")
        plan = self._planner.plan(profile, task=task, parent=None)
        own = plan.profile.limits
        whole = self._limits if limits is None else limits.over(self._limits)
        merged = own.over(self._limits) if limits is None else limits.over(own.over(self._limits))
        account = account_of("the tree", whole, own, parent=None, plan=plan, prices=self.prices)
        tree = Tree(self.log, self._clock, concurrent=_set(merged.concurrent))
        readable = context_paths(task.context_paths, base=self._state.project) if task.context_paths else []
        node = self._add(tree, None, plan, task, readable)
        node.max_depth = _set(merged.depth)
        node.max_turns = _set(merged.turns)
        own_seconds = None if merged.seconds is UNSET else merged.seconds
        node.seconds = own_seconds if task.timeout_seconds is None else task.timeout_seconds
        node.account = account
        node.stall = stall_of(node, merged.stall, self._clock, tree.write)
        self._begin(tree, node, Order(plan.profile, task))
        self.trees[tree.id] = tree
        return node

    def spawn_children(self, tree: Tree, parent: Node, orders: Sequence[Order]) -> list[Ticket]:
        """Runs below `parent`, all of them or none: SpawnRefused comes before the first is made."""
        checked = [self._check(parent, order) for order in orders]
        return [self._make(tree, parent, order, *plan) for order, plan in zip(orders, checked, strict=True)]

    def _check(self, parent: Node, order: Order) -> tuple[Plan, list[str], Account | None]:
        """Whether this may be, whoever asks. Depth is the registry's, never what a child says."""
        name = order.profile if isinstance(order.profile, str) else order.profile.name
        if parent.ending or parent.stopping is not None:
            raise SpawnRefused(f"Cannot spawn subagent '{name}': its parent is stopping.")
        if parent.depth >= parent.max_depth:
            raise SpawnRefused(DEPTH_EXCEEDED.format(depth=parent.depth, limit=parent.max_depth, name=name))
        try:
            plan = self._planner.plan(
                order.profile, task=order.task, parent=parent.plan, given=not order.asked_by_model
            )
            base = parent.folders.path if order.asked_by_model else self._state.project
            readable = context_paths(order.task.context_paths, base=base) if order.task.context_paths else []
            limits, above = plan.profile.limits, parent.account
            account = account_of(f"'{name}'", limits, parent=above, plan=plan, prices=self.prices)
        except ConfigError as error:
            raise SpawnRefused(str(error)) from None
        return plan, readable, account

    def _make(
        self, tree: Tree, parent: Node, order: Order, plan: Plan, readable: list[str], account: Account | None
    ) -> Ticket:
        has_slot = tree.slots.take_now()
        if not has_slot and (not order.queue or tree.slots.limit == 0):
            raise NoSlot(NO_SLOT.format(name=plan.profile.name))
        node = self._add(tree, parent, plan, order.task, readable)
        node.holds_slot = has_slot
        node.place = None if has_slot else tree.slots.line_up()
        limits = plan.profile.limits
        node.max_depth = parent.max_depth if limits.depth is UNSET else min(parent.max_depth, node.depth + limits.depth)
        node.max_turns = _set(self._limits.turns) if limits.turns is UNSET else limits.turns
        node.seconds = child_seconds(order, limits, self._timeouts)
        node.account = account
        node.stall = stall_of(node, limits.stall, self._clock, tree.write)
        node.background = order.background
        node.queues = order.queue
        self._begin(tree, node, order)
        status_file = f"{node.folders.own}/full_logs/status.json"
        return Ticket(node.ref.run, node.ref, node.folders.path, node.seconds, status_file)

    def _add(self, tree: Tree, parent: Node | None, plan: Plan, task: Task, readable: list[str]) -> Node:
        number = len(tree.nodes)
        agent = plan.profile.name
        if parent is None:
            path, wanted = "/main", "main"
        else:
            path, wanted = f"{parent.ref.path}/{agent}-{number}", " ".join(task.text.split())[:LABEL_CHARACTERS]
        label = tree.unique_label(task.label or task.subagent_id or wanted or agent)
        subagent_id = task.subagent_id or f"{agent}_{time.time_ns():x}"
        ref = RunRef(tree.id, number, path, label, agent, subagent_id)
        folders = folders_of(self._state, ref, parent, plan.profile, task, readable)
        policy = self.policy if parent is None else parent.policy
        node = Node(ref, plan, task, parent, folders, narrowed(policy, plan.profile.approvals, self._state.project))
        tree.nodes.append(node)
        if parent is not None:
            node.depth = parent.depth + 1
            parent.children += (node,)
        return node

    def _begin(self, tree: Tree, node: Node, order: Order) -> None:
        """Writes `run.spawned` before anything else can be said of the run, then starts driving it."""
        plan, ref, task = node.plan, node.ref, node.wish
        own = None if node.parent is not None and node.account is node.parent.account else node.account
        body = RunSpawned(
            None if node.parent is None else node.parent.ref.run,
            ref.label,
            node.depth,
            task.text,
            ref.subagent_id,
            node.folders.path,
            plan.profile_json,
            plan.tools_json,
            task_context=task.context,
            model=plan.model_name,
            call_id=order.call_id,
            background=order.background,
            queued=node.place is not None,
            timeout_seconds=node.seconds,
            max_turns=node.max_turns,
            max_tokens=None if own is None else own.tokens,
            max_cost=None if own is None else own.cost,
            stall_seconds=None if node.stall is None else node.stall.seconds,
            trace_id=tree.trace_id,
            span_id=f"{random.getrandbits(64):016x}",
        )
        node.link = RunLink(self, tree, node)
        written = tree.open(node, body)
        if node.parent is not None:
            _LOG.info("Spawned sub-agent %d with label '%s'", ref.run, ref.label)
        if order.files:
            self._files.keep(tree.id, ref.run)
        node.task = self._loop.create_task(self._drive(tree, node, written))

    # Driving

    async def _drive(self, tree: Tree, node: Node, written: Awaitable[None] | None) -> None:
        """One run from `run.spawned` to `run.ended`, whatever happens in between."""
        node.driving = True
        node.started = self._clock.monotonic()
        try:
            job = None
            if node.stopping is None:
                if written is not None:
                    await written
                if node.parent is not None and not node.holds_slot:
                    await seats.take(tree, node)
                job = self._start(tree, node)
            ending = stopped(node) if job is None else await node.plan.runtime.run(job, node.link)
            if node.stopping is not None:
                ending = stopped(node)
        except asyncio.CancelledError:
            ending = stopped(node)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to everything a run can do
            ending = ending_of(node, error) if node.stopping is None else stopped(node)
        if not node.ending:
            await self._end(tree, node, ending)

    def _start(self, tree: Tree, node: Node) -> Job | None:
        """What the runtime gets, from now on the clock; None for a run that has no time at all."""
        node.started = self._clock.monotonic()
        if node.seconds is not None:
            if node.seconds <= 0:
                node.stopping = "timed_out"
                return None
            node.deadline = Deadline(node.seconds, self._clock, node.time_out)
        if node.stall is not None:
            node.stall.start()
        if (started := node.plan.runtime.started) is not None:
            tree.write(node, started)
        if self._files.keeps(tree.id, node.ref.run):
            private_folder(node.folders.path)
        plan, task = node.plan, node.wish
        if plan.host or plan.profile.call is not None:
            CURRENT.set(self._context(node))
        elif CURRENT.get() is not None:  # the parent's, which is not this run's
            CURRENT.set(None)
        thread = (UserTurn(task.text),)
        return Job(node.ref, plan, task, system_of(node), node.max_turns, thread, node.folders, node.context)

    async def _end(self, tree: Tree, node: Node, ending: Ending) -> None:
        """Ends what is below, then the run; the ending is written before anybody is told."""
        node.ending = True
        try:
            for child in node.children:
                child.stop("cancelled")
            for child in node.children:
                if not child.finished:
                    await child.join()
        except asyncio.CancelledError:
            pass  # told twice; the ending below is written all the same
        node.stop_clocks()
        seats.leave(tree, node)
        if ending.status == "done" and not ending.text and ending.structured is None:
            tree.write(node, Warned("the run ended without any text", code="empty_result"))
        duration = round((self._clock.monotonic() - node.started) * 1000)
        written = tree.write(node, body_of(node, ending, duration_ms=duration), wait=True)
        try:
            if written is not None:
                await written
        except (LogError, asyncio.CancelledError):
            pass  # the result stands; that the log did not take it is told by whoever closes the log
        if node.parent is None:
            self.trees.pop(tree.id, None)
            self.desk.forget(tree.id)
            tree.let_go()
        elif node.background and not node.parent.ending:
            self._notify(tree, node.parent, node)
        node.finish()

    def _notify(self, tree: Tree, parent: Node, child: Node) -> None:
        run, status = child.ref.run, child.view.status
        text = f"agent:{run} [{child.ref.label}] has ended: {status}. get_agent with agent_id {run} gives its result."
        tree.write(parent, Inbox(text, source="notice", about=run))
        parent.tell(UserTurn(text, "notice"))

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

    async def wait_for(self, tree: Tree, node: Node, runs: Sequence[int]) -> list[Result[Any]]:
        wanted = []
        for run in runs:
            child = tree.nodes[run] if 0 <= run < len(tree.nodes) else None
            if child is None or child.parent is not node:
                raise ToolError(f"agent:{run} is not a child of this run")
            wanted.append(child)
        if wanted and wanted[0].queues:
            await seats.wait_without(tree, node, _join_all(wanted))
            await self._files.written(tree.id, runs)
        else:
            for child in wanted:
                await child.join()
        return [child.result() for child in wanted]

    async def files_begun(self, tree: Tree, tickets: Sequence[Ticket]) -> None:
        """Waits for the status files that a reply in the background names."""
        await self._files.begun(tree.id, [ticket.run for ticket in tickets])

    def rows_below(self, tree: Tree, node: Node) -> list[Row]:
        """Every run below this one, in the order they were made; ended ones stay listed."""
        return [
            row_of(view, tree.id) for view in sorted(node.view.walk(), key=lambda v: v.number) if view is not node.view
        ]

    def _context(self, node: Node) -> Context:
        """For what runs with the supervisor: host-side functions and callables."""
        metadata = {METADATA_SUBAGENT_DEPTH: node.depth, METADATA_MAX_SUBAGENT_DEPTH: node.max_depth}
        node.context = Context(node.link, workspace=node.folders.path, metadata=metadata)
        return node.context

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

    async def send(self, tree: str, run: int, text: str) -> Receipt:
        """The user's words for a run, read at its next turn."""
        return await steering.send(self.trees.get(tree), run, text)

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
        primaries = [tree.nodes[0] for tree in self.trees.values()]
        for node in primaries:
            node.stop("cancelled")
        for node in primaries:
            await node.join()
        await self.desk.close()
        try:
            if self._on_close is not None:
                await self._on_close()
        finally:
            await self._files.close()
            await self.log.close()
            self._state.remove_temporary()


async def _join_all(nodes: Sequence[Node]) -> None:
    for node in nodes:
        await node.join()


def _set(value: Any) -> Any:
    """A limit after all defaults are applied."""
    assert value is not UNSET
    return value
