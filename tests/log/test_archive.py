"""Reading logs beside their writers: what is stored comes out as it is, and a dead writer is known to be dead."""

import asyncio
from pathlib import Path

import apsw
import pytest

from retinue.core.errors import ConfigError, LogError, NotFound
from retinue.core.events import Body, Event, Message, RunEnded, RunSpawned, Unknown, encode, encode_kept
from retinue.log import schema
from retinue.log.archive import Archive
from retinue.log.listing import listing, listings
from retinue.log.lookup import find
from retinue.log.sqlite import SqliteLog


def event(seq: int, body: Body | Unknown, *, tree: str = "t1", run: int = 0, at: float = 100.0) -> Event:
    path = "/main" if run == 0 else f"/main/worker-{run}"
    return Event(seq, tree, run, path, "main" if run == 0 else "worker", at, body)


def spawned(seq: int, *, tree: str = "t1", run: int = 0, label: str = "main", at: float = 100.0) -> Event:
    parent = None if run == 0 else 0
    return event(seq, RunSpawned(parent, label, min(run, 1), "task", f"id-{run}", "/w"), tree=tree, run=run, at=at)


def ended(seq: int, *, tree: str = "t1", run: int = 0) -> Event:
    return event(seq, RunEnded("done", "text", 5), tree=tree, run=run)


async def write(state: Path, *events: Event) -> None:
    """A writer that comes, writes and goes."""
    log = SqliteLog(state / "logs")
    for each in events:
        log.append(each)
    await log.close()


@pytest.mark.requirement("P9")
async def test_unknown_kinds_and_fields_come_out_untouched(tmp_path: Path) -> None:
    future = event(2, Unknown("run.dreamt", {"of": ["sheep", 1.5], "deep": {"er": None}}))
    await write(tmp_path, spawned(1), future, ended(3))
    newer = encode_kept([event(4, Message("hi"))])[:-2] + b',"mood":"new"}}'
    db = apsw.Connection(str(tmp_path / "logs/0001.db"))
    schema.insert(db, begun=[], lines=newer)
    db.close()
    archive = Archive(tmp_path)
    [stored] = archive.trees()
    line = encode(event(4, Message("hi")))[:-1] + b',"mood":"new"}'
    assert list(archive.lines(stored, after=1)) == [encode(future), encode(ended(3)), line]
    assert [each.kind for each in archive.events(stored)] == ["run.spawned", "run.dreamt", "run.ended", "message"]


async def test_trees_of_all_files_newest_first(tmp_path: Path) -> None:
    first, second = SqliteLog(tmp_path / "logs"), SqliteLog(tmp_path / "logs")
    assert {first.path.name, second.path.name} == {"0001.db", "0002.db"}
    first.append(spawned(1, tree="old", at=1.0))
    second.append(spawned(1, tree="new", at=3.0))
    first.append(spawned(1, tree="mid", at=2.0))
    archive = Archive(tmp_path)
    await first.close()
    await second.close()
    assert [stored.tree for stored in archive.trees()] == ["new", "mid", "old"]
    assert Archive(tmp_path / "nowhere").trees() == []


async def test_only_what_its_holder_has_written_is_live(tmp_path: Path) -> None:
    await write(tmp_path, spawned(1, tree="dead"))
    log = SqliteLog(tmp_path / "logs")
    try:
        written = log.append(spawned(1, tree="live", at=200.0), True)
        assert written is not None
        await written
        archive = Archive(tmp_path)
        states = {each.tree: each.state(each.in_order()[0]) for each in listings(archive)[0]}
        assert states == {"live": "starting", "dead": "interrupted"}
    finally:
        await log.close()
    assert [archive.is_live(stored) for stored in archive.trees()] == [False, False]


async def test_following_misses_nothing_and_ends_with_the_tree(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "logs")
    try:
        written = log.append(spawned(1), True)
        assert written is not None
        await written
        archive = Archive(tmp_path)
        [stored] = archive.trees()
        seen: list[bytes] = []

        async def follow() -> None:
            async for line in archive.follow(stored):
                seen.append(line)

        following = asyncio.create_task(follow())
        more = [event(seq, Message(f"m{seq}")) for seq in range(2, 50)]
        for each in more:
            written = log.append(each, True)
            assert written is not None
            await written
        assert not following.done()
        log.append(ended(50))
        await following
        assert seen == [encode(each) for each in (spawned(1), *more, ended(50))]
        assert [line async for line in archive.follow(stored, after=49)] == [encode(ended(50))]
        assert [line async for line in archive.follow(stored, after=50)] == []
    finally:
        await log.close()


async def test_following_ends_when_nobody_is_left_to_write(tmp_path: Path) -> None:
    await write(tmp_path, spawned(1), event(2, Message("last words")))
    archive = Archive(tmp_path)
    [stored] = archive.trees()
    assert len([line async for line in archive.follow(stored)]) == 2
    assert not archive.has_ended(stored)


async def test_a_broken_file_hides_no_other(tmp_path: Path) -> None:
    await write(tmp_path, spawned(1), ended(2))
    (tmp_path / "logs/0002.db").write_bytes(b"nonsense" * 1000)
    (tmp_path / "logs/0003.db").touch()
    apsw.Connection(str(tmp_path / "logs/0004.db")).execute("CREATE TABLE other (x)")
    archive = Archive(tmp_path)
    assert [stored.tree for stored in archive.trees()] == ["t1"]
    assert len(archive.problems) == 3
    for number, problem in zip((2, 3, 4), archive.problems, strict=True):
        assert f"000{number}.db" in problem


async def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    await write(tmp_path, spawned(1), ended(2))
    db = apsw.Connection(str(tmp_path / "logs/0001.db"))
    db.execute("UPDATE batches SET lines = CAST(lines || x'0a7b7d' AS BLOB)")
    db.close()
    archive = Archive(tmp_path)
    [stored] = archive.trees()
    with pytest.raises(LogError, match=r"0001\.db holds a line that is not an event"):
        list(archive.events(stored))


async def test_names_find_runs_and_never_guess(tmp_path: Path) -> None:
    await write(
        tmp_path,
        spawned(1, tree="aaa1"),
        spawned(2, tree="aaa1", run=1, label="dig"),
        spawned(3, tree="aaa1", run=12, label="dig deeper"),
        spawned(1, tree="aab2", at=200.0),
    )
    archive = Archive(tmp_path)
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
    assert {name: find(archive, name).name for name in found} == found
    for ambiguous in ("aa", "main", "/main", "di", "aa/0"):
        with pytest.raises(ConfigError, match="could be any of") as error:
            find(archive, ambiguous)
        assert not isinstance(error.value, NotFound)
    with pytest.raises(NotFound, match="near are 'dig deeper'"):
        find(archive, "digg deeper")
    with pytest.raises(NotFound, match="there are no runs"):
        find(Archive(tmp_path / "nowhere"), "x")


async def test_a_listing_measures_an_interrupted_run_up_to_what_is_known(tmp_path: Path) -> None:
    await write(tmp_path, spawned(1, at=100.0), event(2, Message("m"), at=107.5))
    archive = Archive(tmp_path)
    found = listing(archive, archive.trees()[0])
    row = found.row(found.in_order()[0], now=9999.0)
    assert (row["state"], row["status"], row["duration_ms"]) == ("interrupted", None, 7500)
