"""Run ids and remaining limits for the MCP servers that we start and the calls that we make on them."""

from __future__ import annotations

import os
import secrets

import msgspec

from retinue.core.caller import Caller, narrow_caller
from retinue.core.limits import DEFAULT_DEPTH, Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Clock
from retinue.protocol import inherited_limits as travel
from retinue.remote.validator import clean_name
from retinue.supervisor.remaining_limits import left_to
from retinue.supervisor.supervisor import Supervisor


class Downward:
    """The limits that travel down from one supervisor, which is set once it is made."""

    supervisor: Supervisor

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._clock = clock
        self._limits = limits if isinstance(limits.depth, int) else Limits(depth=DEFAULT_DEPTH).override(limits)

    def variables(self) -> dict[str, str]:
        """Return the limits of all calls on a server, whichever run makes them, as environment variables."""
        above = self.supervisor.caller
        own = above.narrow(self._limits)
        tokens = own.tokens if isinstance(own.tokens, int) else None
        cost = own.cost if own.cost is not msgspec.UNSET else None
        depth = own.depth if isinstance(own.depth, int) else 0
        holds = Caller(
            depth=depth, deadline=above.deadline, tokens=tokens, cost=cost, traceparent=os.environ.get(travel.TRACE, "")
        )
        return travel.to_environment(holds)

    def left(self, ref: RunRef, *, parent_id: str, root_id: str = "") -> Caller:
        """Return what is left to a run that is reported as `parent_id`; nothing for one that is not at work."""
        tree = self.supervisor.trees.get(ref.tree)
        if tree is None or not 0 <= ref.run < len(tree.runs):
            return Caller(depth=0, deadline=0.0, parent_id=parent_id, root_id=root_id)
        found = left_to(tree, tree.runs[ref.run], self._clock)
        above = self.supervisor.caller
        bound = Caller(deadline=above.deadline)
        return narrow_caller(bound, msgspec.structs.replace(found, parent_id=parent_id, root_id=root_id))


def mint(name: str) -> str:
    """Return a new run id that a person can tell from others: the tool's name and some letters."""
    return f"{clean_name(name) or 'run'}-{secrets.token_hex(6)}"
