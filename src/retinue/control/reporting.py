"""Both ends of reporting for one process, as `build` needs them: an MCP server that found an address in its environment
reports there and passes it on; a process that starts servers itself has a collector of its own.
"""

from __future__ import annotations

import os

from retinue.control.collector import Collector
from retinue.control.publisher import PublishedLog, Publisher
from retinue.control.relay import Relay
from retinue.control.server_limits import Downward
from retinue.core.limits import Limits
from retinue.core.ports import Clock, Log
from retinue.protocol import inherited_limits as travel
from retinue.supervisor.supervisor import Supervisor


class Reporting:
    """`collector` is what is given to whoever starts MCP servers. `attach` it before the first of them is."""

    def __init__(self, address: str | None, *, strict: bool, limits: Limits, clock: Clock) -> None:
        self._down = Downward(limits, clock)
        self.publisher = Publisher(address, strict=strict) if address else None
        self.collector: Collector | Relay
        if address and self.publisher:
            self.collector = Relay(self._down, address, self.publisher)
        else:
            self.collector = Collector(self._down)

    def over(self, log: Log) -> Log:
        """The log, with what is written to it reported, if there is somebody to report to."""
        return log if self.publisher is None else PublishedLog(log, self.publisher)

    def attach(self, supervisor: Supervisor) -> None:
        supervisor.bind_caller(travel.inherited(os.environ))
        self._down.supervisor = supervisor
        if self.publisher is not None:
            self.publisher.supervisor = supervisor
            if self.publisher.strict:
                supervisor.driver.wait_before_ending(self.publisher.settle)

    async def close(self) -> None:
        await self.collector.close()
