"""The spawner: the only place that makes new runs. It checks depth, slots, budget and profile, names the workspace,
writes `run.spawned` and hands the run to the driver.

A refused spawn makes no run. Depth comes from the tree, never from a claim of the child.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from retinue.core.caller import NOBODY, Caller
from retinue.core.control import Control
from retinue.core.errors import DEPTH_EXCEEDED, NO_SLOT, ConfigError, NoSlot, RetinueError, SpawnRefused
from retinue.core.events import RunSpawned, Warned
from retinue.core.limits import DEFAULT_CONCURRENT, DEFAULT_DEPTH, DEFAULT_TURNS, Limits, Timeouts
from retinue.core.messages import RunRef, Turn, UserTurn
from retinue.core.plans import Plan, RunHistory
from retinue.core.ports import Policy, SpawnedRun, SpawnOrder
from retinue.core.profiles import COPIES, Profile, Task, WorkspaceName
from retinue.core.team_members import ROUND_EVALUATOR
from retinue.core.traces import NO_ORIGIN
from retinue.supervisor import caller_limits
from retinue.supervisor.approvals import Approvals
from retinue.supervisor.budgets import Account, open_account, open_total
from retinue.supervisor.driver import Driver
from retinue.supervisor.policy import find_hidden_paths, narrow_policy
from retinue.supervisor.ports import SupervisorPorts
from retinue.supervisor.run_logs import RunLogs
from retinue.supervisor.run_roles import SharedServices
from retinue.supervisor.run_services import RunServices
from retinue.supervisor.slots import SlotHolder
from retinue.supervisor.tree import Run, Tree, TreeRegistry, new_span_id
from retinue.workspaces.run_folders import RunFolders, StateFolder, resolve_context_paths
from retinue.workspaces.workspace import Workspace, find_workspace, find_workspace_kind

DEFAULTS = Limits(turns=DEFAULT_TURNS, depth=DEFAULT_DEPTH, concurrent=DEFAULT_CONCURRENT)
LABEL_CHARACTERS = 30
NO_ROUNDS = Warned(
    "rounds are set in retinue.yaml, but a conversation has none: `retinue run` works in rounds", code="rounds"
)
RESERVED = "Cannot spawn subagent '{name}': Retinue runs it itself, between the rounds of the primary."
NO_SCRATCH = "profile {name!r} has no scratch workspace, so its workspace cannot start from a folder"
NO_CONVERSATION = "profile {name!r} cannot hold a conversation: that needs a model and no output type"
_LOG = logging.getLogger(__name__)


class Continued(NamedTuple):
    """The run that a new run continues.

    - `tree`, `run`: the tree ("" for the same tree) and the number of the run.
    - `thread`: the conversation of the run.
    - `chain`: the run, then the runs continued by it, newest first. The new run starts with the files of the first run
      in the chain that has a workspace.
    - `reference`: the reference of the run at a peer, if any."""

    tree: str
    run: int
    thread: Sequence[Turn]
    chain: Sequence[tuple[str, int]]
    reference: str = ""


class CheckedOrder(msgspec.Struct, frozen=True, gc=False):
    """An order that may be carried out, with its plan, the paths to read, the account to spend from, and the run to
    continue, if any. The scratch workspace of the run takes over the folder `starts_from`. The run of a `client` stands
    for a program that spawns."""

    order: SpawnOrder
    plan: Plan
    readable: list[str]
    account: Account | None
    continued: Continued | None = None
    starts_from: str = ""
    client: bool = False


class Spawner:
    """The maker of primary runs and children. Every tree stays within the limits left to `ports.caller`, the run in
    another process that this whole process serves. A closed spawner makes no more primaries."""

    def __init__(
        self,
        ports: SupervisorPorts,
        trees: TreeRegistry,
        driver: Driver,
        control: Control,
        approvals: Approvals,
        run_logs: RunLogs,
    ) -> None:
        self._ports, self._clock, self._state = ports, ports.clock, ports.state
        self._trees, self._driver, self._run_logs = trees, driver, run_logs
        self.services = SharedServices(
            approvals=approvals,
            prices=ports.prices,
            run_logs=run_logs,
            spawn_children=self.spawn_children,
            continue_run=control.continue_run,
        )
        self._is_closed = False
        self.limits = ports.limits.override(DEFAULTS)
        self.total = open_total(ports.total)

    def close(self) -> None:
        self._is_closed = True

    # Primary runs

    def spawn_primary(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        continued: Continued | None = None,
        caller: Caller | None = None,
        starts_from: str = "",
        client: bool = False,
    ) -> Run:
        """Start a primary run in a new tree. Raises ConfigError for a wrong profile or model, and SpawnRefused if the
        `caller`, a run in another process, has no level left: then no run is made. A given `caller` has been narrowed
        to `ports.caller`."""
        if self._is_closed:
            raise RetinueError("this Retinue is closed")
        caller = caller_limits.find_caller(getattr(profile, "name", profile), caller, self._ports.caller)
        task, plan = self._plan_primary(profile, task, starts_from)
        whole, primary, kept = self._merge_limits(plan.profile.limits, limits, narrow, caller)
        concurrent, depth, turns = primary.concurrent, primary.depth, primary.turns
        assert concurrent is not UNSET and depth is not UNSET and turns is not UNSET  # the defaults are applied
        if depth == 0:
            plan = self._ports.planner.plan(profile, task=task, parent=None, can_spawn=False)
        words = (task.context, task.text, () if continued is None else continued.thread)
        tree = Tree(self._trees.log, self._clock, concurrent=concurrent, trace=caller.trace or self._ports.trace)
        seconds = primary.seconds if task.timeout_seconds is None else task.timeout_seconds
        run = self._start_run(
            tree,
            CheckedOrder(
                order=SpawnOrder(plan.profile, task, limits=kept),
                plan=plan,
                account=open_account("", (whole, plan.profile.limits), self.total, plan, self._ports.prices, words),
                readable=resolve_context_paths(task.context_paths, base=self._state.project),
                continued=continued,
                starts_from=starts_from,
                client=client,
            ),
            parent=None,
            slot=SlotHolder(None),
            max_depth=depth,
            max_turns=turns,
            seconds=caller.limit_seconds(seconds, self._clock.wall()),
            stall=primary.stall,
        )
        self._trees.add(tree, root=run)
        return run

    def _plan_primary(self, profile: Profile | str, task: Task, starts_from: str) -> tuple[Task, Plan]:
        """Return a primary's task, with the paths and rounds that the settings grant, and its plan. Raises ConfigError
        for a task that does not fit the profile."""
        if self._ports.context_paths:
            task = self._grant_context_paths(task)
        plan = self._ports.planner.plan(profile, task=task, parent=None)
        rounds = None if task.rounds is not None else self._ports.rounds
        if rounds is not None and (plan.model or plan.team):  # functions and remote agents get none
            if task.conversation:
                plan = replace(plan, notes=(*plan.notes, NO_ROUNDS))
            else:
                task = msgspec.structs.replace(task, rounds=rounds)
                plan = self._ports.planner.plan(profile, task=task, parent=None)
        if plan.needs_repository:  # its worktree is made later, by the first call that needs it
            self._state.require_repository()
        if task.conversation and (not plan.profile.has_model or plan.profile.output is not None):
            raise ConfigError(NO_CONVERSATION.format(name=plan.profile.name))
        if task.conversation and task.rounds is not None:
            raise ConfigError("a conversation cannot work in rounds: leave one of them out")
        if starts_from and (plan.team is not None or plan.profile.workspace != "scratch"):
            raise ConfigError(NO_SCRATCH.format(name=plan.profile.name))
        return task, plan

    def _grant_context_paths(self, task: Task) -> Task:
        """Return the task with the paths that the settings grant. The log keeps them, so that a resumed run has them
        too."""
        granted = [path for path in self._ports.context_paths if path not in task.context_paths]
        if not granted:
            return task
        resolve_context_paths(task.context_paths, base=self._state.project)  # an error names the task's index
        return msgspec.structs.replace(task, context_paths=(*task.context_paths, *granted))

    def _merge_limits(
        self, own: Limits, given: Limits | None, narrow: Limits | None, caller: Caller
    ) -> tuple[Limits, Limits, Limits | None]:
        """Return the limits of the whole tree, the limits of its primary, and the limits that the log keeps for a
        resume."""
        whole = self.limits if given is None else given.override(self.limits)
        primary = own.override(self.limits) if given is None else given.override(own.override(self.limits))
        kept = given
        if narrow is not None:
            whole, primary = narrow.narrow(whole), narrow.narrow(primary)
            kept = narrow.narrow(given or Limits())
        if caller != NOBODY:
            whole, primary = caller.narrow(whole), caller.narrow(primary)
            kept = Limits(depth=primary.depth).override(kept or Limits())
        return whole, primary, kept

    # Children

    def spawn_children(self, parent: Run, orders: Sequence[SpawnOrder]) -> list[SpawnedRun]:
        """Start runs below `parent`, all of them or none. Raises SpawnRefused before the first run is made."""
        checked = [self._check_order(parent, order) for order in orders]
        return [self.spawn_child(parent, each).to_spawned_run() for each in checked]

    def _check_order(self, parent: Run, order: SpawnOrder) -> CheckedOrder:
        """Return the checked order of a child. Raises SpawnRefused if the parent, the depth or the budget forbids the
        run."""
        name = order.profile if isinstance(order.profile, str) else order.profile.name
        if name.casefold() == ROUND_EVALUATOR:
            if parent.plan.reserves_evaluator and order.asked_by_model:
                raise SpawnRefused(RESERVED.format(name=name))
            task = msgspec.structs.replace(order.task, include_temp_workspace=True)  # it reads the snapshots
            order = msgspec.structs.replace(order, task=task)
        if parent.is_stopping:
            raise SpawnRefused(f"Cannot spawn subagent '{name}': its parent is stopping.")
        call = caller_limits.CALL.get()
        is_member = parent.plan.team is not None
        if (parent.depth >= parent.max_depth and not is_member) or (call is not None and not call.caller.may_spawn):
            limit = min(parent.depth, parent.max_depth)
            raise SpawnRefused(DEPTH_EXCEEDED.format(depth=parent.depth, limit=limit, name=name))
        try:
            if order.task.conversation:
                raise ConfigError(f"subagent '{name}' cannot be a conversation: only a primary can")
            plan = self._plan_child(parent, order)
            base = parent.folders.path if order.asked_by_model else self._state.project
            is_by_model = order.asked_by_model or parent.plan.team is not None
            return self.check_plan(parent, order, plan, base=base, name=name, follow=not is_by_model)
        except ConfigError as error:
            raise SpawnRefused(str(error)) from None

    def _plan_child(self, parent: Run, order: SpawnOrder) -> Plan:
        profile, task, given = order.profile, order.task, not order.asked_by_model
        make_plan = self._ports.planner.plan
        plan = make_plan(profile, task=task, parent=parent.plan, given=given)
        if plan.needs_repository:  # its worktree is made later, by the first call that needs it
            self._state.require_repository()
        if find_depth(parent) < limit_depth(parent, plan.profile.limits):
            return plan
        return make_plan(profile, task=task, parent=parent.plan, given=given, can_spawn=False)

    def check_plan(
        self, parent: Run, order: SpawnOrder, plan: Plan, *, base: str, name: str, follow: bool
    ) -> CheckedOrder:
        """Return the checked order of a child with this plan. `follow` says whether its context paths may lead over
        links. Raises ConfigError for a wrong path, or without budget."""
        call = caller_limits.CALL.get()
        readable = resolve_context_paths(order.task.context_paths, base=base, follow=follow)
        above = parent.account if call is None else call.shared(parent.account)
        words = (order.task.context, order.task.text)
        account = open_account(name, (plan.profile.limits,), above, plan, self._ports.prices, words)
        return CheckedOrder(order, plan, readable, account)

    def spawn_child(self, parent: Run, checked: CheckedOrder) -> Run:
        """Start one run. Raises NoSlot if the tree is full and the order does not queue."""
        tree, order, limits = parent.tree, checked.order, checked.plan.profile.limits
        slot = SlotHolder(None if checked.plan.team is not None else tree.slots)
        if slot.slots is None:
            pass  # a team does nothing itself: its members take the slots
        elif order.queue and tree.slots.limit != 0:
            slot.acquire_or_enqueue()
        elif not slot.try_acquire():
            raise NoSlot(NO_SLOT.format(name=checked.plan.profile.name))
        max_depth = limit_depth(parent, limits)
        seconds = _choose_timeout(order, checked.plan, self._ports.timeouts)
        call = caller_limits.CALL.get()
        if call is not None:
            depth = find_depth(parent)
            max_depth, seconds = call.narrow(max_depth, seconds, depth=depth, now=self._clock.wall())
        turns = self.limits.turns if limits.turns is UNSET else limits.turns
        assert turns is not UNSET  # the defaults are applied
        return self._start_run(
            tree,
            checked,
            parent=parent,
            slot=slot,
            max_depth=max_depth,
            max_turns=turns,
            seconds=seconds,
            stall=limits.stall,
        )

    # Primary runs and children

    def _start_run(
        self,
        tree: Tree,
        checked: CheckedOrder,
        *,
        parent: Run | None,
        slot: SlotHolder,
        max_depth: int,
        max_turns: int | None,
        seconds: float | None,
        stall: float | UnsetType | None,
    ) -> Run:
        """Make a run, write its `run.spawned` before any other event, and start driving it."""
        order, plan, continued = checked.order, checked.plan, checked.continued
        task, ref = order.task, _make_ref(tree, parent, plan, order.task)
        policy = self._ports.policy if parent is None else parent.policy
        policy = narrow_policy(policy, plan.profile.approvals, self._state.project)
        run = Run(  # with 15 names, as in `_make_spawned_event`
            tree=tree,
            ref=ref,
            plan=plan,
            task=task,
            parent=parent,
            folders=self._choose_folders(ref, parent, checked, policy),
            policy=policy,
            slot=slot,
            account=checked.account,
            depth=find_depth(parent),
            max_depth=max_depth,
            max_turns=max_turns,
            seconds=seconds,
            background=order.background,
            queues=parent is not None and order.queue,
        )
        if continued is not None:
            thread = (*continued.thread, UserTurn(task.text))
            run.restore_history(RunHistory(thread, reference=continued.reference))
        run.set_stall_timer(stall)
        is_delegated = parent is not None or self._ports.serves_requests
        if order.files or (is_delegated and not self._state.temporary):  # in a project, delegated runs have files
            self._run_logs.keep(tree, ref.run)
        written = run.open(self._make_spawned_event(run, checked))
        for note in plan.notes:
            run.write(note)
        if parent is not None:
            _LOG.info("Spawned sub-agent %d with label '%s'", ref.run, ref.label)
        self._driver.start(run, RunServices(run, self.services), written)
        return run

    def _choose_folders(self, ref: RunRef, parent: Run | None, checked: CheckedOrder, policy: Policy) -> RunFolders:
        """Return the folders of a run, and the folder that its workspace starts from, if any."""
        folders = make_folders(self._state, ref, parent, checked.plan, checked.order.task, checked.readable)
        if checked.continued is not None:
            folders = start_from_workspace(folders, self._state, checked.continued.chain)
        elif checked.starts_from:
            folders = msgspec.structs.replace(folders, starts_from=checked.starts_from, moves_start=True)
        if hidden_paths := find_hidden_paths(policy):
            folders = msgspec.structs.replace(folders, hidden_paths=hidden_paths)
        return folders

    def _make_spawned_event(self, run: Run, checked: CheckedOrder) -> RunSpawned:
        """Return the first event of a run, with everything known about the run before it begins. If the tree is
        reported to the process of a caller, the event says so, and screens here do not show the tree."""
        tree, plan, ref, parent, folders = run.tree, run.plan, run.ref, run.parent, run.folders
        order, continued, call = checked.order, checked.continued, caller_limits.CALL.get()
        spawned = RunSpawned(  # with 15 names: Python passes more as a dict, which is slow
            parent=None if parent is None else parent.ref.run,
            label=ref.label,
            depth=run.depth,
            task=run.task.text,
            subagent_id=ref.subagent_id,
            workspace=folders.path,
            profile=plan.profile_json,
            tools=plan.tools_json,
            model=plan.model_name,
            call_id=order.call_id,
            workspace_kind=folders.kind,
            timeout_seconds=run.seconds,
            max_turns=run.max_turns,
            trace_id=tree.trace_id,
            span_id=new_span_id(),
        )
        rare = _list_task_fields(run.task, folders.granted_paths)
        if run.account is not None and (own := run.find_own_account()) is not None and own is not self.total:
            rare["max_tokens"], rare["max_cost"] = own.tokens, own.cost
        if run.stall_timer is not None:
            rare["stall_seconds"] = run.stall_timer.seconds
        if run.slot.is_queued:
            rare["queued"] = True
        if order.background or order.limits is not None or order.continues is not None:
            rare |= {"background": order.background, "limits": order.limits, "continues": order.continues}
        if checked.client:
            rare["client"] = True
        if continued is not None:
            rare |= {"continues": continued.run, "origin": continued.tree}
        if parent is None and tree.trace_origin is not NO_ORIGIN:
            rare |= {"traceparent": tree.trace_origin.traceparent, "baggage": tree.trace_origin.baggage}
        if self._ports.hook is not None and parent is None and call is not None:
            rare["reported"] = call.reported_as(tree.id)
        return msgspec.structs.replace(spawned, **rare) if rare else spawned


def _list_task_fields(task: Task, granted_paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the first event that are about the task, besides its text. Most tasks have none.

    They name the context paths as they were resolved, so that nobody has to follow a link in them again."""
    shows_workspaces = task.include_parent_workspace and task.include_temp_workspace
    is_read = task.context or task.context_paths or task.files or not shows_workspaces
    if not is_read and task.request is None and task.rounds is None and not task.conversation:
        return {}
    return {
        "task_context": task.context,
        "context_paths": tuple(granted_paths),
        "include_parent_workspace": task.include_parent_workspace,
        "include_temp_workspace": task.include_temp_workspace,
        "request": task.request,
        "files": tuple(task.files),
        "conversation": task.conversation,
        "rounds": task.rounds,
    }


def find_depth(parent: Run | None) -> int:
    """Return the depth of a child. A team adds no level: its members are as deep as the team itself."""
    if parent is None:
        return 0
    return parent.depth if parent.plan.team is not None else parent.depth + 1


def limit_depth(parent: Run, limits: Limits) -> int:
    """Return the maximum depth of runs below a child with these limits."""
    return parent.max_depth if limits.depth is UNSET else min(parent.max_depth, find_depth(parent) + limits.depth)


def _choose_timeout(order: SpawnOrder, plan: Plan, timeouts: Timeouts) -> float | None:
    """Return the timeout of a child: the timeout asked for, its profile's, or the default. A timeout asked for by a
    model is clamped. Members of a team have no default: the timeout of the team bounds them."""
    limits, default = plan.profile.limits, None if plan.is_member else timeouts.default
    own = default if limits.seconds is UNSET else limits.seconds
    asked = order.task.timeout_seconds
    if asked is None:
        return own
    if not order.asked_by_model:
        return asked
    asked = timeouts.clamp(asked)
    return asked if own is None or limits.seconds is UNSET else min(asked, own)


def _make_ref(tree: Tree, parent: Run | None, plan: Plan, task: Task) -> RunRef:
    agent = plan.profile.name
    wanted = "main" if parent is None else " ".join(task.text.split())[:LABEL_CHARACTERS]
    label = task.label or task.subagent_id or wanted or agent
    subagent_id = task.subagent_id or f"{agent}_{time.time_ns():x}"
    return tree.name_next_run(parent, agent, label=label, subagent_id=subagent_id)


# Folders


def make_folders(
    state: StateFolder, ref: RunRef, parent: Run | None, plan: Plan, task: Task, readable: list[str]
) -> RunFolders:
    """Return the folders of a run. By default, the primary shares the project, and a child has a folder of its own and
    may read its parent's."""
    above = state.project if parent is None else parent.folders.path
    started = plan.runtime.started
    sandboxed = started is not None and bool(started.sandbox)
    kind: WorkspaceName = "shared"  # of a team: its members have workspaces of their own
    if plan.team is None:
        kind = plan.profile.workspace or default_workspace(state, sandboxed=sandboxed, primary=parent is None)
    own, snapshots = state.run_folder(ref.tree, ref.run), state.snapshots(ref.tree)
    granted = tuple(readable)  # not the list: an empty one would be one more object for the garbage collector
    others = (snapshots, *granted) if task.include_temp_workspace else granted
    if kind == "shared" or (parent is None and plan.rounds is None):
        snapshots = ""  # of a primary without rounds, nobody reads them: it has no siblings and no evaluator
    workspace, copy = above if kind == "shared" else f"{own}/workspace", None
    if kind in COPIES:
        source_workspace, source = _find_source(state, parent, kind)
        copy = Workspace(
            kind=kind,
            tree=ref.tree,
            run=ref.run,
            own=own,
            path=workspace,
            source=source,
            project=state.project,
            source_workspace=source_workspace,
        )
    # A sandboxed copy of the project must not show the project itself, with its ignored files and git settings.
    hides_parent = kind == "shared" or (copy is not None and sandboxed and above == state.project)
    if task.include_parent_workspace and not hides_parent:
        others = (above, *others)
    return RunFolders(
        own,
        workspace,
        others,
        kind,
        granted_paths=granted,
        workspace_copy=copy,
        snapshots=snapshots,
        parent=None if parent is None else parent.folders,
    )


def start_from_workspace(folders: RunFolders, state: StateFolder, chain: Sequence[tuple[str, int]]) -> RunFolders:
    """Return the folders of a run that continues the runs in `chain`, newest first. A workspace of its own starts with
    the files of the first of them that had such a workspace."""
    copy = folders.workspace_copy
    if copy is None and folders.is_shared:
        return folders
    for tree, number in chain:
        own = state.run_folder(tree, number)
        if copy is not None and (continued := find_workspace(own, tree, number)) is not None:
            copy = msgspec.structs.replace(copy, continued=continued)
            return msgspec.structs.replace(folders, workspace_copy=copy)
        if copy is None and find_workspace_kind(own) == "scratch":
            return msgspec.structs.replace(folders, starts_from=f"{own}/workspace")
    return folders


def default_workspace(state: StateFolder, *, sandboxed: bool, primary: bool) -> WorkspaceName:
    """Return the kind of workspace for a profile that names none. A sandboxed run never works in the project
    itself."""
    if not sandboxed:
        return "shared" if primary else "scratch"
    if state.in_repository:
        return "worktree"
    return "copy" if primary else "scratch"


def _find_source(state: StateFolder, parent: Run | None, kind: str) -> tuple[Workspace | None, str]:
    """Return the copied workspace, if any, and the folder that a copy starts from: the nearest copied workspace above,
    else the project. A plain copy can also start from a scratch folder above, a worktree cannot."""
    for above in () if parent is None else parent.lineage:
        copy, folders = above.folders.workspace_copy, above.folders
        if copy is not None:
            return copy, copy.path
        if kind == "copy" and not folders.is_shared:
            return None, folders.path
    return None, state.project
