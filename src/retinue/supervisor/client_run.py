"""A client of a protocol as run 0 of a tree: it stands for somebody outside, who is no agent of ours, so that depth,
slots, budget and cancelling of what it delegates are the supervisor's. It does nothing but be there until it leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from retinue.core.context import Context
from retinue.core.control import MCP_CLIENT
from retinue.core.errors import RetinueError
from retinue.core.events import ToolCall, ToolResult
from retinue.core.limits import Limits
from retinue.core.messages import Call
from retinue.core.ports import Outcome
from retinue.core.profiles import Profile, Task
from retinue.supervisor.restore_plans import CLIENT_DESCRIPTION, CLIENT_LEFT
from retinue.supervisor.run import Run
from retinue.supervisor.supervisor import Supervisor

GIVEN_UP = "given up by the client"


class Client:
    """`run` is its run, from when it is made until it leaves or is cancelled."""

    def __init__(self, supervisor: Supervisor, about: str, limits: Limits) -> None:
        self._leaving = asyncio.Event()
        profile = Profile(MCP_CLIENT, call=self._stay, description=CLIENT_DESCRIPTION)
        caller = supervisor.caller.as_client()  # what is left to the single call holds for what that makes
        self.run: Run = supervisor.spawn(profile, Task(about), limits=limits, caller=caller)
        self.tree = supervisor.trees[self.run.ref.tree]
        self._services = supervisor.make_services(self.tree, self.run)

    async def _stay(self, task: str, ctx: Context) -> str:
        await self._leaving.wait()
        return CLIENT_LEFT

    @property
    def is_here(self) -> bool:
        return not self.run.is_stopping

    def list_runs(self) -> list[Run]:
        """Return all runs below the client, in the order they were made; none after it has left."""
        return [] if self.run.finished else self.tree.runs[1:]

    async def run_tool(self, call: Call) -> Outcome:
        """Run a tool that the client's run has."""
        return await self.run.plan.by_name[call.name](call, self.run.folders, self._services)

    async def record_call(self, call: Call, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Do the work of a call, and write the call and its result as the client's own."""
        clock = asyncio.get_running_loop().time
        body = ToolCall(
            call_id=call.id, name=call.name, args=call.args, tier="observe", display_name=call.name, waits=True
        )
        self._services.emit(body)
        begun, text, success = clock(), GIVEN_UP, False
        try:
            outcome = await work()
            text, success = outcome.text, outcome.success
            return outcome
        except RetinueError as error:
            text = str(error)
            raise
        finally:
            duration = round((clock() - begun) * 1000)
            result = ToolResult(call_id=call.id, name=call.name, text=text, success=success, duration_ms=duration)
            self._services.emit(result)

    async def leave(self) -> None:
        """End the run, and with it all below it."""
        self._leaving.set()
        await self.run.join()
