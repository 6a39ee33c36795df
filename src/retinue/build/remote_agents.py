"""Remote agents that runs are delegated to over A2A, and their inspection for the CLI.

The A2A library is imported when the first agent is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retinue.core.errors import ConfigError
from retinue.core.plans import Job, Runtime
from retinue.core.ports import Emit
from retinue.core.profiles import Profile
from retinue.core.remote_agents import A2aAgent, AgentReport
from retinue.remote.port import RemoteRuntime

if TYPE_CHECKING:
    from retinue.remote.a2a.adapter import A2aAdapter


def refuse_remote(profile: Profile) -> None:
    """Raise ConfigError for a profile that is a remote agent, where no agent is called."""
    if profile.a2a is not None:
        raise ConfigError(f"the agent '{profile.name}' is remote, and cannot be called from here")


class RemoteAgents:
    """The runtimes of agents that are elsewhere. The adapter of an A2A agent is made when the agent is first called."""

    def __init__(self) -> None:
        self._adapters: dict[A2aAgent, A2aAdapter] = {}

    def find_runtime(self, profile: Profile) -> Runtime | None:
        """Return the runtime of a profile that is a remote agent, or None."""
        agent = profile.a2a
        if agent is None:
            return None
        from retinue.remote.a2a.adapter import A2aAdapter

        if agent not in self._adapters:
            self._adapters[agent] = A2aAdapter(agent)
        return RemoteRuntime(adapter=self._adapters[agent], prepare=prepare_nothing)

    async def close(self) -> None:
        for adapter in self._adapters.values():
            await adapter.close()


async def prepare_nothing(job: Job, emit: Emit) -> None:
    """Prepare nothing, since a remote agent reads no folder of ours."""


async def inspect_agent(agent: A2aAgent) -> AgentReport:
    """Fetch and check the card of an agent. Raises RetinueError, which says what is wrong."""
    from retinue.remote.a2a.connection import PeerConnection

    connection = PeerConnection(agent)
    try:
        return await connection.inspect()
    finally:
        await connection.close()
