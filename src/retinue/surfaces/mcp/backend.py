"""The runs of MCP clients, as the rest of this surface sees them.

The only module here that knows the supervisor: the others use the names of Control (`spawn`, `continue_run`, `answer`,
`watch`, `wait`, `cancel`), so that this becomes a Control once that can call a tool for a client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from retinue.build.parts import MAIN, Parts
from retinue.build.supervisor import make_supervisor
from retinue.control.server import ControlServer
from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.caller import narrow_caller
from retinue.core.control import MCP_CLIENT, ResumeOverrides
from retinue.core.errors import ToolError
from retinue.core.events import Delta, Event
from retinue.core.limits import Limits, Timeouts, clamp_asked
from retinue.core.messages import Call, RunRef
from retinue.core.ports import LogReader, Outcome, Ticket
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.log.runs import RunView
from retinue.protocol import inherited_limits
from retinue.supervisor import caller_limits, client_run
from retinue.supervisor.run import Run
from retinue.supervisor.supervisor import Supervisor

CLIENT_NAME = MCP_CLIENT
ANSWERED_BY = "mcp client"
_CLIENT_LIMITS = Limits(seconds=None, stall=None)  # a client has no end of its own


class LiveRun:
    """A run that this process has. `view` is how it stands now."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def ref(self) -> RunRef:
        return self._run.ref

    @property
    def view(self) -> RunView:
        return self._run.view

    @property
    def is_at_work(self) -> bool:
        return not self._run.finished

    @property
    def ticket(self) -> Ticket:
        return self._run.ticket()

    def cancel(self) -> bool:
        """Stop the run and all below it. False if it has ended, or is stopping already."""
        return self._run.stop("cancelled")

    def wait(self) -> asyncio.Future[None]:
        """Return a future that is done when the run has ended. It may be cancelled."""
        return self._run.join()

    def result(self) -> Result[Any]:
        return self._run.result()


class ClientRun:
    """Run 0 of a client's tree. It stands for the client and makes its calls."""

    def __init__(self, supervisor: Supervisor, about: str) -> None:
        self._client = client_run.Client(supervisor, about, _CLIENT_LIMITS)
        self._run = self._client.run

    @property
    def tree(self) -> str:
        return self._run.ref.tree

    @property
    def is_at_work(self) -> bool:
        """True while it can make calls: it has not left, and was not cancelled from elsewhere."""
        return self._client.is_here

    def list_runs(self) -> list[LiveRun]:
        """Return all runs below the client, in the order they were made."""
        return [LiveRun(run) for run in self._client.list_runs()]

    def list_made(self, call_id: str) -> list[LiveRun]:
        """Return the runs that one call made."""
        return [LiveRun(run) for run in self._run.children if run.view.spawned.call_id == call_id]

    def check_rules(self, tool: str, spawn_tool: str, args: dict[str, Any]) -> None:
        """Raise ToolError if a rule forbids the call. Nobody is asked: the client has asked its user."""
        run = self._run
        spec = run.plan.by_name[spawn_tool].spec
        verdict = run.policy.judge(spec, args, primary=True, workspace=run.folders.path)
        if verdict.what == "deny":
            raise ToolError(f"the rule {verdict.rule} forbids {tool}")

    async def run_spawn_tool(self, call: Call) -> Outcome:
        """Run the tool that models spawn with, as a call of the client."""
        return await self._client.run_tool(call)

    def make_reply(self, spawn_tool: str, results: list[tuple[Result[Any], Ticket]]) -> Outcome:
        """Make the reply that the spawn tool gives for these results."""
        tool: Any = self._run.plan.by_name[spawn_tool]
        outcome: Outcome = tool.reply(results, self._run.folders)
        return outcome

    async def record_call(self, call: Call, run: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Run a call; the supervisor logs it with its result."""
        return await self._client.record_call(call, run)

    async def leave(self) -> None:
        """End the run, and with it all below it."""
        await self._client.leave()


class Backend:
    """One supervisor, its control server, and what they were built from. `profiles` are those that continued runs may
    have had."""

    def __init__(self, parts: Parts, profiles: Sequence[Profile]) -> None:
        assert parts.state is not None
        self.state: Path = parts.state
        self.timeouts: Timeouts = parts.timeouts
        self._profiles = (MAIN, *profiles)
        self._supervisor = make_supervisor(parts)
        self._server: ControlServer | None = None

    async def start_control_server(self) -> None:
        """Let other terminals in. Raises RetinueError."""
        supervisor = self._supervisor
        server = ControlServer(supervisor.control, self.state, unattended=supervisor.is_unattended)
        self._server = await server.__aenter__()

    async def close(self) -> None:
        if self._server is not None:
            await self._server.__aexit__(None, None, None)
        await self._supervisor.close()

    def kill(self) -> None:
        """Stop all trees at once, without waiting for their clean-up."""
        for tree in list(self._supervisor.trees):
            self._supervisor.kill(tree)

    @contextmanager
    def serve_call(self, meta: dict[str, Any], run_id: str) -> Iterator[None]:
        """Apply what is left to the run that makes a call, if it comes from one, to all runs that are made inside.

        They are reported to that run's collector; the primary among them as `run_id`, if that is given."""
        caller = narrow_caller(self._supervisor.caller, inherited_limits.from_meta(meta))
        with caller_limits.serve_caller(msgspec.structs.replace(caller, run_id=run_id)):
            yield

    # The commands

    async def prepare(self, profile: Profile | None = None) -> None:
        await self._supervisor.prepare(profile)

    def open_client(self, about: str) -> ClientRun:
        return ClientRun(self._supervisor, about)

    def spawn(self, profile: Profile, task: Task) -> LiveRun:
        """Start the primary of a tree of its own."""
        return LiveRun(self._supervisor.spawn(profile, task))

    async def continue_run(self, tree: str, run: int, text: str, *, seconds: float | None) -> LiveRun:
        """Start a run from the conversation of an old one. `seconds` are clamped as those that a model asks for."""
        if seconds is not None:
            seconds = clamp_asked(seconds, (self.timeouts.minimum, self.timeouts.maximum))
        overrides = ResumeOverrides(profiles=self._profiles, seconds=seconds, files=True)
        return LiveRun(await self._supervisor.continue_run(tree, run, text, overrides))

    @property
    def log(self) -> LogReader:
        """The log of the project, with the trees of other processes too."""
        return self._supervisor.log

    def find_live_run(self, tree: str, run: int) -> LiveRun | None:
        found = self._supervisor.trees.find_run(tree, run)
        return None if found is None else LiveRun(found)

    def list_pending(self) -> list[Approval]:
        return self._supervisor.pending()

    async def answer(self, asked: Approval, decision: Decision) -> Answered:
        """Answer a question for the client's user, if it is still the one that was shown."""
        return self._supervisor.answer(asked.id, decision, by=ANSWERED_BY, digest=asked.digest)

    def watch(self, tree: str) -> AsyncGenerator[Event | Delta]:
        return self._supervisor.watch(tree)
