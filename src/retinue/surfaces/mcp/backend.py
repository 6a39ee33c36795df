"""The Control that serves MCP clients, and what this surface does with it in more than one place.

Knows Control and the log as it is read, nothing of the supervisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from retinue.build.parts import MAIN, Parts
from retinue.build.supervisor import open_control
from retinue.concurrency import TaskOwner
from retinue.control.server import ControlServer
from retinue.core.approvals import Answered, Approval, Decision
from retinue.core.control import (
    MCP_CLIENT,
    MCP_CLIENT_DESCRIPTION,
    ClientHandle,
    ClientOptions,
    Control,
    ResumeOverrides,
    RunHandle,
)
from retinue.core.limits import Limits, Timeouts, clamp_asked
from retinue.core.ports import LogReader, Row
from retinue.core.profiles import Profile
from retinue.log.opening import open_reader
from retinue.protocol import inherited_limits

CLIENT_NAME = MCP_CLIENT
ANSWERED_BY = "mcp client"
_CLIENT_LIMITS = Limits(seconds=None, stall=None)  # a client has no end of its own


class Backend:
    """One Control, its control server, and what they were built from. `log` has the trees of other processes too;
    `profiles` are those that continued runs may have had."""

    def __init__(self, parts: Parts, profiles: Sequence[Profile]) -> None:
        assert parts.state is not None
        self.state: Path = parts.state
        self.timeouts: Timeouts = parts.timeouts
        self._profiles = (MAIN, *profiles)
        self._is_unattended = parts.is_unattended
        self.control: Control = open_control(parts)
        self.log: LogReader = open_reader(parts.state)
        self._server: ControlServer | None = None
        self._tasks = TaskOwner()

    async def start_control_server(self) -> None:
        """Let other terminals in. Raises RetinueError."""
        server = ControlServer(self.control, self.state, unattended=self._is_unattended)
        self._server = await server.__aenter__()

    async def close(self) -> None:
        await self._tasks.wait()
        if self._server is not None:
            await self._server.__aexit__(None, None, None)
        await self.control.close()

    def kill(self) -> None:
        """Stop all trees at once, without waiting for their clean-up."""
        self._tasks.start(self._kill_trees())

    async def _kill_trees(self) -> None:
        for tree in await self.control.list_trees(live=True):
            await self.control.kill(tree.tree)

    def serve_call(self, meta: dict[str, Any], run_id: str) -> AbstractContextManager[None]:
        """Apply what is left to the run that makes a call, if it comes from one, to all runs that are made inside.

        They are reported to that run's collector; the primary among them as `run_id`, if that is given."""
        return self.control.serve_caller(msgspec.structs.replace(inherited_limits.from_meta(meta), run_id=run_id))

    async def open_client(self, about: str) -> ClientHandle:
        """Start run 0 of a client's tree. It stands for the client and makes its calls."""
        options = ClientOptions(name=CLIENT_NAME, task=about, description=MCP_CLIENT_DESCRIPTION, limits=_CLIENT_LIMITS)
        return await self.control.open_client(options)

    async def continue_run(self, tree: str, run: int, text: str, *, seconds: float | None) -> RunHandle:
        """Start a run from the conversation of an old one. `seconds` are clamped as those that a model asks for."""
        if seconds is not None:
            seconds = clamp_asked(seconds, (self.timeouts.minimum, self.timeouts.maximum))
        overrides = ResumeOverrides(profiles=self._profiles, seconds=seconds, files=True)
        return await self.control.continue_run(tree, run, text, overrides)

    async def list_live_runs(self, tree: str) -> list[Row]:
        """Return the runs of a tree that this process has, in the order they were made; none once it has ended."""
        for info in await self.control.list_trees(live=True):
            if info.tree == tree:
                return info.runs
        return []

    async def answer(self, asked: Approval, decision: Decision) -> Answered:
        """Answer a question for the client's user, if it is still the one that was shown."""
        return await self.control.answer(asked.id, decision, by=ANSWERED_BY, digest=asked.digest)
