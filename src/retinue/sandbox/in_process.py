"""The `inherited` runtime: a run's tools execute in the supervisor's process with its rights, without isolation."""

from __future__ import annotations

from collections.abc import Awaitable

from retinue.core.events import RunStarted
from retinue.core.limits import CANCEL_ASK_SECONDS
from retinue.core.messages import Call
from retinue.core.plans import Job
from retinue.core.ports import Emit, Execution, Folders, LocalTool, Outcome


class InProcess:
    """The sandbox without isolation, and at the same time the session of all its runs."""

    name = "inherited"
    grace = CANCEL_ASK_SECONDS
    started = RunStarted()

    def open(self, job: Job, emit: Emit) -> None:
        """Return no session, because the run's tools are already bound to this object."""

    async def preview(self, tool: LocalTool, call: Call, folders: Folders) -> str:
        return tool.preview(call, folders)

    def execute(self, tool: LocalTool, call: Call, execution: Execution) -> Awaitable[Outcome]:
        return tool(call, execution)


IN_PROCESS = InProcess()
