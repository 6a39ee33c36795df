"""A client of a protocol as run 0 of a tree: it stands for somebody outside, who is no agent of ours, so that depth,
slots, budget and cancelling of what it delegates are the supervisor's. It does nothing but be there until it leaves.
"""

from __future__ import annotations

import asyncio

from retinue.core.context import Context
from retinue.core.limits import Limits
from retinue.core.profiles import Profile, Task
from retinue.supervisor.nodes import Node
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.trees import Tree

NAME = "mcp-client"
ABOUT = "An MCP client: run 0 of the tree of what it delegates"
LEFT = "The client has left."


async def _gone(task: str, ctx: Context) -> str:
    return LEFT


GONE = Profile(NAME, call=_gone, description=ABOUT)  # for trees of the log, whose client will not come back


class Client:
    """`node` is its run, from when it is made until it leaves or is cancelled."""

    def __init__(self, supervisor: Supervisor, about: str, limits: Limits) -> None:
        self._leaving = asyncio.Event()
        self.supervisor = supervisor
        profile = Profile(NAME, call=self._stay, description=ABOUT)
        caller = supervisor.caller.as_client()  # what is left to the single call holds for what that makes
        self.node: Node = supervisor.spawn(profile, Task(about), limits=limits, caller=caller)
        self.tree: Tree = supervisor.trees[self.node.ref.tree]

    async def _stay(self, task: str, ctx: Context) -> str:
        await self._leaving.wait()
        return LEFT

    @property
    def here(self) -> bool:
        return not self.node.ending and self.node.stopping is None

    async def leave(self) -> None:
        """Ends the run, and with it all below it."""
        self._leaving.set()
        await self.node.join()
