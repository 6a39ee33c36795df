"""Restoring: resumes trees of an earlier process, and continues ended runs.

To resume, fold the log into the history of each run (`log.threads`), rebuild the tree, and drive every run without an
ending like any other. Nothing is done twice: a tool that may have run gets the outcome `unknown_after_crash`, children
stay with their parents, given answers take effect, and spent budget stays spent.

To continue, start a new run from the conversation of an ended run: in the same tree below the same parent, or, for the
primary of a finished tree, in a new tree whose origin is the old one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import msgspec
from msgspec import UNSET

from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.control import RAN_ELSEWHERE, ResumeOverrides
from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import (
    UNKNOWN_AFTER_CRASH,
    UNKNOWN_AFTER_CRASH_TEXT,
    ApprovalAsked,
    Event,
    RunRemote,
    RunResumed,
    RunSpawned,
    UsageReported,
    Warned,
    decode_raw,
)
from retinue.core.limits import Limits
from retinue.core.messages import Call, RunRef, ToolSpec
from retinue.core.plans import Plan
from retinue.core.ports import Outcome, SpawnedRun, SpawnOrder
from retinue.core.profiles import WORKSPACES, Profile, Task, WorkspaceName
from retinue.core.teams import NEW_ANSWER
from retinue.log.runs import Runs, RunView
from retinue.log.threads import (
    Histories,
    OpenCall,
    find_standing_answers,
    fold_earlier_turns,
    fold_interrupted_runs,
    fold_thread,
    list_continued,
)
from retinue.protocol.subagent_tools import CONTINUE, SPAWN
from retinue.protocol.subagents import SPAWN_ONE
from retinue.remote.port import RemoteRuntime
from retinue.sandbox.in_process import IN_PROCESS
from retinue.supervisor import caller_limits
from retinue.supervisor.adoption import AdoptedRun, make_adopted
from retinue.supervisor.apply_changes import APPLY
from retinue.supervisor.approvals import judge_call, remember_answer, write_started
from retinue.supervisor.budgets import Account, check_price
from retinue.supervisor.driver import Driver
from retinue.supervisor.policy import find_hidden_paths, narrow_policy
from retinue.supervisor.ports import SupervisorPorts
from retinue.supervisor.restore_plans import PlanRestorer, end_client
from retinue.supervisor.run_events import write_lost_result
from retinue.supervisor.run_logs import RunLogs
from retinue.supervisor.run_messages import notify_parent
from retinue.supervisor.run_roles import ChildServices
from retinue.supervisor.run_services import RunServices
from retinue.supervisor.slots import SlotHolder
from retinue.supervisor.spawner import Continued, Spawner, find_depth, limit_depth, make_folders, start_from_workspace
from retinue.supervisor.tree import Run, Tree, TreeRegistry
from retinue.workspaces.run_folders import RunFolders, is_other_folder, resolve_remaining_paths
from retinue.workspaces.workspace import find_workspace_kind

NOT_RUN_TEXT = "The call could not work and was not run; what was wrong with it was lost when the process died."
LOST_FUNCTION = f"{UNKNOWN_AFTER_CRASH}: its function was running when the process died, and is not called again"
OUTSIDE = "{run} cannot be resumed or continued: its workspace {workspace} is not part of this project"
QUEUEING_TOOLS = frozenset({SPAWN, SPAWN_ONE, CONTINUE, NEW_ANSWER})  # their children wait for a slot


class Restorer:
    """The part of the supervisor that resumes trees and continues runs. `histories` in its methods holds the events of
    the tree, and of all continued runs."""

    def __init__(
        self,
        ports: SupervisorPorts,
        trees: TreeRegistry,
        driver: Driver,
        spawner: Spawner,
        run_logs: RunLogs,
    ) -> None:
        self._ports, self._trees, self._driver, self._spawner = ports, trees, driver, spawner
        self._load_tree = partial(TreeRestorer, ports=ports, spawner=spawner, run_logs=run_logs)

    def resume_tree(self, tree_id: str, histories: Histories, overrides: ResumeOverrides) -> Run:
        """Resume a tree whose process is gone. Return the run that the tree ends with. Raises ConfigError, before
        anything is written, if the tree cannot be resumed."""
        if tree_id in self._trees:
            raise ConfigError(f"{tree_id} is at work here already")
        caller_limits.find_caller(tree_id, None, self._ports.caller)
        restorer = self._load_tree(tree_id, histories, overrides)
        if not restorer.unfinished:
            status = restorer.view.runs[0].status
            raise ConfigError(f"{tree_id} has ended: {status}; `retinue continue {tree_id} TEXT` continues it")
        work = restorer.resume()
        for run, services, written in work:
            self._driver.start(run, services, written)
        root = work[0][0]
        self._trees.add(root.tree, root=root)
        return root

    def continue_run(self, tree: str, number: int, text: str, histories: Histories, overrides: ResumeOverrides) -> Run:
        """Start a run from the conversation of an ended run, with `text` as its new message. Raises an error, before
        anything is written, if the run cannot be continued."""
        if not text.strip():
            raise ConfigError("the message is empty: say how to continue")
        events, live = histories.get(tree), self._trees.get(tree)
        if not events:
            raise NotFound(f"there is no tree '{tree}' in the log")
        view = Runs.of(tree, events) if live is None else live.view
        old = _find_continuable(view, number, is_live=live is not None)
        team, old = _find_team(view, old), old.find_presented()
        parent = old.spawned.parent if team is None else team.spawned.parent
        caller_limits.find_caller(f"{tree}/{old.number}", None, self._ports.caller)
        continued = Continued(
            tree=tree if parent is None else "",
            run=old.number,
            thread=fold_thread(events, old.number, before=fold_earlier_turns(histories, tree, old.spawned)),
            chain=[(tree, old.number), *list_continued(histories, tree, old.spawned)],
            reference="" if old.remote is None else old.remote.reference,
        )
        plans = PlanRestorer(self._ports.planner, tree, view.runs[0].spawned, overrides)

        def restore_plan(above: Plan | None) -> Plan:
            if team is not None:
                plans.add_members(plans.restore(team, above))
            return self._keep_workspace_kind(plans.restore(old, above), continued)

        if parent is None:
            return self._continue_primary(restore_plan(None), old.spawned, text, overrides, continued)
        stands_for = team if team is not None and team.find_presented() is old else old
        task = msgspec.structs.replace(
            restore_task(old.spawned),
            text=text,
            subagent_id=stands_for.spawned.subagent_id,
            timeout_seconds=overrides.seconds,
        )
        home = live or self._load_tree(tree, histories, overrides).make_tree(planned=parent)
        with _release_if_refused(home):
            above = home.runs[parent]
            return self._continue_child(above, restore_plan(above.plan), task, overrides, continued)

    def _continue_primary(
        self, plan: Plan, spawned: RunSpawned, text: str, overrides: ResumeOverrides, continued: Continued
    ) -> Run:
        task = Task(
            text,
            context=spawned.task_context,
            context_paths=spawned.context_paths,
            model=plan.model_name if ":" in plan.model_name else None,
            timeout_seconds=overrides.seconds,
            files=overrides.new_files,
            request=overrides.request,
            conversation=overrides.conversation,
            rounds=None if overrides.conversation else spawned.rounds,
        )
        limits = overrides.limits.override(spawned.limits) if spawned.limits is not None else overrides.limits
        return self._spawner.spawn_primary(plan.profile, task, limits=limits, continued=continued)

    def _continue_child(
        self, parent: Run, plan: Plan, task: Task, overrides: ResumeOverrides, continued: Continued
    ) -> Run:
        """Start a run that continues another below `parent`. If `parent` is at work and does not wait for the new run,
        it is told of the ending as for any background run."""
        tree, project = parent.tree, self._ports.state.project
        is_live = tree.id in self._trees
        if is_live and parent.is_stopping:
            raise ConfigError(f"{tree.id}/{continued.run} cannot be continued: its parent is stopping")
        order = SpawnOrder(
            plan.profile,
            task,
            call_id=overrides.call_id,
            background=not overrides.call_id,
            asked_by_model=overrides.seconds is not None,
            files=overrides.files,
        )
        checked = self._spawner.check_plan(parent, order, plan, base=project, name=plan.profile.name, follow=False)
        run = self._spawner.spawn_child(parent, msgspec.structs.replace(checked, continued=continued))
        if not is_live:
            self._trees.add(tree, root=run)
        return run

    def _keep_workspace_kind(self, plan: Plan, continued: Continued) -> Plan:
        """Return the plan with the kind of workspace of the old run, if its profile names none. A run that changes its
        runtime still starts with the files of the old run."""
        if plan.profile.workspace is not None:
            return plan
        for tree, number in continued.chain:
            kind = find_workspace_kind(self._ports.state.run_folder(tree, number))
            if kind is not None:
                return replace(plan, profile=replace(plan.profile, workspace=kind))
        return plan


class TreeRestorer:
    """One stored tree that is rebuilt. `view` is the fold of its events. `unfinished` holds the runs without an
    ending, except adopted ones."""

    def __init__(
        self,
        tree: str,
        histories: Histories,
        overrides: ResumeOverrides,
        *,
        ports: SupervisorPorts,
        spawner: Spawner,
        run_logs: RunLogs,
    ) -> None:
        self._ports, self._clock, self._state = ports, ports.clock, ports.state
        self._spawner, self._run_logs, self._overrides = spawner, run_logs, overrides
        self.id, events = tree, histories[tree]
        self.view = Runs.of(self.id, events)
        without_end = [view for view in self.view.runs.values() if view.ended is None]
        self.unfinished = [view for view in without_end if not view.spawned.remote_id]
        spawned = {view.number: view.spawned for view in self.view.runs.values()}
        began_with = {
            run: fold_earlier_turns(histories, self.id, body)
            for run, body in spawned.items()
            if body.continues is not None
        }
        self._known = fold_interrupted_runs(events, before=began_with)
        self._events, self._histories = events, histories

    def resume(self) -> list[tuple[Run, RunServices, Awaitable[None] | None]]:
        """Resume the tree, all or nothing: raise before the first event is written if a run cannot be restored. Return
        each run to drive with its services and the write of its `run.resumed`; the first is the root."""
        tree = self.make_tree()
        runs = [tree.runs[view.number] for view in self.unfinished]
        for run in tree.runs:
            if self._run_logs.has_files(self.id, run.ref.run) or (run.queues and run.view.spawned.call_id):
                self._run_logs.keep(tree, run.ref.run)
        self._run_logs.restore(self.id, self._events)
        written = [run.write(RunResumed(), True) for run in runs]  # first: time before it does not count
        for run in tree.runs:
            if isinstance(run, AdoptedRun) and not _will_be_reported(run):
                run.stop("disconnected")
        services = [self._settle_calls(run) for run in runs]
        for run in runs:
            for child in run.children:
                if child.background and child.ended and child.ref.run not in self._known[run.ref.run].told:
                    notify_parent(child)
        # Runs that were at work come before runs that never had a slot.
        for run in sorted(runs, key=lambda each: (not self._known[each.ref.run].started, each.ref.run)):
            run.slot.acquire_or_enqueue()
        return list(zip(runs, services, written, strict=True))

    # Making the tree again

    def make_tree(self, *, planned: int | None = None) -> Tree:
        """Rebuild the tree, with no run at work yet. Make plans for the runs that are resumed, for the run `planned`,
        and for all runs above them."""
        tree = Tree(self._ports.log, self._clock, restored=self.view, seq=self._events[-1].seq)
        with _release_if_refused(tree):
            self._add_runs(tree, planned)
        return tree

    def _add_runs(self, tree: Tree, planned: int | None) -> None:
        """Add all runs of the log to the tree, with what they have spent and been answered. What they have spent does
        not count for the budget of this process: it was spent in another, or has been counted."""
        plans = PlanRestorer(self._ports.planner, self.id, self.view.runs[0].spawned, self._overrides)
        needed = self._find_needed_runs(planned)
        for view in self.view.runs.values():
            parent = None if view.spawned.parent is None else tree.runs[view.spawned.parent]
            above = None if parent is None else parent.plan
            plan = (
                plans.restore(view, above)
                if view.number in needed
                else Plan(profile=Profile(view.agent), runtime=IN_PROCESS)
            )
            run = self._make_run(tree, view, parent, plan)
            tree.add_run(run)
            if not run.ended:
                check_price(run.account, run.plan, self._ports.prices)
            run.set_stall_timer(view.spawned.stall_seconds)
        for event in self._events:
            body, account = event.body, tree.runs[event.run].account
            if isinstance(body, UsageReported) and account is not None:
                account.add_reported(body, below=self._spawner.total)
            elif isinstance(body, ApprovalAsked):
                tree.count_question()
        for number, answer in find_standing_answers(self._events):
            remember_answer(tree.runs[number], answer, is_restored=True)
        concurrent = self._merge_limits(tree.runs[0].plan).concurrent
        assert concurrent is not UNSET
        tree.slots.limit_to(concurrent if concurrent is None else max(concurrent, self._count_held_slots(tree)))

    def _find_needed_runs(self, planned: int | None) -> set[int]:
        """Return the numbers of the runs that need a plan. The runs above them need one too, because a plan stays
        within the plan of its parent."""
        needed: set[int] = set()
        for start in (*(view.number for view in self.unfinished), planned):
            number = start
            while number is not None and number not in needed:
                needed.add(number)
                number = self.view.runs[number].spawned.parent
        return needed

    def _merge_limits(self, plan: Plan) -> Limits:
        """Return the limits of the tree. In order of precedence: given now, given at the start, from the primary's
        profile, from the project. None is wider than the limits left to this process."""
        primary, caller = self.view.runs[0], self._ports.caller
        then = primary.spawned.limits or Limits()
        whole = self._overrides.limits.override(then.override(plan.profile.limits.override(self._spawner.limits)))
        return (caller.as_client() if primary.spawned.client else caller).narrow(whole)

    def _make_run(self, tree: Tree, view: RunView, parent: Run | None, plan: Plan) -> Run:
        spawned = view.spawned
        ref = RunRef(
            tree=self.id,
            run=view.number,
            path=view.path,
            label=view.label,
            agent=view.agent,
            subagent_id=spawned.subagent_id,
        )
        task = restore_task(spawned)
        if view.ended is None and parent is not None and spawned.remote_id:
            return make_adopted(
                ref,
                task,
                parent,
                state=self._state,
                runtime=str(decode_raw(spawned.profile).get("runtime")),
                key=spawned.remote_id,
                account=None if spawned.server else parent.account,
                view=view,
            )
        folders = self._make_folders(view, ref, parent, plan, task)
        policy = self._ports.policy if parent is None else parent.policy
        policy = narrow_policy(policy, plan.profile.approvals, self._state.project)
        asked_with = self._known[spawned.parent or 0].tools.get(spawned.call_id, SPAWN)
        given = self._overrides.limits if parent is None else Limits()
        is_ended = view.ended is not None
        return Run(
            tree=tree,
            ref=ref,
            plan=plan,
            task=task,
            parent=parent,
            folders=msgspec.structs.replace(folders, hidden_paths=find_hidden_paths(policy)),
            policy=policy,
            slot=SlotHolder(None if parent is None or plan.team is not None else tree.slots),
            account=self._restore_account(view, parent),
            depth=find_depth(parent),
            max_depth=self._restore_depth(parent, plan),
            max_turns=spawned.max_turns if given.turns is UNSET else given.turns,
            seconds=spawned.timeout_seconds if given.seconds is UNSET else given.seconds,
            background=spawned.background,
            queues=asked_with in QUEUEING_TOOLS,
            view=view,
            ending=is_ended,
            finished=is_ended,
        )

    def _make_folders(self, view: RunView, ref: RunRef, parent: Run | None, plan: Plan, task: Task) -> RunFolders:
        """Return the folders of a run as before. The log only says what kind of workspace the run had: the path is
        never taken from the log. A kind that is unknown here gives the run no folder of its own. Raises ConfigError for
        a workspace outside this project."""
        state, spawned, is_ended = self._state, view.spawned, view.ended is not None
        readable: list[str] = []
        if not is_ended:
            readable = resolve_remaining_paths(spawned.context_paths, base=state.project)
        kind: WorkspaceName = next((kind for kind in WORKSPACES if kind == spawned.workspace_kind), "shared")
        profile = replace(plan.profile, workspace=kind)
        folders = make_folders(state, ref, parent, replace(plan, profile=profile), task, readable)
        if not folders.is_shared:
            if spawned.continues is None:
                return folders
            return start_from_workspace(folders, state, list_continued(self._histories, self.id, spawned))
        if not is_ended and is_other_folder(folders, spawned.workspace):
            raise ConfigError(OUTSIDE.format(run=f"{self.id}/{view.number}", workspace=spawned.workspace))
        return folders

    def _restore_depth(self, parent: Run | None, plan: Plan) -> int:
        if parent is not None:
            return limit_depth(parent, plan.profile.limits)
        limit = self._merge_limits(plan).depth
        return limit if isinstance(limit, int) else 0

    def _restore_account(self, view: RunView, parent: Run | None) -> Account | None:
        """Return the account of a run: its own if it had one, else the account above. The spending of runs reported by
        an MCP server is only logged, and belongs to no account."""
        spawned, given = view.spawned, self._overrides.limits
        tokens, cost = spawned.max_tokens, spawned.max_cost
        if parent is None:
            tokens = tokens if given.tokens is UNSET else given.tokens
            cost = cost if given.cost is UNSET else given.cost
        above = self._spawner.total if parent is None else None if spawned.server else parent.account
        if tokens is None and cost is None:
            return above
        owner = "the tree" if parent is None else f"'{view.agent}'"
        return Account(owner, tokens=tokens, cost=cost, parent=above)

    def _count_held_slots(self, tree: Tree) -> int:
        """Count the runs that hold a slot while they wait for a child with a slot. With fewer slots, none of them
        could continue."""
        held: set[int] = set()
        for view in self.unfinished:
            run = tree.runs[view.number]
            if run.parent is not None and not run.queues and self._known[view.number].started:
                held |= {view.number} | ({run.parent.ref.run} - {0})
        return len(held)

    # Settling what was open

    def _settle_calls(self, run: Run) -> RunServices:
        """Write an outcome for each open call that is not run again: it may have run and is not repeatable, or it
        cannot run. The other open calls are run when the run is driven. Return the services of the run, which know
        these calls."""
        if is_driven_remotely(run):
            return self._restore_remote(run)
        known = self._known[run.ref.run]
        run.folders.resume_spilling()
        history, outcomes, still_open = known.thread.past(known.seconds), {}, dict(known.open)
        for call in known.open.values():
            tool = run.plan.tools.get(call.name)
            again = tool is not None and (tool.spec.repeatable or tool.spec.waits)
            if call.host or call.tier == "none" or (call.may_have_run() and not again):
                text, outcome = (
                    (NOT_RUN_TEXT, "") if call.tier == "none" else (UNKNOWN_AFTER_CRASH_TEXT, UNKNOWN_AFTER_CRASH)
                )
                outcomes[call.call_id] = write_lost_result(run, call.call_id, call.name, text, code=outcome)
                del still_open[call.call_id]
        run.slot.begin_calls(len(still_open))
        known_now = {**history.outcomes, **outcomes}
        history = msgspec.structs.replace(history, outcomes=known_now, set_up=known.set_up)
        run.restore_history(history, inbox=tuple(known.thread.waiting), call_ids=known.tools)
        if known.started and run.plan.profile.call not in (None, end_client):
            run.write(Warned(LOST_FUNCTION, code=UNKNOWN_AFTER_CRASH))
            run.mark_stopping("disconnected")
        return ResumedServices(run, self._spawner.services, _open_calls=still_open)

    def _restore_remote(self, run: Run) -> RunServices:
        """Prepare a run that a peer executes. Its calls are the peer's, and reports that are in the log already are
        not adopted twice."""
        known = self._known[run.ref.run]
        below = {run.ref.run, *(view.number for view in run.view.walk() if view.spawned.remote_id)}
        tail: list[Event] = []
        for event in self._events:
            if event.run == run.ref.run and isinstance(event.body, RunRemote):
                tail = []
            elif event.run in below:
                tail.append(event)
        history = known.thread.past(known.seconds)
        run.restore_history(history, inbox=tuple(known.thread.waiting), remote_tail=tuple(tail))
        return RunServices(run, self._spawner.services)


@contextmanager
def _release_if_refused(tree: Tree) -> Iterator[None]:
    """Release a rebuilt tree if an error keeps its runs from starting: the garbage collector does not look into
    runs."""
    try:
        yield
    except BaseException:
        if tree.root is None:
            tree.release()
        raise


def is_driven_remotely(run: Run) -> bool:
    return isinstance(run.plan.runtime, RemoteRuntime)


def _will_be_reported(run: AdoptedRun) -> bool:
    """Return True if a peer will report this run again: the nearest run of ours above it is unfinished and driven at a
    peer."""
    above = next(each for each in run.lineage if not isinstance(each, AdoptedRun))
    return not run.view.spawned.server and not above.ended and is_driven_remotely(above)


def _find_continuable(view: Runs, number: int, *, is_live: bool) -> RunView:
    """Return an ended run of a tree. Raises an error if the run cannot be continued."""
    name, old = f"{view.tree}/{number}", view.runs.get(number)
    if old is None:
        raise NotFound(f"{view.tree} has no run {number}")
    if not is_live and any(each.ended is None for each in view.runs.values()):
        raise ConfigError(f"{view.tree} was interrupted: `retinue resume {view.tree}` resumes it")
    if old.ended is None:
        raise ConfigError(f"{name} is at work: `retinue send {name} TEXT` tells it something")
    if old.spawned.remote_id:  # its name, model and thread are a peer's words, and would choose a profile here
        where = f"in the MCP server '{old.spawned.server}'" if old.spawned.server else "at a remote agent"
        raise ConfigError(RAN_ELSEWHERE.format(who=name, where=where))
    return old


def _find_team(view: Runs, run: RunView) -> RunView | None:
    """Return the team whose work a run continues, or None. The run is the team itself, a member, or continues one
    of these. The new run takes the place of the team and works alone."""
    if run.find_presented() is not run:
        return run
    while run.spawned.continues is not None and not run.spawned.origin:
        run = view.runs[run.spawned.continues]
    above = None if run.spawned.parent is None else view.runs[run.spawned.parent]
    return above if above is not None and run in above.members else None


def restore_task(spawned: RunSpawned) -> Task:
    """Return the task of a run from its first event."""
    return Task(
        spawned.task,
        context=spawned.task_context,
        context_paths=spawned.context_paths,
        include_parent_workspace=spawned.include_parent_workspace,
        include_temp_workspace=spawned.include_temp_workspace,
        subagent_id=spawned.subagent_id,
        files=spawned.files,
        conversation=spawned.conversation,
        rounds=spawned.rounds,
    )


class ResumedServices(RunServices, eq=False):
    """The services of a resumed run. Calls that have a result are not made again. A call that was logged without a
    result is asked about again, gets its earlier answer, or is simply run again. Earlier children stay its children."""

    _open_calls: dict[str, OpenCall] = msgspec.field(default_factory=dict)

    @property
    def children(self) -> ResumedChildServices:
        return ResumedChildServices(self._run, self._shared)

    def write_calls(self, calls: Sequence[tuple[Call, ToolSpec]]) -> None:
        super().write_calls([(call, spec) for call, spec in calls if call.id not in self._open_calls])

    def _write_call(self, call: Call, spec: ToolSpec) -> Awaitable[None] | None:
        return None if call.id in self._open_calls else super()._write_call(call, spec)

    def _report_progress(self, call: Call, outcome: Outcome | None = None) -> None:
        if outcome is not None or call.id not in self._open_calls:  # else reported by the earlier process
            super()._report_progress(call, outcome)

    async def _recall_decision(self, call: Call, spec: ToolSpec) -> Decision | None:
        before = self._open_calls.pop(call.id, None)
        said = None if before is None else before.decision
        if before is None or isinstance(said, Deny):
            return said
        if said is not None:
            wanted = call if said.args is None else Call(call.id, call.name, said.args, within=call.within)
            verdict = judge_call(self._run, spec, wanted)
            # A yes is to the files, and to the MCP tool, as they were then.
            if verdict.what != "deny" and call.name != APPLY and before.seal == spec.seal:
                await write_started(self._run, call)
                return said
            if said.args is not None:  # the call itself must not run: a person has replaced it
                if verdict.what == "allow" and not verdict.rule:
                    return said
                decision = await self._decide(wanted, spec, "", verdict)
                return said if isinstance(decision, Allow) and decision.args is None else decision
        return Allow() if find_spawned(self._run, call.id) else None


class ResumedChildServices(ChildServices, eq=False):
    """The services of a resumed run for the runs below it. A call that spawned children before the crash gets these
    back."""

    async def spawn_runs(self, orders: Sequence[SpawnOrder]) -> list[SpawnedRun]:
        made = find_spawned(self.run, orders[0].call_id)[: len(orders)]
        rest = orders[len(made) :]
        return [child.to_spawned_run() for child in made] + (await super().spawn_runs(rest) if rest else [])


def find_spawned(run: Run, call_id: str) -> list[Run]:
    """Return the children that this call of a run spawned before the crash."""
    return [child for child in run.children if call_id and child.view.spawned.call_id == call_id]
