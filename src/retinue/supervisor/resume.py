"""Going on with a tree whose process is gone: every run without an ending goes on where its events stop.

The log is folded into what each run had behind it (`log.interrupted`), the tree is made of that, and then driven like
any other. Nothing is done twice: a tool that may have run gets the outcome `unknown_after_crash`, children are still
their parents', answers that had been given take effect, and what was spent stays spent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError
from retinue.core.events import (
    UNKNOWN_AFTER_CRASH,
    UNKNOWN_AFTER_CRASH_TEXT,
    ApprovalAsked,
    Event,
    RunRemote,
    RunResumed,
    RunSpawned,
    ToolResult,
    UsageReported,
    Warned,
    decode_raw,
)
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.plans import Plan, Planner
from retinue.core.ports import Clock, Log, Outcome
from retinue.core.profiles import Task
from retinue.core.rules import sealed
from retinue.log.resume_state import interrupted, standing
from retinue.log.runs import Runs, RunView
from retinue.log.threads import Histories, before
from retinue.remote.runtime import RemoteRuntime
from retinue.supervisor import steering
from retinue.supervisor.adoption import AdoptedRun, make_adopted
from retinue.supervisor.budgets import NO_COST, Account, Amount, check_price
from retinue.supervisor.links import RunLink
from retinue.supervisor.nodes import Node, stall_timer
from retinue.supervisor.places import folders_of
from retinue.supervisor.policy import narrowed
from retinue.supervisor.rebuilt import Plans, placed, plan_of_ended
from retinue.supervisor.resumed import ResumedLink
from retinue.supervisor.scrubbing import tree_for
from retinue.supervisor.slots import SlotHolder
from retinue.supervisor.trees import Tree
from retinue.workspaces.run_folders import StateFolder, resolve_context_paths

if TYPE_CHECKING:
    from retinue.supervisor.supervisor import Supervisor

NOT_RUN_TEXT = "The call could not work and was not run; what was wrong with it was lost when the process died."
LOST_FUNCTION = f"{UNKNOWN_AFTER_CRASH}: its function was running when the process died, and is not called again"
QUEUEING = "spawn_subagents"


@dataclass(frozen=True)
class Ground:
    """What trees stand on: the parts of the supervisor they are made with, and the log they are in."""

    supervisor: Supervisor
    log: Log
    planner: Planner
    state: StateFolder
    clock: Clock
    limits: Limits
    keep_files: Callable[[str, int], None]
    drive: Callable[[Tree, Node, Awaitable[None] | None], None]


def resume(ground: Ground, tree: str, histories: Histories, given: ResumeOverrides) -> Node:
    """Goes on with a dead tree; its root run. Raises before anything is written when it cannot."""
    if tree in ground.supervisor.trees:
        raise ConfigError(f"{tree} is at work here already")
    revival = Revival(ground, tree, histories)
    if not revival.going_on:
        status = revival.runs.runs[0].status
        raise ConfigError(f"{tree} has ended: {status}; `retinue continue {tree} TEXT` goes on from there")
    return revival.go_on(given)


class Revival:
    """A stored tree on its way back to life."""

    def __init__(self, ground: Ground, tree: str, histories: Histories) -> None:
        self.ground = ground
        self.id, events = tree, histories[tree]
        self.runs = Runs.of(self.id, events)
        without_end = [view for view in self.runs.runs.values() if view.ended is None]
        self.going_on = [view for view in without_end if not view.spawned.remote_id]
        spawned = {view.number: view.spawned for view in self.runs.runs.values()}
        began_with = {
            run: before(histories, self.id, body) for run, body in spawned.items() if body.continues is not None
        }
        self.known = interrupted(events, before=began_with)
        self._events = events

    def go_on(self, given: ResumeOverrides) -> Node:
        """All or nothing: what cannot be made again is an error before the first event is written."""
        tree = self.tree(given)
        nodes = [tree.nodes[view.number] for view in self.going_on]
        tree.root = nodes[0]
        self._keep_files(tree)
        written = [tree.write(node, RunResumed(), True) for node in nodes]  # first: time until here does not count
        for node in tree.nodes:
            if isinstance(node, AdoptedRun) and not _will_be_reported(node):
                node.stop("disconnected")
        for node in nodes:
            self._settle_calls(tree, node)
        for node in nodes:
            self._settle_children(tree, node)
        self._line_up(tree, nodes)
        for node, done in zip(nodes, written, strict=True):
            self.ground.drive(tree, node, done)
        self.ground.supervisor.trees[tree.id] = tree
        return tree.root

    # Making the tree again

    def tree(self, given: ResumeOverrides, *, planned: int | None = None) -> Tree:
        """The tree as it was, with nobody at work yet. Plans are made for runs that go on, and for the one that is
        `planned`, with all above them."""
        host, primary = self.ground, self.runs.runs[0].spawned
        plans = Plans(host.planner, self.id, primary, given.profiles, given.model, given.runtime)
        tree = tree_for(host.log, host.clock, None, None, self.id)
        tree.trace_id, tree.runs = primary.trace_id, self.runs
        tree.seq = self._events[-1].seq
        needed = self._needed(planned)
        for view in self.runs.runs.values():
            parent = None if view.spawned.parent is None else tree.nodes[view.spawned.parent]
            above = None if parent is None else parent.plan
            plan = plans.of(view, above) if view.number in needed else plan_of_ended(view)
            self._bound(tree, self._node(tree, view, parent, plan), given.limits)
            tree.labels[view.label] = 1
        self._count_spent(tree)
        desk = host.supervisor.desk
        desk.asked[self.id] = sum(isinstance(event.body, ApprovalAsked) for event in self._events)
        for run, body in standing(self._events):
            tool = sealed(body.tool, body.seal)
            desk.stand(self.id, run, tool, scope=body.scope, by=body.by)
        concurrent = self._whole(given.limits, tree.nodes[0]).concurrent
        assert concurrent is not UNSET
        tree.slots.limit_to(concurrent if concurrent is None else max(concurrent, self._slots_held(tree)))
        return tree

    def _needed(self, planned: int | None) -> set[int]:
        """With those above them: what a run may do is within what its parent may."""
        needed: set[int] = set()
        for start in (*(view.number for view in self.going_on), planned):
            number = start
            while number is not None and number not in needed:
                needed.add(number)
                number = self.runs.runs[number].spawned.parent
        return needed

    def _whole(self, given: Limits, primary: Node) -> Limits:
        """The limits of the tree: given now, given then, of its profile, of the project."""
        then = primary.view.spawned.limits or Limits()
        return given.over(then.over(primary.plan.profile.limits.over(self.ground.limits)))

    def _node(self, tree: Tree, view: RunView, parent: Node | None, plan: Plan) -> Node:
        spawned, host = view.spawned, self.ground
        ref = RunRef(self.id, view.number, view.path, view.label, view.agent, spawned.subagent_id)
        task = task_of(spawned)
        if view.ended is None and parent is not None and spawned.remote_id:
            return self._adopted(tree, view, parent, ref, task)
        ended = view.ended is not None
        there = [] if ended else [path for path in spawned.context_paths if Path(host.state.project, path).exists()]
        readable = resolve_context_paths(there, base=host.state.project)
        as_then = plan if ended else replace(plan, profile=placed(plan.profile, spawned))
        folders = folders_of(host.state, ref, parent, as_then, task, readable)
        policy = host.supervisor.policy if parent is None else parent.policy
        policy = narrowed(policy, plan.profile.approvals, host.state.project)
        slot = SlotHolder(None if parent is None else tree.slots)
        node = Node(ref, plan, task, parent, folders, policy, slot)
        lost = folders.path != spawned.workspace and not Path(spawned.workspace).is_dir()
        if lost and not ended and not host.state.temporary:
            raise ConfigError(f"{self.id}/{view.number} cannot go on: its workspace {spawned.workspace} is gone")
        node.folders.path = spawned.workspace
        node.view = view
        node.background = spawned.background
        asked_with = self.known[spawned.parent or 0].tools.get(spawned.call_id, QUEUEING)
        node.queues = asked_with == QUEUEING
        node.ending = node.finished = view.ended is not None
        tree.nodes.append(node)
        if parent is not None:
            node.depth = parent.depth + 1
            node.account = None if spawned.server else parent.account  # what runs elsewhere spends, we only report
            parent.children += (node,)
        return node

    def _adopted(self, tree: Tree, view: RunView, parent: Node, ref: RunRef, task: Task) -> Node:
        """Make a run of a peer again."""
        node = make_adopted(
            tree, ref, task, parent, clock=self.ground.clock, state=self.ground.state, runtime=str(_runtime(view))
        )
        node.key, node.view = view.spawned.remote_id, view
        node.account = None if view.spawned.server else parent.account
        tree.nodes.append(node)
        parent.children += (node,)
        return node

    def _keep_files(self, tree: Tree) -> None:
        for node in tree.nodes:
            if node.queues and node.view.spawned.call_id:
                self.ground.keep_files(tree.id, node.ref.run)

    def _bound(self, tree: Tree, node: Node, given: Limits) -> None:
        """Its limits, as the log has them."""
        spawned, parent, host = node.view.spawned, node.parent, self.ground
        own = node.plan.profile.limits
        tokens, cost = spawned.max_tokens, spawned.max_cost
        if parent is None:
            depth = self._whole(given, node).depth
            node.max_depth = depth if isinstance(depth, int) else 0
            tokens = tokens if given.tokens is UNSET else given.tokens
            cost = cost if given.cost is UNSET else given.cost
        else:
            node.max_depth = parent.max_depth if own.depth is UNSET else min(parent.max_depth, node.depth + own.depth)
        node.max_turns = spawned.max_turns
        node.seconds = spawned.timeout_seconds
        if parent is None and given.turns is not UNSET:
            node.max_turns = given.turns
        if parent is None and given.seconds is not UNSET:
            node.seconds = given.seconds
        if tokens is not None or cost is not None:
            above, owner = (None, "the tree") if parent is None else (parent.account, f"'{node.name}'")
            node.account = Account(owner, tokens=tokens, cost=cost, parent=above)
        if not node.ended:
            check_price(node.account, node.plan, host.supervisor.prices)
        node.stall = stall_timer(node, spawned.stall_seconds, host.clock, tree.write)

    def _count_spent(self, tree: Tree) -> None:
        for event in self._events:
            account = tree.nodes[event.run].account
            if account is not None and isinstance(event.body, UsageReported):
                account.add_spent(Amount(event.body.usage.total_tokens, event.body.cost or NO_COST))

    def _slots_held(self, tree: Tree) -> int:
        """How many runs hold a slot and wait for a child that holds one too: fewer slots would never move again."""
        held: set[int] = set()
        for view in self.going_on:
            node = tree.nodes[view.number]
            if node.parent is not None and not node.queues and self.known[view.number].started:
                held |= {view.number} | ({node.parent.ref.run} - {0})
        return len(held)

    # Settling what was open

    def _settle_calls(self, tree: Tree, node: Node) -> None:
        """Gives calls that may have run their outcome; the others are taken up when the run goes on."""
        known = self.known[node.ref.run]
        if is_driven_remotely(node):
            self._attach(tree, node)
            return
        link = node.link = ResumedLink(self.ground.supervisor, tree, node, node.ref)
        node.call_ids = known.call_ids or None
        node.inbox = tuple(known.thread.waiting)
        node.folders.resume_spilling()
        past, outcomes = known.thread.past(known.seconds), {}
        for call in list(known.open.values()):
            tool = node.plan.by_name.get(call.name)
            again = tool is not None and (tool.spec.repeatable or tool.spec.waits)
            if call.host or call.tier == "none" or (call.may_have_run() and not again):
                text, outcome = (
                    (NOT_RUN_TEXT, "") if call.tier == "none" else (UNKNOWN_AFTER_CRASH_TEXT, UNKNOWN_AFTER_CRASH)
                )
                tree.write(node, ToolResult(call.call_id, call.name, text, success=False, outcome=outcome))
                outcomes[call.call_id] = Outcome(text, success=False)
                del known.open[call.call_id]
        link.go_on(known.open)
        known_now = {**past.outcomes, **outcomes}
        node.past = msgspec.structs.replace(past, outcomes=known_now, set_up=known.set_up)
        if known.started and node.plan.profile.call is not None:
            tree.write(node, Warned(LOST_FUNCTION, code=UNKNOWN_AFTER_CRASH))
            node.stopping = "disconnected"

    def _attach(self, tree: Tree, node: Node) -> None:
        """Prepare a run that a peer executes: its calls are the peer's, and what the log has is not adopted twice."""
        known = self.known[node.ref.run]
        node.link = RunLink(self.ground.supervisor, tree, node, node.ref)
        node.inbox = tuple(known.thread.waiting)
        node.past = known.thread.past(known.seconds)
        below = {node.ref.run, *(view.number for view in node.view.walk() if view.spawned.remote_id)}
        tail: list[Event] = []
        for event in self._events:
            if event.run == node.ref.run and isinstance(event.body, RunRemote):
                tail = []
            elif event.run in below:
                tail.append(event)
        node.remote_tail = tuple(tail)

    def _settle_children(self, tree: Tree, node: Node) -> None:
        """Tells of children that ended when nobody could be told any more."""
        told = self.known[node.ref.run].told
        for child in node.children:
            if child.background and child.ended and child.ref.run not in told:
                steering.notify(tree, node, child)

    def _line_up(self, tree: Tree, nodes: Sequence[Node]) -> None:
        """Those that were at work get their slots before those that never had one."""
        for node in sorted(nodes, key=lambda node: (not self.known[node.ref.run].started, node.ref.run)):
            if node.parent is not None:
                node.slot.acquire_or_enqueue()


def is_driven_remotely(node: Node) -> bool:
    runtime = node.plan.runtime
    return isinstance(runtime, RemoteRuntime) and runtime.adapter is not None


def _will_be_reported(node: AdoptedRun) -> bool:
    """Say whether the peer of a run is attached to again: one that we had started the run at, or a run above it."""
    above: Node | None = node
    while isinstance(above, AdoptedRun):
        above = above.parent
    return not node.view.spawned.server and above is not None and not above.ended and is_driven_remotely(above)


def _runtime(view: RunView) -> object:
    return decode_raw(view.spawned.profile).get("runtime")


def task_of(spawned: RunSpawned) -> Task:
    return Task(
        spawned.task,
        context=spawned.task_context,
        context_paths=spawned.context_paths,
        include_parent_workspace=spawned.include_parent_workspace,
        include_temp_workspace=spawned.include_temp_workspace,
        subagent_id=spawned.subagent_id,
    )
