"""Tests of servers behind servers: the root sees the events of the deepest, and depth is limited as in one process."""

import json
from pathlib import Path

import pytest

from retinue.core.events import RunEnded, RunSpawned, Thinking, ToolResult
from retinue.core.limits import Limits
from retinue.protocol.reports import CPE_ADDRESS
from tests.remote.collector.kit import of, open_collector, runs_of

NESTED = str(Path(__file__).with_name("nested.py"))


@pytest.mark.requirement("CPE-6", "CPE-24", "CPE-31", "CPE-38")
@pytest.mark.parametrize("only", ["both", "environment", "meta"])
async def test_three_processes_deep_and_no_deeper(tmp_path: Path, only: str) -> None:
    """The root may go three levels deep. It holds also when only one of the two ways down is passed on."""
    async with open_collector(tmp_path, limits=Limits(depth=3)) as h:
        server = h.server()
        run_id = server.call()
        meta = {} if only == "environment" else dict(h.collector.meta(h.main.ref))
        more = {"RETINUE_SUBAGENT_DEPTH": ""} if only == "meta" else {}
        process = await server.start(NESTED, run_id, json.dumps(meta), **more)
        said, complaint = await process.communicate()
        assert (process.returncode, said.decode()) == (0, f"{run_id} is done\n"), complaint.decode()
        events = await h.until("run.ended", 3)
        runs = runs_of(events)
        assert len(runs) == 4  # each once
        parents = {event.run: event.body.parent for event in events if isinstance(event.body, RunSpawned)}
        assert parents == {0: None, 1: 0, 2: 1, 3: 2}
        assert [event.body.text for event in events if isinstance(event.body, Thinking)] == [
            f"I am {event.body.subagent_id}" for event in events if isinstance(event.body, RunSpawned) and event.run
        ]
        assert [event.run for event in events if isinstance(event.body, RunEnded)] == [3, 2, 1]
        [refused] = [body.text for body in of(events, 3) if isinstance(body, ToolResult)]
        assert refused.startswith("Subagent depth limit exceeded (0/0). Cannot spawn nested subagent 'agent'")
        assert events[-1].path == "/main/agent-1"
        assert server.environment[CPE_ADDRESS] == server.address
