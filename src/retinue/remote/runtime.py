"""The runtime of remote runs, as their plans have it. The supervisor drives them through an adapter instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from retinue.core.plans import Job, JobRunner
from retinue.core.ports import Link
from retinue.core.results import Ending
from retinue.remote.port import RemoteAdapter

Prepare = Callable[[Job, Link], Awaitable[None]]


class RemoteRuntime(JobRunner):
    """Says that a run is remote, and which `adapter` starts it; None for runs that only their peer can start. What is
    written when such a run begins comes from the peer, so `started` is None. `prepare` makes the workspaces above the
    run, which its peer may read."""

    def __init__(self, name: str, adapter: RemoteAdapter | None = None, *, prepare: Prepare | None = None) -> None:
        self.name = name
        self.adapter = adapter
        self.prepare = prepare
        self.grace = 0.0 if adapter is None else adapter.grace

    async def run(self, job: Job, link: Link) -> Ending:
        raise RuntimeError(f"a run of runtime '{self.name}' is driven through its adapter")
