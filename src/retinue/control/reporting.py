"""Both ends of reporting for one process, as `build` needs them.

An MCP server that found an address in its environment reports there and passes it on. A process that starts servers
itself has a collector of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retinue.control.collector import Collector
from retinue.control.publisher import HookedLog, Publisher
from retinue.control.server_limits import Downward, mint
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Clock, CommitHook, Log, Outcome
from retinue.protocol import inherited_limits as travel
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS
from retinue.supervisor.supervisor import Supervisor


class Relay:
    """The collector's port in a process that is itself reported: opens nothing, passes on the address it got.

    `publisher` knows the ids under which the runs of this process are reported."""

    def __init__(self, down: Downward, address: str, publisher: Publisher) -> None:
        self._down = down
        self._address = address
        self._publisher = publisher

    def environment(self, server: str) -> Mapping[str, str]:
        return {**self._down.variables(), ADDRESS: self._address, CPE_ADDRESS: self._address}

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        return mint(name)

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        parent_id, root_id = self._publisher.ids_of(ref.tree, ref.run)
        return travel.to_meta(self._down.left(ref, parent_id=parent_id, root_id=root_id))

    def returned(self, run_id: str, outcome: Outcome | None) -> None:
        """Report the end of a call that failed or was given up, in case the process that ran it is gone. The first
        reported end of a run counts."""
        if outcome is None:
            self._publisher.end(run_id, "cancelled", "")
        elif not outcome.success:
            self._publisher.end(run_id, "failed", outcome.text)

    def gone(self, server: str) -> None:
        """Do nothing: the open calls of the server fail, and `returned` reports those."""

    async def close(self) -> None:
        """Nothing was opened."""


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
        self._down.supervisor = supervisor
        if self.publisher is not None:
            self.publisher.runs = supervisor

    async def close(self) -> None:
        await self.collector.close()
