"""The contract every log keeps, and `watch` without a seam: the same tests for memory and SQLite."""

import asyncio
import gc
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import retinue
from retinue import Task
from retinue.core.errors import ConfigError, LogError
from retinue.core.events import (
    KINDS,
    Delta,
    Event,
    Message,
    RunEnded,
    RunSpawned,
    TurnStarted,
    Unknown,
    decode,
    encode,
)
from retinue.core.ports import Log
from retinue.log import feed, sqlite
from retinue.log.memory import MemoryLog
from retinue.log.sqlite import SqliteLog
from tests.supervisor.tree.kit import main, spawn, tree

Opener = Callable[[], "AsyncIterator[Log]"]


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path):  # type: ignore[no-untyped-def]
    @asynccontextmanager
    async def make():  # type: ignore[no-untyped-def]
        log = MemoryLog() if request.param == "memory" else SqliteLog(tmp_path / "logs")
        try:
            yield log
        finally:
            await log.close()

    return make


def event(seq: int, body: object, *, run: int = 0, tree: str = "t") -> Event:
    return Event(seq, tree, run, "/main", "main", 1.5, body)  # type: ignore[arg-type]


def spawned() -> RunSpawned:
    return RunSpawned(None, "main", 0, "task", "id", "/w")


def ended() -> RunEnded:
    return RunEnded("done", "x", 1)


async def fill(log: Log, count: int, *, tree: str = "t", end: bool = True) -> None:
    append = log.appender(tree)
    append(event(1, spawned(), tree=tree), False)
    for seq in range(2, count):
        append(event(seq, TurnStarted(seq), tree=tree), False)
    written = append(event(count, ended() if end else TurnStarted(count), tree=tree), True)
    if written is not None:
        await written


async def test_who_waits_for_a_tree_sees_it_begin_and_leaves_nothing_when_none_does(opened) -> None:  # type: ignore[no-untyped-def]
    async with opened() as log:
        log.watch("never", after=0)
        for name in ("nosuch", "soon"):
            watching = log.watch(name)
            waiting = asyncio.ensure_future(anext(watching))
            await asyncio.sleep(0)
            if name == "soon":
                await fill(log, 3, tree=name)
                first = await waiting
                assert [first.seq, *[e.seq async for e in watching]] == [1, 2, 3]
                continue
            waiting.cancel()
            await asyncio.wait([waiting])
            await watching.aclose()
            assert log._feeds == {}
        assert log.trees() == ["soon"]


async def test_what_was_appended_is_read_in_order(opened) -> None:  # type: ignore[no-untyped-def]
    async with opened() as log:
        await fill(log, 1500)
        await fill(log, 3, tree="u")
        assert [e.seq for e in log.read("t")] == list(range(1, 1501))
        assert [e.seq for e in log.read("t", after=1498)] == [1499, 1500]
        assert [e.seq for e in log.read("u")] == [1, 2, 3]
        assert log.read("nosuch") == []
        assert log.trees() == ["t", "u"]


@pytest.mark.requirement("P5")
@pytest.mark.parametrize("after", [0, 1, 7, 2500, 4999])
async def test_a_watcher_that_comes_back_misses_nothing(opened, after: int) -> None:  # type: ignore[no-untyped-def]
    async with opened() as log:
        await fill(log, 2500, end=False)

        async def rest() -> None:
            for seq in range(2501, 5000):
                log.append(event(seq, TurnStarted(seq)))
                if seq % 100 == 0:
                    await asyncio.sleep(0)
            log.append(event(5000, ended()))

        writing = asyncio.create_task(rest())
        seen = [e.seq async for e in log.watch("t", after=after)]
        await writing
        assert seen == list(range(after + 1, 5001))


async def test_a_tree_whose_process_died_ends_for_its_watchers_unless_somebody_writes_it_again(tmp_path: Path) -> None:
    for last in (5, 7):
        log = SqliteLog(tmp_path / "logs")
        try:
            if last == 5:
                await fill(log, last, end=False)
                continue
            assert [e.seq async for e in log.watch("t")] == [1, 2, 3, 4, 5]
            log.append(event(6, TurnStarted(6)))  # not yet in the file
            watching = asyncio.create_task(_all_of(log, "t"))
            await asyncio.sleep(0)
            log.append(event(7, ended()))
            assert await watching == [1, 2, 3, 4, 5, 6, 7]
        finally:
            await log.close()


async def _all_of(log: Log, tree: str) -> list[int]:
    return [e.seq async for e in log.watch(tree) if isinstance(e, Event)]


async def test_a_watcher_may_come_before_the_first_event(opened) -> None:  # type: ignore[no-untyped-def]
    async with opened() as log:

        async def watch() -> list[int]:
            return [e.seq async for e in log.watch("t")]

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await fill(log, 10)
        assert await watching == list(range(1, 11))
        assert await watch() == list(range(1, 11))


@pytest.mark.requirement("P6")
async def test_a_slow_watcher_blocks_nobody_and_only_loses_deltas_which_are_counted(opened) -> None:  # type: ignore[no-untyped-def]
    async with opened() as log:
        await fill(log, 5, end=False)
        watching = log.watch("t", deltas=True)
        assert (await anext(watching)).seq == 1
        extra = 100
        for _ in range(feed.DELTAS_KEPT + extra):
            log.show(Delta("t", 0, "/main", "main", "x"))
        for seq in range(6, 10_000):
            log.append(event(seq, TurnStarted(seq)))
        written = log.append(event(10_000, ended()), True)
        if written is not None:
            await written
        rest = [item async for item in watching]
        assert [e.seq for e in rest if isinstance(e, Event)] == list(range(2, 10_001))
        deltas = [d for d in rest if isinstance(d, Delta)]
        assert deltas[0].kind == "dropped" and deltas[0].dropped == extra
        assert len(deltas) == feed.DELTAS_KEPT + 1


@pytest.mark.requirement("P3", "P4")
async def test_every_watcher_sees_one_order_and_the_ending_last(opened) -> None:  # type: ignore[no-untyped-def]
    del opened
    script = {"main": [spawn(*({"task": f"t{n}"} for n in range(8))), {"text": "end"}], "*": [{"hang": True}]}
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script), "go")

        async def watch() -> list[Event]:
            return [item async for item in r.control.supervisor.watch(run.tree) if isinstance(item, Event)]

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
        stored = r.control.supervisor.log.read(live[0].tree)

    def plain(events: list[Event]) -> list[object]:
        return [msgspec.json.decode(encode(e)) for e in events]

    assert plain(stored) == plain(live)


@pytest.mark.requirement("P9")
def test_unknown_kinds_and_fields_pass_through() -> None:
    line = (
        b'{"seq":1,"tree":"t","run":0,"path":"/main","agent":"a","at":1.0,"kind":"run.dreamt","depth":{"x":[1,null]}}'
    )
    unknown = decode(line)
    assert unknown.kind == "run.dreamt" and isinstance(unknown.body, Unknown)
    assert msgspec.json.decode(encode(unknown)) == msgspec.json.decode(line)
    known = decode(line.replace(b"run.dreamt", b"turn.started").replace(b'"depth"', b'"turn":4,"new"'))
    assert known.body == TurnStarted(4)


@pytest.mark.requirement("P9")
async def test_an_unknown_event_reaches_watchers_and_breaks_no_fold(opened) -> None:  # type: ignore[no-untyped-def]
    from retinue.log.runs import Runs

    async with opened() as log:
        log.append(event(1, spawned()))
        log.append(event(2, Unknown("run.dreamt", {"depth": 3})))
        written = log.append(event(3, ended()), True)
        if written is not None:
            await written
        seen = [e async for e in log.watch("t")]
    assert [e.kind for e in seen] == ["run.spawned", "run.dreamt", "run.ended"]
    assert Runs.of("t", seen).runs[0].status == "done"


def test_the_kinds_are_the_agreed_ones() -> None:
    assert set(KINDS) == {
        "run.spawned", "run.started", "run.resumed", "turn.started", "thinking", "message", "tool.call",
        "tool.started", "tool.result",
        "approval.asked", "approval.decided", "inbox", "usage", "turn.ended", "warning", "gap", "run.ended",
    }  # fmt: skip


@given(text=st.text(), label=st.text(min_size=1))
def test_any_text_survives_the_line(text: str, label: str) -> None:
    text, label = (t.encode("utf-8", "replace").decode() for t in (text, label))
    before = Event(3, "t", 2, "/main/" + label, label, 12.5, Message(text))
    line = encode(before)
    assert b"\n" not in line
    assert decode(line) == before


async def test_one_file_has_one_writer_and_is_taken_again_when_free(tmp_path: Path) -> None:
    first = SqliteLog(tmp_path)
    second = SqliteLog(tmp_path)
    assert (first.path.name, second.path.name) == ("0001.db", "0002.db")
    await fill(first, 3)
    await first.close()
    third = SqliteLog(tmp_path)
    assert third.path.name == "0001.db"
    assert third.trees() == ["t"]
    await fill(third, 4, tree="u")
    assert [e.seq for e in third.read("u")] == [1, 2, 3, 4]
    assert [e.seq for e in third.read("t")] == [1, 2, 3]
    await second.close()
    await third.close()
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_batch_that_cannot_be_written_is_told_and_written_later(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await fill(log, 3, end=False)
    blocker = apsw.Connection(str(log.path))
    log._db.set_busy_timeout(1)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(LogError, match=r"cannot write the log .*0001\.db"):
        await log.append(event(4, TurnStarted(4)), True)
    blocker.execute("ROLLBACK")
    await log.append(event(5, ended()), True)
    assert [e.seq for e in log.read("t")] == [1, 2, 3, 4, 5]
    blocker.close()
    await log.close()


async def test_who_did_not_wait_for_what_cannot_be_written_made_no_mistake(tmp_path: Path) -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told["message"]))
    log = SqliteLog(tmp_path)
    await fill(log, 3, end=False)
    blocker = apsw.Connection(str(log.path))
    log._db.set_busy_timeout(1)
    blocker.execute("BEGIN IMMEDIATE")
    log.append(event(4, TurnStarted(4)), True)  # as of a run that was cancelled before it began
    with pytest.raises(LogError):
        await log.append(event(5, ended()), True)
    blocker.close()
    await log.close()
    gc.collect()
    assert said == []


async def test_a_task_that_is_refused_leaves_nothing_in_the_log() -> None:
    async with retinue.open() as r:
        with pytest.raises(ConfigError, match="does not exist"):
            await r.spawn(main({"main": ["done"]}), Task("go", context_paths=["/nosuch"]))
        assert isinstance(r.control.supervisor.log, MemoryLog)
        assert r.control.supervisor.log._feeds == {}


async def test_many_events_take_few_commits(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await fill(log, 5000)
    assert log.commits <= 3
    await log.close()


async def test_what_is_not_a_log_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "0001.db").write_bytes(b"not a database, but long enough to be looked at" * 40)
    with pytest.raises(LogError, match=r"0001\.db"):
        SqliteLog(tmp_path)
    (tmp_path / "0001.db").unlink()
    other = apsw.Connection(str(tmp_path / "0001.db"))
    other.execute("CREATE TABLE x (y)")
    other.close()
    with pytest.raises(LogError, match="is not a log of retinue"):
        SqliteLog(tmp_path)
    assert sqlite.claim(tmp_path)[0].name == "0001.db"


async def test_a_newer_log_is_left_alone(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await log.close()
    db = apsw.Connection(str(log.path))
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LogError, match="written by a newer retinue"):
        SqliteLog(tmp_path)


async def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match=os.fspath(tmp_path / "file")):
        SqliteLog(tmp_path / "file" / "logs")


@pytest.mark.parametrize("place", [b"/main", b"turn.started", b'"at"'])
def test_a_line_with_flipped_bytes_is_no_event_whatever_was_hit(place: bytes) -> None:
    line = encode(event(1, TurnStarted(1)))
    assert decode(line) == event(1, TurnStarted(1))
    for broken in (line.replace(place, b"\xff" + place[1:]), line[: line.index(place)] + b"[" * 100_000):
        with pytest.raises(msgspec.MsgspecError):
            decode(broken)
