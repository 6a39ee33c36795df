"""The few lines that run a job at the far end of any link: in this process, another one, or behind a wall."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from retinue.agent.callables import run_callable
from retinue.agent.loop import run_loop
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.results import Ending


def run_job(job: Job, link: Link) -> Coroutine[Any, Any, Ending]:
    run = run_loop if job.plan.profile.call is None else run_callable
    return run(job, link)
