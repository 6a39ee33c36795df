"""An agent that is a callable: `async fn(task, ctx)` of any framework, run and seen like every other run."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.results import Ending
from retinue.tools.answer import output_of, plain
from retinue.tools.functions import as_text


async def run_callable(job: Job, link: Link) -> Ending:
    """Calls it with the task's text; what it returns is the answer (checked against the profile's output type)."""
    call = job.plan.profile.call
    assert call is not None and job.context is not None
    value: Any = call(job.task.text, job.context)
    if inspect.isawaitable(value):
        value = await value
    if job.plan.profile.output is None:
        return Ending("done", as_text(value))
    output = output_of(job.plan.profile.output)
    checked = output.check(plain(value))
    return Ending("done", msgspec.json.encode(checked).decode(), structured=checked)
