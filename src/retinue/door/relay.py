"""The collector's port in a process that is itself reported: it opens nothing, and passes on the address it got."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retinue.core.messages import RunRef
from retinue.core.ports import Outcome
from retinue.door.downward import Downward, mint
from retinue.door.publisher import Publisher
from retinue.wire import travel
from retinue.wire.collected import ADDRESS, CPE_ADDRESS


class Relay:
    """`publisher` knows under which ids the runs of this process are reported."""

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
        """What the call's run did is told by whoever ran it, to whom the address belongs."""

    def gone(self, server: str) -> None:
        """Its runs were reported to somebody else, where they end with the run that made them."""

    async def close(self) -> None:
        """Nothing was opened."""
