"""The runtime of remote runs, as their plans have it. The supervisor drives them through an adapter instead."""

from __future__ import annotations

from retinue.core.events import RunStarted
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.results import Ending
from retinue.remote.port import RemoteAdapter


class RemoteRuntime:
    """Says that a run is remote, and which `adapter` starts it; None for runs that only their peer can start. What is
    written when such a run begins comes from the peer, so `started` is None."""

    started: RunStarted | None = None

    def __init__(self, name: str, adapter: RemoteAdapter | None = None) -> None:
        self.name = name
        self.adapter = adapter
        self.grace = 0.0 if adapter is None else adapter.grace

    async def run(self, job: Job, link: Link) -> Ending:
        raise RuntimeError(f"a run of runtime '{self.name}' is driven through its adapter")
