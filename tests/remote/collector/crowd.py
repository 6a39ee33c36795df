"""One of several servers that report many subagents at once, each event at its time: see `flood`.

    crowd.py COUNT EVENTS PER_SECOND RUN_ID...

Posts `subagent_start`, then EVENTS thoughts and an end for each of its runs. The payload has the run, the number of the
event and when it was posted. The runs begin when a line comes on stdin."""

import asyncio
import json
import os
import sys
import time

from retinue.control.reporting import Poster
from retinue.core.events import RunEnded, RunSpawned, Thinking
from retinue.protocol.reports import ADDRESS, ROUTE, Sender


async def subagent(poster: Poster, run_id: str, events: int, *, first: float, every: float) -> None:
    sender = Sender("worker", run_id)

    async def say(body: object) -> None:
        data = sender.encode_event(body, time.time())  # type: ignore[arg-type]
        assert data is not None
        await poster.post(data)

    await say(RunSpawned(None, "", 0, "count", "", ""))
    for number in range(events):
        await asyncio.sleep(max(0.0, first + number * every - time.monotonic()))
        await say(Thinking(json.dumps({"run": run_id, "n": number, "at": time.time(), "fill": "x" * 200})))
    await say(RunEnded("done", "counted", 0))


async def main() -> None:
    events, per_second, *run_ids = sys.argv[1:]
    poster = Poster(os.environ[ADDRESS], ROUTE)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    every = len(run_ids) / float(per_second)
    start = time.monotonic()
    runs = [
        subagent(poster, run_id, int(events), first=start + every * place / len(run_ids), every=every)
        for place, run_id in enumerate(run_ids)
    ]
    await asyncio.gather(*runs)
    poster.close()


asyncio.run(main())
