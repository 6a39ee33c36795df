"""The few lines that run a job at the far end of any link: in this process, another one, or behind a wall."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from retinue.agent.callables import run_callable
from retinue.agent.loop import run_loop
from retinue.agent.setups import run_setup
from retinue.core.plans import Job, Setup
from retinue.core.ports import Link
from retinue.core.results import Ending


def run_job(job: Job, link: Link) -> Coroutine[Any, Any, Ending]:
    run = run_loop if job.plan.profile.call is None else run_callable
    return run(job, link) if job.setup is None else _after(job.setup, job, link, run(job, link))


async def _after(setup: Setup, job: Job, link: Link, running: Coroutine[Any, Any, Ending]) -> Ending:
    try:
        await run_setup(setup, job, link)
    except BaseException:
        running.close()
        raise
    return await running
