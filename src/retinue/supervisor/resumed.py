"""The link of a run that goes on after a crash: calls it had made before are not made again.

A call that was written and has no result is asked about again, gets the answer it had been given, or is simply run
again; children that it had spawned are its children still. New calls go the usual way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Order, Preview, Ticket
from retinue.log.resume_state import OpenCall
from retinue.supervisor.approvals import started
from retinue.supervisor.links import APPLY, NOTHING, RunLink
from retinue.supervisor.nodes import Node
from retinue.supervisor.places import ticket_of
from retinue.supervisor.questions import judged


class ResumedLink(RunLink, eq=False):
    """`open` are the calls without a result, by their ids."""

    open: dict[str, OpenCall] = msgspec.field(default_factory=dict)

    def go_on(self, calls: Mapping[str, OpenCall]) -> None:
        self.open = dict(calls)
        self.node.slot.begin_calls(len(self.open))

    async def begin(self, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        before = self.open.pop(call.id, None)
        if before is None:
            return await super().begin(call, spec, preview)
        self._still_wanted()
        try:
            return await self._begin_again(before, call, spec, preview)
        except ToolError:
            raise  # of its preview: the call gets a result
        except BaseException:
            self.node.slot.drop_call()
            raise

    async def _begin_again(self, before: OpenCall, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        node = self.node
        if spec.tier == "none":
            return NOTHING
        if spec.server:
            spec = self._seal(call, spec)
        said = before.decision
        if isinstance(said, Deny):
            return said
        edited = None if said is None else said.args
        verdict = judged(node, spec, call if edited is None else Call(call.id, call.name, edited))
        if (
            said is not None and verdict.what != "deny" and call.name != APPLY and before.seal == spec.seal
        ):  # that yes was to files, and to the tool of a server, as they were then
            await started(self.tree, node, call)
            return said
        if self._children(call.id) or (verdict.what == "allow" and not verdict.rule):
            return Allow()
        return await self._settle(call, spec, preview, verdict)

    async def spawn(self, orders: Sequence[Order]) -> list[Ticket]:
        made = self._children(orders[0].call_id)[: len(orders)]
        rest = orders[len(made) :]
        return [ticket_of(child) for child in made] + (await super().spawn(rest) if rest else [])

    def _children(self, call_id: str) -> list[Node]:
        """Those that this call spawned before the crash."""
        return [child for child in self.node.children if call_id and child.view.spawned.call_id == call_id]
