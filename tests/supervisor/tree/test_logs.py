"""A tree in the log: one order for every watcher, the same in memory and on disk, and nothing of a refused task."""

import asyncio
from pathlib import Path

import msgspec
import pytest

import retinue
from retinue import Task
from retinue.core.errors import ConfigError
from retinue.core.events import Event, encode_event
from tests.supervisor.tree.kit import main, spawn, tree


@pytest.mark.requirement("P3", "P4")
async def test_every_watcher_sees_one_order_and_the_ending_last() -> None:
    script = {"main": [spawn(*({"task": f"t{n}"} for n in range(8))), {"text": "end"}], "*": [{"hang": True}]}
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script), "go")

        async def watch() -> list[Event]:
            return [item async for item in r.control.watch(run.tree) if isinstance(item, Event)]

        watchers = [asyncio.create_task(watch()) for _ in range(3)]
        async for item in run.events():
            if item.run == 8 and item.kind == "turn.started":
                await run.cancel()
        first, *others = await asyncio.gather(*watchers)
    assert all(other == first for other in others)
    assert [e.seq for e in first] == list(range(1, len(first) + 1))
    assert first[-1].run == 0 and first[-1].body.status == "cancelled"  # type: ignore[union-attr]
    for number in range(9):
        own = [e.kind for e in first if e.run == number]
        assert own[0] == "run.spawned" and own[-1] == "run.ended" and own.count("run.ended") == 1


async def test_a_tree_reads_the_same_from_memory_and_from_disk(tmp_path: Path) -> None:
    script = {
        "main": [spawn({"task": "a", "subagent_id": "a"}), {"text": "end"}],
        "a": [
            {"thinking": "hm", "text": "\u202e \x1b[31m \U0001f600", "tools": [{"name": "list_agents"}]},
            {"text": "k"},
        ],
    }
    _, live = await tree(script, path=tmp_path / ".retinue")
    async with retinue.open(tmp_path / ".retinue") as r:
        stored = await r.control.log.read(live[0].tree)

    def plain(events: list[Event]) -> list[object]:
        return [msgspec.json.decode(encode_event(e)) for e in events]

    assert plain(stored) == plain(live)


async def test_a_task_that_is_refused_leaves_nothing_in_the_log() -> None:
    async with retinue.open() as r:
        with pytest.raises(ConfigError, match="does not exist"):
            await r.spawn(main({"main": ["done"]}), Task("go", context_paths=["/nosuch"]))
        assert await r.control.log.list_trees() == []
