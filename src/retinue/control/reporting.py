"""Both ends of reporting for one process, as `build` needs them.

An MCP server that found an address in its environment reports there and passes it on. A process that starts servers
itself has a collector of its own.
"""

from __future__ import annotations

import os

from retinue.control.collector import Collector
from retinue.control.publisher import HookedLog, Publisher
from retinue.control.relay import Relay
from retinue.control.server_limits import Downward
from retinue.core.limits import Limits
from retinue.core.ports import Clock, CommitHook, Log
from retinue.protocol import inherited_limits as travel
from retinue.supervisor.supervisor import Supervisor


class Reporting:
    """The reporting of one process. `collector` is for whoever starts MCP servers; `attach` a supervisor before the
    first of them is started."""

    def __init__(self, address: str | None, *, strict: bool, limits: Limits, clock: Clock) -> None:
        self._down = Downward(limits, clock)
        self.publisher = Publisher(address, strict=strict) if address else None
        self.collector: Collector | Relay
        if address and self.publisher:
            self.collector = Relay(self._down, address, self.publisher)
        else:
            self.collector = Collector(self._down)

    def hook_log(self, log: Log) -> Log:
        """Return the log, with its events reported if there is a collector to report to."""
        return log if self.publisher is None else HookedLog(log, self.publisher)

    @property
    def hook(self) -> CommitHook | None:
        return self.publisher

    def attach(self, supervisor: Supervisor) -> None:
        supervisor.bind_caller(travel.inherited(os.environ))
        self._down.supervisor = supervisor
        if self.publisher is not None:
            self.publisher.runs = supervisor

    async def close(self) -> None:
        await self.collector.close()
