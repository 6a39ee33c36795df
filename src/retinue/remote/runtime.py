"""The runtime of remote runs, as their plans have it. The supervisor drives them through an adapter instead."""

from __future__ import annotations

from retinue.core.events import RunStarted
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.results import Ending


class RemoteRuntime:
    """Says that a run is remote. What is written when it begins comes from the peer, so `started` is None."""

    started: RunStarted | None = None

    def __init__(self, name: str, *, grace: float) -> None:
        self.name = name
        self.grace = grace

    async def run(self, job: Job, link: Link) -> Ending:
        raise RuntimeError(f"a run of runtime '{self.name}' is driven through its adapter")
