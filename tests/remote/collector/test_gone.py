"""Tests of the runs of a server that has ended."""

from pathlib import Path

from retinue.control.reporting import Publisher, Relay
from retinue.core.caller import NOBODY
from retinue.core.events import RunEnded
from retinue.core.limits import Limits
from retinue.core.ports import Outcome
from retinue.remote.collector import RemainingLimits
from tests.remote.collector.kit import open_collector, runs_of


async def test_runs_of_a_server_that_is_gone_have_ended_and_its_address_is_closed(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server, other = h.server("one"), h.server("two")
        own, elsewhere = server.call(), other.call()
        anchor = h.collector.meta(h.main.ref)["retinue/parentRunID"]
        await server.post(own, "subagent_start")
        await server.post("below", "subagent_start", parentRunID=own)
        await server.post("beside", "subagent_start", parentRunID=anchor)
        await other.post(elsewhere, "subagent_start")
        h.collector.end_server("one")
        assert (await server.post("beside", "thought_trace", payload="late")).status == 404
        assert (await other.post(elsewhere, "thought_trace", payload="here")).status == 200
        h.collector.end_call(own, Outcome("it ended with exit code 3", success=False))
        events = await h.until("run.ended", 3)
        runs = runs_of(events)
        ended = {event.run: event.body for event in events if isinstance(event.body, RunEnded)}
        statuses = {name: ended[run].status for name, run in runs.items() if run in ended}
        assert statuses == {own: "failed", "below": "disconnected", "beside": "disconnected"}
        assert ended[runs[own]].error_details == "it ended with exit code 3"


async def test_a_server_behind_a_server_that_dies_has_its_runs_ended_at_the_root_at_once(tmp_path: Path) -> None:
    """The inner server reports to the root itself; when it dies, the outer one reports its failed call."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        middle = server.call()
        await server.post(middle, "subagent_start")
        publisher = Publisher(server.address, strict=True)
        relay = Relay(RemainingLimits(Limits(), NOBODY), server.address, publisher)
        crashed, given_up, fine, silent = (relay.call("deep", h.main.ref, "review") for _ in range(4))
        for run_id in (crashed, given_up, fine):
            await server.post(run_id, "subagent_start", parentRunID=middle, seq=1)
        await server.post("deeper", "subagent_start", parentRunID=crashed)
        await server.post(fine, "subagent_end", status="done", payload="the answer", seq=2)
        why = Outcome("the MCP server 'deep' went away during the call: it ended with exit code 9", success=False)
        relay.end_call(crashed, why)
        relay.end_call(given_up, None)
        relay.end_call(fine, Outcome("an error, says its tool", success=False))
        relay.end_call(silent, why)  # nothing was ever reported of it
        events = await h.until("run.ended", 4)
        await publisher.close()
        runs = runs_of(events)
        ended = {event.run: event.body for event in events if isinstance(event.body, RunEnded)}
        assert {name: ended[run].status for name, run in runs.items() if run in ended} == {
            crashed: "failed", "deeper": "disconnected", given_up: "cancelled", fine: "done",
        }  # fmt: skip
        assert ended[runs[crashed]].error_details == why.text
        assert [event.run for event in await h.events() if event.kind == "run.spawned"] == list(range(6))
        assert h.supervisor.trees[h.tree].runs[1].ended is False
