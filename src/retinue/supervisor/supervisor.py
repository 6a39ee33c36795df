"""The supervisor: owns the trees of one process and one log, and implements Control for them.

The supervisor builds its parts and closes them. Each part has one job: the spawner makes runs, the driver takes them
to their endings, the restorer resumes and continues them, and approvals ask people. Models, tools, profiles and
sandboxes reach the parts as plans. For trees of other processes, `StoredTrees` answers from the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any

from msgspec import structs

from retinue.agent.tool_calls import run_caller_call
from retinue.core.approvals import Answered, Approval, Decision, QuestionChange
from retinue.core.caller import Caller, narrow_caller
from retinue.core.context import Context
from retinue.core.control import (
    NO_OVERRIDES,
    NOT_AT_WORK,
    ClientHandle,
    ClientOptions,
    Control,
    ResumeOverrides,
    RunHandle,
    SpawnBelow,
    TreeInfo,
)
from retinue.core.errors import ConfigError, NotFound, RetinueError, ToolError
from retinue.core.events import Delta, Event, ModelChanged, Warned
from retinue.core.limits import Limits
from retinue.core.messages import USERS_OWN, Call, RunRef, ToolSpec
from retinue.core.ports import Folders, Link, Outcome, Receipt, RunSummary, SpawnedRun, SpawnOrder
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result, Status
from retinue.log.lookup import read_run_number
from retinue.log.runs import describe_view
from retinue.log.threads import read_histories
from retinue.remote.port import Peer, RemoteRun
from retinue.remote.validator import Bounds
from retinue.supervisor import caller_limits
from retinue.supervisor.adoption import Adoption
from retinue.supervisor.approvals import Approvals
from retinue.supervisor.budgets import check_price
from retinue.supervisor.driver import Driver
from retinue.supervisor.ports import SupervisorPorts
from retinue.supervisor.restore import Restorer
from retinue.supervisor.restore_plans import CLIENT_LEFT
from retinue.supervisor.run_logs import RunLogs
from retinue.supervisor.run_messages import USER, check_message, send_message
from retinue.supervisor.run_services import RunServices
from retinue.supervisor.spawner import Spawner
from retinue.supervisor.stored_control import Phase, StoredTrees, describe_tree
from retinue.supervisor.tree import Run, TreeRegistry

CALL_GIVEN_UP = "given up by the client"


class Supervisor(StoredTrees):
    """The owner of every tree of one process and log. `close` also closes everything built for the supervisor."""

    def __init__(self, ports: SupervisorPorts) -> None:
        state = ports.state
        super().__init__(ports.log, str(state.folder), project=state.project, writer=ports.log.writer)
        self._ports = ports
        self.log, self.state, self.servers, self.caller = ports.log, ports.state, ports.servers, ports.caller
        self.trees = TreeRegistry(ports.log)
        self.approvals = Approvals(
            ports.clock,
            approver=ports.approver,
            terms=ports.terms,
            store_rule=ports.store_rule,
            project=ports.state.project,
        )
        self._run_logs = RunLogs(ports.log, ports.state)
        driver = Driver(ports, self.trees, self, self.approvals, self._run_logs)
        self.spawner = Spawner(ports, self.trees, driver, self, self.approvals, self._run_logs)
        self._restorer = Restorer(ports, self.trees, driver, self.spawner, self._run_logs)

    # Starting runs

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        if self.servers is not None:
            await self.servers.ready(profile, say)

    async def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        below: SpawnBelow | None = None,
        caller: Caller | None = None,
        starts_from: str = "",
    ) -> RunHandle:
        if below is not None:
            if limits is not None or narrow is not None or caller is not None:
                raise ConfigError(
                    "a subagent has the limits of its profile: other limits can be set only for a primary"
                )
            if starts_from:
                raise ConfigError("only the workspace of a primary can start from a folder")
            return self._spawn_below(profile, task, below)
        if self.servers is not None:
            await self.servers.ready(profile)
        if caller is not None:
            caller = narrow_caller(self.find_served_caller() or self.caller, caller)
        run = self.spawner.spawn_primary(
            profile, task, limits=limits, narrow=narrow, caller=caller, starts_from=starts_from
        )
        return self._make_handle(run)

    def _spawn_below(self, profile: Profile | str, task: Task, below: SpawnBelow) -> RunHandle:
        parent = self.trees.find_run(below.tree, below.run)
        if parent is None:
            raise NotFound(f"no run {below.tree}/{below.run} is at work here")
        order = SpawnOrder(
            profile,
            task,
            call_id=below.call_id,
            background=below.background,
            queue=below.queue,
            files=below.files,
            asked_by_model=False,
        )
        tree, since = parent.tree, parent.tree.seq
        [child] = self.spawner.spawn_children(parent, [order])
        return self._make_handle(tree.runs[child.run], since=since)

    async def open_client(self, options: ClientOptions) -> ClientHandle:
        leaving = asyncio.Event()

        async def stay(task: str, ctx: Context) -> str:
            await leaving.wait()
            return CLIENT_LEFT

        profile = Profile(options.name, call=stay, description=options.description, tools=options.tools)
        caller = narrow_caller(self.caller, options.caller).as_client()
        await self.prepare(profile)
        run = self.spawner.spawn_primary(
            profile, Task(options.task), limits=options.limits, narrow=options.narrow, caller=caller, client=True
        )

        async def leave() -> None:
            leaving.set()
            await run.join()

        services = RunServices(run, self.spawner.services)
        return LocalClientHandle(self, run, services, leave=leave)

    def serve_caller(self, caller: Caller) -> AbstractContextManager[None]:
        bounds = narrow_caller(self.caller, caller)
        return caller_limits.serve_caller(structs.replace(bounds, run_id=caller.run_id))

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> RunHandle:
        """Resume a tree. Raises LogHeld while another process may write the tree."""
        await self.prepare()
        await self.log.claim(tree)
        return self._make_handle(self._restorer.resume_tree(tree, await read_histories(self.log, tree), overrides))

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        await self.prepare()
        histories = await read_histories(self.log, tree)
        if run != 0 and tree in histories:  # a primary is continued in a tree of its own
            await self.log.claim(tree)
        return self._make_handle(self._restorer.continue_run(tree, run, text, histories, overrides))

    def _make_handle(self, run: Run, *, since: int = 0) -> RunHandle:
        """Return the handle of a run. The handle keeps the run, so that its result is available even if the log lost
        it."""
        return RunHandle(self, run.ref, wait=run.wait_for_result, since=since, start_seq=run.tree.seq)

    def adopt_runs(self, tree: str, peer: Peer, remote: RemoteRun, *, bounds: Bounds | None = None) -> Adoption | None:
        """Return the Adoption for runs that a peer reports in `tree`, or None if the tree is not running."""
        found = self.trees.get(tree)
        if found is None:
            return None
        return Adoption(found, peer, remote, state=self.state, approvals=self.approvals, bounds=bounds)

    def is_live(self, tree: str) -> bool:
        """Return True for a tree that is at work in this process."""
        return tree in self.trees

    def find_remaining(self, ref: RunRef) -> Caller:
        """Return the remaining limits of a run, for a server elsewhere. For a run that is not at work, nothing
        remains."""
        run = self.trees.find_run(ref.tree, ref.run)
        if run is None:
            return Caller(depth=0, deadline=0.0)
        found = caller_limits.find_remaining_limits(run)
        return narrow_caller(Caller(deadline=self.caller.deadline), found)

    def find_served_caller(self) -> Caller | None:
        """Return the caller of the call that the current task serves."""
        call = caller_limits.CALL.get()
        return None if call is None else call.caller

    # Steering runs

    async def send(self, tree: str, run: int, text: str, *, source: str = USER, message_id: str = "") -> Receipt:
        message, found = check_message(text), self.trees.find_run(tree, run)
        if found is None:
            return NOT_AT_WORK
        return await send_message(found, message, source=source, message_id=message_id)

    async def cancel(self, tree: str, run: int = 0) -> bool:
        found = self.trees.find_run(tree, run)
        return found is not None and found.stop("cancelled")

    async def interrupt_turn(self, tree: str, run: int = 0) -> bool:
        found = self.trees.find_run(tree, run)
        return found is not None and found.interrupt_turn()

    async def end_conversation(self, tree: str, run: int = 0) -> bool:
        found = self.trees.find_run(tree, run)
        return found is not None and found.end_conversation()

    async def change_model(self, tree: str, run: int, model: str) -> str:
        found = self.trees.find_run(tree, run)
        if found is None or not found.task.conversation or found.is_stopping:
            raise ConfigError(f"{tree}/{run} is not an open conversation here")
        task = structs.replace(found.task, model=model)
        plan = self._ports.planner.plan(found.plan.profile, task=task, parent=None)
        check_price(found.account, plan, self._ports.prices)
        found.change_model(plan)
        written = found.write(ModelChanged(plan.model_name), True)
        if written is not None:
            await written
        return plan.model_name

    async def kill(self, tree: str) -> None:
        found = self.trees.get(tree)
        if found is not None:
            found.kill()

    async def pending(self, tree: str | None = None) -> list[Approval]:
        return self.approvals.pending(tree)

    def watch_questions(self, tree: str | None = None) -> AsyncGenerator[QuestionChange]:
        return self.approvals.watch_questions(tree)

    async def answer(
        self, approval_id: str, decision: Decision, *, by: str, digest: str = "", surface: str = "", key: str = ""
    ) -> Answered:
        return self.approvals.answer(approval_id, decision, by=by, digest=digest, surface=surface, key=key)

    @asynccontextmanager
    async def attend(self, tree: str | None = None) -> AsyncIterator[None]:
        with self.approvals.attend(tree):
            yield

    async def wait_until_idle(self, tree: str) -> None:
        while self._is_at_work(tree) or self.approvals.is_attended_by_name(tree):
            await self._wait_until_waiting(tree)
            await self.approvals.wait_until_left(tree)

    async def _wait_until_waiting(self, tree: str) -> None:
        """Wait until no run of a tree is at work. Every change of that writes an event, so look again after each."""
        if self._is_at_work(tree):
            async with aclosing(self.log.watch(tree, after=self.trees[tree].seq)) as events:
                async for _ in events:
                    if not self._is_at_work(tree):
                        return

    def _is_at_work(self, tree: str) -> bool:
        """Return True if a run of a tree is at work here, or is about to read a message."""
        found = self.trees.get(tree)
        return found is not None and any(run.is_at_work for run in found.runs)

    def find_lasting_path(self, ref: RunRef) -> str:
        """Return a path of a run at work made of its position among its parent's children, which does not depend on
        other runs."""
        path, run = "", self.trees[ref.tree].runs[ref.run]
        while run.parent is not None:
            siblings = [child for child in run.parent.children if not child.view.spawned.server]
            path = f"/{run.name}-{siblings.index(run) + 1}{path}"
            run = run.parent
        return f"{run.ref.path}{path}"

    def stop_run(self, tree: str, run: int, status: Status, *, failure: str = "") -> None:
        """Stop a run that is at work. With a `failure`, the run ends `failed` with this text."""
        found = self.trees.find_run(tree, run)
        if found is not None:
            found.stop(status, failure=failure)

    def warn_run(self, tree: str, run: int, text: str, *, code: str) -> bool:
        """Write a warning to a run. Return False if the run has ended or is not in a live tree."""
        found = self.trees.find_run(tree, run)
        if found is None or found.ended:
            return False
        found.write(Warned(text, code=code))
        return True

    # Reading

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        live = self.trees.find_run(tree, run)
        return await super().wait(tree, run) if live is None else await live.wait_for_result()

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        live = self.trees.find_run(tree, run)
        if live is None:
            return await super().result(tree, run)
        if live.view.ended is None:
            return None
        return await live.wait_for_result()  # the view has the ending a little before the write is confirmed

    async def describe_run(self, tree: str, run: int = 0) -> RunSummary:
        live = self.trees.find_run(tree, run)
        return await super().describe_run(tree, run) if live is None else describe_view(live.view, tree)

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        stored = [] if live else await super().list_trees()
        found = [info for info in stored if info.tree not in self.trees]
        for tree in self.trees.values():
            root = 0 if tree.root is None else tree.root.ref.run
            found.append(describe_tree(tree.view, writer=self.writer, root=root))
        return sorted(found, key=lambda info: info.runs[0].created_at, reverse=True)

    async def find_run(self, name: str) -> RunRef:
        tree, slash, number = name.partition("/")
        wanted = read_run_number(number) if slash else 0
        live = None if wanted is None else self.trees.find_run(tree, wanted)
        return await super().find_run(name) if live is None else live.ref

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        if tree in self.trees:
            return self.log.watch(tree, after=after, deltas=deltas)
        return super().watch(tree, after=after, deltas=deltas)

    def _find_phase_here(self, tree: str, run: int) -> Phase | None:
        live = self.trees.find_run(tree, run)
        if live is None:
            return None
        return "ended" if live.finished else "waiting" if live.view.waits else "at_work"

    async def close(self) -> None:
        """Cancel all running runs, wait for their endings, and close the log. A waiting conversation is left open."""
        self.spawner.close()
        roots = [tree.root for tree in self.trees.values() if tree.root is not None]
        for run in roots:
            if run.view.waits:
                run.leave_open()
            else:
                run.stop("cancelled")
        for run in roots:
            await run.join()
        await self.approvals.close()
        try:
            if self._ports.on_close is not None:
                await self._ports.on_close()
        finally:
            await self._run_logs.close()
            await self.log.close()
            self.state.remove_temporary()


class ClientTool:
    """The work of one call of a client, as a tool. `error` is the error that the work raised, for the client: the log
    has only its text."""

    def __init__(self, spec: ToolSpec, work: Callable[[], Awaitable[Outcome]]) -> None:
        self.spec, self._work = spec, work
        self.error: RetinueError | None = None

    async def preview(self, call: Call, folders: Folders) -> str:
        return ""  # nobody is asked: the client has asked its user

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        try:
            return await self._work()
        except RetinueError as error:
            self.error = error
            raise ToolError(str(error)) from None


class LocalClientHandle(ClientHandle):
    """The run of an external program. It calls tools as a model's run does, except that nobody is asked."""

    def __init__(
        self, control: Control, run: Run, services: RunServices, *, leave: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(control, run.ref, leave=leave)
        self._run, self._services = run, services

    async def call_tool(
        self, call: Call, *, rules_of: str = "", work: Callable[[], Awaitable[Outcome]] | None = None
    ) -> Outcome:
        run = self._run
        self._check_call(call, rules_of or call.name)
        if work is None:
            work = partial(run.plan.tools[call.name], call, run.folders, self._services)
        spec = ToolSpec(call.name, "", {}, tier=USERS_OWN, display_name=call.name, waits=True)
        tool = ClientTool(spec, work)
        run.slot.begin_calls()
        done = await run_caller_call(call, tool, run.folders, self._services, given_up=CALL_GIVEN_UP)
        if tool.error is not None:
            raise tool.error
        return done.outcome

    def _check_call(self, call: Call, tool: str) -> None:
        """Raise ToolError if a rule about `tool` forbids the call, or the run cannot make it."""
        run = self._run
        if tool not in run.plan.tools:
            raise ToolError(f"{run.ref.path} has no tool '{tool}'")
        if run.is_stopping:
            raise ToolError(f"{run.ref.path} is stopping, so {call.name} was not run")
        verdict = run.policy.judge(run.plan.tools[tool].spec, call.args, primary=True, workspace=run.folders.path)
        if verdict.what == "deny":
            raise ToolError(f"the rule {verdict.rule} forbids {call.name}")

    async def make_reply(self, tool: str, results: Sequence[tuple[Result[Any], SpawnedRun]]) -> Outcome:
        spawn_tool: Any = self._run.plan.tools[tool]
        outcome: Outcome = spawn_tool.reply(results, self._run.folders)
        return outcome

    async def is_at_work(self) -> bool:
        return not self._run.is_stopping
