"""The supervisor: owns the trees of one process and one log. Puts its parts together and closes them.

Each part has one job: the spawner makes runs, the driver takes them to their endings, the restorer resumes and
continues, approvals ask people. Models, tools, profiles and sandboxes reach them as plans. `LocalControl` has the
commands that surfaces use.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.caller import Caller
from retinue.core.control import NO_OVERRIDES, Control, ResumeOverrides
from retinue.core.events import Delta, Event, Warned
from retinue.core.limits import Limits, Timeouts
from retinue.core.plans import Planner
from retinue.core.ports import (
    Approver,
    Clock,
    CommitHook,
    Log,
    Order,
    Policy,
    Prices,
    Receipt,
    RuleBook,
    Ticket,
    ToolServers,
)
from retinue.core.profiles import Profile, Task
from retinue.core.results import Status
from retinue.log.threads import read_histories
from retinue.remote.port import RemoteRun
from retinue.remote.validator import Bounds
from retinue.supervisor import inbox
from retinue.supervisor.adoption import Adoption, Peer
from retinue.supervisor.approvals import Approvals, ApprovalTerms
from retinue.supervisor.driver import Driver
from retinue.supervisor.restore import Restorer
from retinue.supervisor.run import Run
from retinue.supervisor.runfiles import RunFiles
from retinue.supervisor.spawner import Spawner
from retinue.supervisor.tree import Tree, TreeRegistry
from retinue.workspaces.run_folders import StateFolder


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
        terms: ApprovalTerms,
        book: RuleBook | None,
        limits: Limits,
        timeouts: Timeouts,
        prices: Prices,
        servers: ToolServers | None = None,
        hook: CommitHook | None = None,
        trace: Callable[[], str] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.policy, self.state, self.servers = policy, state, servers
        self._clock, self._on_close = clock, on_close
        self._control: Control | None = None
        self.trees = TreeRegistry(log)
        self.approvals = Approvals(clock, approver=approver, terms=terms, book=book, project=state.project)
        self.files = RunFiles(self.watch, state)
        self.driver = Driver(
            self.trees, clock=clock, approvals=self.approvals, files=self.files, state=state, hook=hook
        )
        self._spawner = Spawner(
            self.trees,
            self.driver,
            planner=planner,
            state=state,
            clock=clock,
            policy=policy,
            limits=limits,
            timeouts=timeouts,
            prices=prices,
            approvals=self.approvals,
            files=self.files,
            is_reported=hook is not None,
            trace=trace,
        )
        self._restorer = Restorer(
            self.trees,
            self._spawner,
            self.driver,
            planner=planner,
            state=state,
            clock=clock,
            policy=policy,
            prices=prices,
            approvals=self.approvals,
            files=self.files,
        )
        self.make_services = self._spawner.make_services

    @property
    def control(self) -> Control:
        """The Control that owns this supervisor."""
        assert self._control is not None
        return self._control

    def attach_control(self, control: Control) -> None:
        """Let Python functions of runs get this Control with their context."""
        self._control = control
        self.driver.attach_control(control)

    @property
    def log(self) -> Log:
        return self.trees.log

    @property
    def is_unattended(self) -> bool:
        """True if nothing asks here: the mode is `yes`."""
        return getattr(self.policy, "mode", "") == "yes"

    # Starting runs

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        """Wait until the MCP servers that the profile (None: any) has tools from are there or have failed. `say` is
        told what is waited for."""
        if self.servers is not None:
            await self.servers.ready(profile, say)

    def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        caller: Caller | None = None,
    ) -> Run:
        """Start a primary run in a tree of its own."""
        return self._spawner.spawn_primary(profile, task, limits=limits, narrow=narrow, caller=caller)

    def spawn_children(self, tree: Tree, parent: Run, orders: Sequence[Order]) -> list[Ticket]:
        """Start runs below `parent`, all of them or none."""
        return self._spawner.spawn_children(tree, parent, orders)

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> Run:
        """Resume a tree whose process is gone; return the run it ends with. Raises ConfigError if it cannot, LogHeld
        while another process has the right to write it."""
        await self.log.claim(tree)
        return self._restorer.resume_tree(tree, await read_histories(self.log, tree), overrides)

    async def continue_run(self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES) -> Run:
        """Start a run that begins with the conversation of an ended one, and this text."""
        histories = await read_histories(self.log, tree)
        if run != 0 and tree in histories:  # a primary is continued in a tree of its own
            await self.log.claim(tree)
        return self._restorer.continue_run(tree, run, text, histories, overrides)

    def adopt_runs(self, tree: str, peer: Peer, remote: RemoteRun, *, bounds: Bounds | None = None) -> Adoption | None:
        """Return what adopts the runs that a peer reports in a tree; None when the tree is not at work."""
        found = self.trees.get(tree)
        if found is None:
            return None
        return Adoption(
            found, peer, remote, clock=self._clock, state=self.state, approvals=self.approvals, bounds=bounds
        )

    @property
    def caller(self) -> Caller:
        """The run elsewhere that this whole process serves, and what is left to it."""
        return self._spawner.caller

    def bind_caller(self, caller: Caller) -> None:
        """Narrow every tree of this process to what is left to a caller."""
        self._spawner.bind_caller(caller)

    # Steering runs

    def pending(self, tree: str | None = None) -> list[Approval]:
        """Return the questions that wait for an answer, in the order they were asked."""
        return self.approvals.pending(tree)

    def answer(self, approval_id: str, decision: Decision, *, by: str, digest: str = "") -> Answered:
        """Answer a question: the first answer is taken, a later one is stale."""
        return self.approvals.answer(approval_id, decision, by=by, digest=digest)

    async def cancel(self, tree: str, run: int = 0, *, status: Status = "cancelled") -> bool:
        """Stop a run and all below it; False if there is nothing to stop (ended, stopping already, unknown)."""
        found = self.trees.find_run(tree, run)
        return found is not None and found.stop(status)

    async def send(self, tree: str, run: int, text: str, *, source: str = inbox.USER) -> Receipt:
        """Send a message to a run, read at its next turn."""
        return await inbox.send_message(self.trees.get(tree), run, text, source=source)

    def stop_run(self, tree: str, run: int, status: Status, *, failure: str = "") -> None:
        """Stop a run that is at work. With a `failure` it ends `failed`, with that text."""
        found = self.trees.find_run(tree, run)
        if found is not None and not found.ending and found.stopping is None:
            found.set_failure(failure)
            found.stop(status)

    def warn_run(self, tree: str, run: int, text: str, *, code: str) -> bool:
        """Write a warning to a run; False if it has ended."""
        found, at = self.trees.find_run(tree, run), self.trees.get(tree)
        if found is None or at is None or found.ended:
            return False
        at.write(found, Warned(text, code=code))
        return True

    def kill(self, tree: str) -> None:
        """Stop a whole tree at once, without waiting for its clean-up."""
        found = self.trees.get(tree)
        for run in found.runs if found is not None else ():
            run.kill()

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        return self.log.watch(tree, after=after, deltas=deltas)

    async def close(self) -> None:
        """Cancel what still runs, wait for the endings, and close the log."""
        self._spawner.close()
        roots = [tree.root for tree in self.trees.values() if tree.root is not None]
        for run in roots:
            run.stop("cancelled")
        for run in roots:
            await run.join()
        await self.approvals.close()
        try:
            if self._on_close is not None:
                await self._on_close()
        finally:
            await self.files.close()
            await self.log.close()
            self.state.remove_temporary()
