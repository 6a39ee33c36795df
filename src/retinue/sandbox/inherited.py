"""`inherited`: the run shares the supervisor's process, authority and event loop. There is no wall."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from retinue.agent.jobs import run_job
from retinue.core.events import RunStarted
from retinue.core.limits import CANCEL_ASK_SECONDS
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.results import Ending


class Inherited:
    """Runs a job as part of the task that awaits it, so cancelling that task is all there is to stop."""

    name = "inherited"
    grace = CANCEL_ASK_SECONDS
    started = RunStarted()

    def run(self, job: Job, link: Link) -> Coroutine[Any, Any, Ending]:
        return run_job(job, link)
