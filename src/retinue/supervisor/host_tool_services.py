"""What a tool that lives with the supervisor may do for the run that called it. Fulfils the Hosting port."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from retinue.core.approvals import Decision, Deny, denial
from retinue.core.errors import Unconfirmed
from retinue.core.events import ToolCall
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Link, Outcome
from retinue.core.rules import Verdict
from retinue.supervisor.links import RunLink, own

ASKS = Verdict("ask", rule="only a person can answer", firm=True)
NOBODY = "Nobody could be asked."


class Hosted:
    """Links are those of runs of this process: that is where such tools are called."""

    def spill(self, link: Link, name: str) -> Path:
        return _of(link).node.folders.spill(name)

    def alive(self, link: Link) -> None:
        stall = _of(link).node.stall
        if stall is not None:
            stall.record_activity()

    async def ask(self, link: Link, name: str, args: dict[str, Any], preview: str) -> Decision | None:
        run = _of(link)
        tree, node = run.tree, run.node
        call = Call(f"{name}_{tree.seq + 1}", name, args)
        spec = ToolSpec(name, preview, {}, host=True)
        began = time.monotonic()
        tree.write(node, ToolCall(call.id, name, own(args), host=True))
        node.slot.begin_calls()
        said, decision = NOBODY, None
        try:
            decision = await run.supervisor.desk.settle(tree, node, call, spec=spec, preview=preview, verdict=ASKS)
            said = denial(decision) if isinstance(decision, Deny) else "answered"
        except Unconfirmed:
            pass
        finally:
            took = round((time.monotonic() - began) * 1000)
            run.finish(call, Outcome(said, success=said == "answered"), took)
        return decision


def _of(link: Link) -> RunLink:
    assert isinstance(link, RunLink)
    return link
