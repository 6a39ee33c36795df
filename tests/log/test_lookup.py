"""Finding runs by what a person typed, and listing trees."""

from pathlib import Path

import pytest

from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import Message
from retinue.log.listing import load_listing, load_listings
from retinue.log.lookup import find_run
from retinue.log.memory import MemoryLog
from retinue.log.sqlite import SqliteLog
from retinue.log.sqlite_reader import SqliteReader
from tests.log.kit import make_event, make_spawned, write, write_files


async def test_names_find_runs_and_never_guess() -> None:
    log = MemoryLog()
    with pytest.raises(NotFound, match="there are no runs"):
        await find_run(log, "x")
    await write(
        log,
        make_spawned(1, tree="aaa1"),
        make_spawned(2, tree="aaa1", run=1, label="dig"),
        make_spawned(3, tree="aaa1", run=12, label="dig deeper"),
        make_spawned(1, tree="aab2", at=200.0),
    )
    found = {
        "": "aab2/0",
        "aaa1": "aaa1/0",
        "aab": "aab2/0",
        "aaa1/1": "aaa1/1",
        "aaa/12": "aaa1/12",
        "dig": "aaa1/1",
        "dig d": "aaa1/12",
        "/main/worker-12": "aaa1/12",
        "id-12": "aaa1/12",
    }
    assert {name: (await find_run(log, name)).name for name in found} == found
    for ambiguous in ("aa", "main", "/main", "di", "aa/0"):
        with pytest.raises(ConfigError, match="could be any of") as error:
            await find_run(log, ambiguous)
        assert not isinstance(error.value, NotFound)
    with pytest.raises(ConfigError, match=r"any of aab2/0 .*: .*; aaa1/0"):
        await find_run(log, "main")
    with pytest.raises(NotFound, match="similar names: 'dig deeper'"):
        await find_run(log, "digg deeper")


async def test_only_trees_that_their_writer_has_written_seem_to_run(tmp_path: Path) -> None:
    await write_files(tmp_path, make_spawned(tree="dead"))
    log = SqliteLog(tmp_path / "logs")
    try:
        await write(log, make_spawned(tree="live", at=200.0))
        found, left_out = await load_listings(SqliteReader(tmp_path / "logs"))
        assert {each.tree: each.state_of(each.list_runs()[0]) for each in found} == {
            "live": "starting",
            "dead": "interrupted",
        }
        assert left_out == 0
    finally:
        await log.close()


async def test_a_listing_measures_an_interrupted_run_up_to_its_newest_event(tmp_path: Path) -> None:
    await write_files(tmp_path, make_spawned(at=100.0), make_event(2, Message("m"), at=107.5))
    found = await load_listing(SqliteReader(tmp_path / "logs"), "t1")
    row = found.make_row(found.list_runs()[0], now=9999.0)
    assert (row["state"], row["status"], row["duration_ms"]) == ("interrupted", None, 7500)
