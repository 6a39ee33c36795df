"""The collector's port in a process that is itself reported. It opens nothing and passes on the address it got."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retinue.control.publisher import Publisher
from retinue.control.server_limits import Downward, mint
from retinue.core.messages import RunRef
from retinue.core.ports import Outcome
from retinue.protocol import inherited_limits as travel
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS


class Relay:
    """A stand-in for the collector. `publisher` knows the ids under which the runs of this process are reported."""

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
