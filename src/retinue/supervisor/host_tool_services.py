"""Services for tools that run with the supervisor, by the link of the calling run. Fulfils the Hosting port."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from retinue.core.approvals import Decision, Deny, describe_denial
from retinue.core.errors import Unconfirmed
from retinue.core.events import ToolCall
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Link, Outcome
from retinue.core.rules import Verdict
from retinue.supervisor.run_services import RunServices, copy_args

ASKS = Verdict("ask", rule="only a person can answer", firm=True)
NOBODY = "Nobody could be asked."


class Hosted:
    """The services of this process: its links are RunServices."""

    def spill(self, link: Link, name: str) -> Path:
        return _services_of(link).run.folders.spill(name)

    def alive(self, link: Link) -> None:
        _services_of(link).run.record_activity()

    async def ask(self, link: Link, name: str, args: dict[str, Any], preview: str) -> Decision | None:
        services = _services_of(link)
        tree, run = services.tree, services.run
        call = Call(f"{name}_{tree.seq + 1}", name, args)
        spec = ToolSpec(name, preview, {}, host=True)
        began = time.monotonic()
        tree.write(run, ToolCall(call.id, name, copy_args(args), host=True))
        run.slot.begin_calls()
        said, decision = NOBODY, None
        try:
            decision = await services.approvals.decide(tree, run, call, spec=spec, preview=preview, verdict=ASKS)
            said = describe_denial(decision) if isinstance(decision, Deny) else "answered"
        except Unconfirmed:
            pass
        finally:
            took = round((time.monotonic() - began) * 1000)
            services.finish(call, Outcome(said, success=said == "answered"), took)
        return decision


def _services_of(link: Link) -> RunServices:
    assert isinstance(link, RunServices)
    return link
