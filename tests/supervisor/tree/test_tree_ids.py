"""Ids of trees: unique wherever they are made, and different from the first letter on."""

import os
import random
import re
from pathlib import Path

from retinue.core.events import RunSpawned
from retinue.supervisor.tree import new_tree_id
from tests.control.loopback.kit import serve_supervisor
from tests.remote.collector.kit import open_collector


def test_ids_are_unique_and_differ_in_their_first_letters() -> None:
    ids = [new_tree_id() for _ in range(20_000)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[0-9a-z]{12}", each) for each in ids)
    assert len({each[:2] for each in ids}) > 1000
    assert all(len({each[place] for each in ids}) == 32 for place in range(12))


def test_a_forked_process_makes_other_ids() -> None:
    """A generator that is copied with its process would make the same ones."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_tree_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() != new_tree_id()


async def test_trace_and_span_ids_differ_in_a_program_that_seeds_random(tmp_path: Path) -> None:
    seen: list[RunSpawned] = []
    async with serve_supervisor(tmp_path) as h:
        for _ in range(2):
            random.seed(7)
            run = h.run({"main": ["end"]})
            await run.join()
            seen.append(run.view.spawned)
    assert seen[0].trace_id != seen[1].trace_id
    assert seen[0].span_id != seen[1].span_id


async def test_span_ids_of_adopted_runs_differ_in_a_program_that_seeds_random(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        for _ in range(2):
            random.seed(7)
            await server.post(server.call(), "subagent_start")
        events = await h.until("run.spawned", 3)
    spans = [event.body.span_id for event in events if isinstance(event.body, RunSpawned)]
    assert len(set(spans)) == 3
