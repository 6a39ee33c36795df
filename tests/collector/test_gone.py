"""A server that has ended: what becomes of the runs it reported."""

from pathlib import Path

from retinue.core.events import RunEnded
from retinue.core.ports import Outcome
from tests.collector.kit import hall, runs_of


async def test_runs_of_a_server_that_is_gone_have_ended_and_its_address_is_closed(tmp_path: Path) -> None:
    async with hall(tmp_path) as h:
        server, other = h.server("one"), h.server("two")
        own, elsewhere = server.call(), other.call()
        anchor = h.collector.meta(h.main.ref)["retinue/parentRunID"]
        await server.post(own, "subagent_start")
        await server.post("below", "subagent_start", parentRunID=own)
        await server.post("beside", "subagent_start", parentRunID=anchor)
        await other.post(elsewhere, "subagent_start")
        h.collector.gone("one")
        assert (await server.post("beside", "thought_trace", payload="late")).status == 404
        assert (await other.post(elsewhere, "thought_trace", payload="here")).status == 200
        h.collector.returned(own, Outcome("it ended with exit code 3", success=False))
        events = await h.until("run.ended", 3)
        runs = runs_of(events)
        ended = {event.run: event.body for event in events if isinstance(event.body, RunEnded)}
        statuses = {name: ended[run].status for name, run in runs.items() if run in ended}
        assert statuses == {own: "failed", "below": "disconnected", "beside": "disconnected"}
        assert ended[runs[own]].error_details == "it ended with exit code 3"
