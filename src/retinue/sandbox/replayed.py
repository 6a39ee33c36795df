"""`replayed`: the run plays its record in this process. Nothing of it leaves the process or touches a file."""

from __future__ import annotations

from retinue.agent.jobs import run_job
from retinue.agent.replay import ReplayLink, Stage, ended
from retinue.core.events import RunStarted
from retinue.core.limits import CANCEL_ASK_SECONDS
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.records import EndOfRecord
from retinue.core.results import Ending


class Replayed:
    """Runs the loop on a link that plays; a run without a model does again what it did besides thinking."""

    name = "replayed"
    grace = CANCEL_ASK_SECONDS
    started = RunStarted()

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def run(self, job: Job, link: Link) -> Ending:
        part = self._stage.part(job.plan)
        playing = ReplayLink(link, part)
        try:
            if job.plan.model is None:
                await part.play(part.record.steps, playing)
                return part.ending()
            return await run_job(job, playing)
        except EndOfRecord:
            return part.ending()
        finally:
            await ended(part, playing)
