"""Remote agents that runs are delegated to over A2A, and their inspection for the CLI.

The A2A library is imported when the first agent is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retinue.core.plans import Job, Runtime
from retinue.core.ports import Emit
from retinue.core.remote_agents import A2aAgent, AgentReport
from retinue.remote.port import RemoteRuntime

if TYPE_CHECKING:
    from retinue.remote.a2a.adapter import A2aAdapter

A2A = "a2a"


class RemoteAgents:
    """The runtimes of remote A2A agents. The adapter of an agent is made when the agent is first called."""

    def __init__(self) -> None:
        self._adapters: dict[A2aAgent, A2aAdapter] = {}

    def find_runtime(self, agent: A2aAgent) -> Runtime:
        from retinue.remote.a2a.adapter import A2aAdapter

        if agent not in self._adapters:
            self._adapters[agent] = A2aAdapter(agent)
        return RemoteRuntime(name=A2A, adapter=self._adapters[agent], prepare=_prepare_nothing)

    async def close(self) -> None:
        for adapter in self._adapters.values():
            await adapter.close()


async def _prepare_nothing(job: Job, emit: Emit) -> None:
    """Prepare nothing, since a remote agent reads no folder of ours."""


async def inspect_agent(agent: A2aAgent) -> AgentReport:
    """Fetch and check the card of an agent. Raises RetinueError, which says what is wrong."""
    from retinue.remote.a2a.connection import PeerConnection

    connection = PeerConnection(agent)
    try:
        return await connection.inspect()
    finally:
        await connection.close()
