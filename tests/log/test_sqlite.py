"""The log in SQLite files keeps the contract of logs, and what is its own: files, locks, commits, the format."""

import asyncio
import errno
import gc
import os
import random
import signal
import stat
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import apsw
import pytest

from retinue.concurrency import TaskOwner
from retinue.core.errors import LogDamaged, LogError
from retinue.core.events import Event, Message, encode_event, encode_stored_events
from retinue.core.ports import Log, LogReader
from retinue.log import batches, locks, schema, sqlite, sqlite_reader
from retinue.log.sqlite import SqliteLog
from retinue.log.sqlite_reader import SqliteReader
from retinue.log.tree_index import TreeIndex
from tests.gates import until
from tests.log.contract import DurableLogContract, LogContract
from tests.log.kit import fill, make_ended, make_event, make_spawned, write, write_files

WRITES_AND_DIES = """
import asyncio, os, signal, sys
from pathlib import Path
from retinue.core.events import decode_event
from retinue.log.sqlite import SqliteLog
async def main():
    log = SqliteLog(Path(sys.argv[1]))
    for line in sys.argv[2:]:
        log.append(decode_event(line.encode()))
    await log.flush()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


class Files:
    """A folder of log files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self) -> Log:
        return SqliteLog(self._folder)

    def reader(self) -> LogReader:
        return SqliteReader(self._folder)

    def count_watched(self, log: Log) -> int:
        assert isinstance(log, SqliteLog)
        return len(log._own._feeds)

    def take_over(self, log: Log) -> Log:
        assert isinstance(log, SqliteLog)
        log.path.with_suffix(".lock").unlink()
        taken = SqliteLog(self._folder)
        assert taken.path == log.path
        return taken

    @contextmanager
    def block_writes(self, log: Log) -> Iterator[None]:
        assert isinstance(log, SqliteLog)
        blocker = apsw.Connection(str(log.path))
        log._own._db.set_busy_timeout(1)
        blocker.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            blocker.execute("ROLLBACK")
            blocker.close()

    def damage(self, tree: str) -> None:
        name = b'{"seq":2,"tree":"%b"' % tree.encode()
        db = apsw.Connection(str(self._file_of(tree)))
        for batch, lines in db.execute("SELECT id, lines FROM batches").fetchall():
            db.execute("UPDATE batches SET lines = ? WHERE id = ?", (lines.replace(name, b"?" + name), batch))
        db.close()

    def destroy(self, tree: str) -> None:
        self._file_of(tree).write_bytes(b"nonsense" * 1000)

    async def write_and_die(self, *events: Event) -> None:
        lines = [encode_event(event).decode() for event in events]
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITES_AND_DIES, self._folder, *lines)
        assert await process.wait() == -signal.SIGKILL

    def remove_events(self) -> None:
        for file in SqliteReader(self._folder).list_files():
            db = apsw.Connection(str(file))
            db.execute("DELETE FROM batches; DELETE FROM places")
            db.close()

    def set_version(self, version: int) -> None:
        for file in SqliteReader(self._folder).list_files():
            db = apsw.Connection(str(file))
            db.execute(f"PRAGMA user_version = {version}")
            db.close()

    def _file_of(self, tree: str) -> Path:
        file = SqliteReader(self._folder).find_file(tree)
        assert file is not None
        return file


class TestSqliteLog(LogContract, DurableLogContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Files:
        return Files(tmp_path / "logs")


class TestSqliteLogWithoutIndex(LogContract, DurableLogContract):
    """The same while no index is written: readers make their own of the batches it lacks."""

    @pytest.fixture
    def backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
        monkeypatch.setattr(sqlite, "INDEX_LINGER", 1000)
        monkeypatch.setattr(sqlite, "INDEX_SECONDS", 1000)
        return Files(tmp_path / "logs")


async def test_a_watcher_that_came_before_a_tree_was_claimed_hides_nothing_from_the_next(tmp_path: Path) -> None:
    first = SqliteLog(tmp_path)
    await fill(first, 2, end=False)
    log = SqliteLog(tmp_path)
    early = log.watch("t1")
    waiting = asyncio.ensure_future(anext(early))
    await asyncio.sleep(0)
    await first.close()
    await log.claim("t1")
    await write(log, make_ended(3))
    assert [event.seq async for event in log.watch("t1") if isinstance(event, Event)] == [1, 2, 3]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await early.aclose()
    await log.close()


async def test_one_file_has_one_writer_and_is_taken_again_when_free(tmp_path: Path) -> None:
    first = SqliteLog(tmp_path)
    second = SqliteLog(tmp_path)
    assert (first.path.name, second.path.name) == ("0001.db", "0002.db")
    await fill(first, 3)
    await first.close()
    third = SqliteLog(tmp_path)
    assert third.path.name == "0001.db"
    await fill(third, 4, tree="t2")
    assert [event.seq for event in await third.read("t2")] == [1, 2, 3, 4]
    assert [event.seq for event in await third.read("t1")] == [1, 2, 3]
    await second.close()
    await third.close()
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_two_trees_of_another_file_are_claimed_with_one_lock(tmp_path: Path) -> None:
    first, second = SqliteLog(tmp_path), SqliteLog(tmp_path)
    await fill(first, 3, end=False)
    await fill(first, 3, tree="t2", end=False)
    await first.close()
    await asyncio.gather(second.claim("t1"), second.claim("t2"))
    await write(second, make_ended(4))
    await write(second, make_ended(4, tree="t2"))
    await write(second, make_spawned(tree="t3"))
    assert locks.read_holder(tmp_path / "0001.db") is not None
    await second.close()
    assert [locks.read_holder(tmp_path / name) for name in ("0001.db", "0002.db")] == [None, None]
    reader = SqliteReader(tmp_path)
    assert [len(await reader.read(tree)) for tree in ("t1", "t2", "t3")] == [4, 4, 1]
    assert reader.find_file("t3") == tmp_path / "0002.db"


LEAVES_A_CHILD = """
import os, sys
from pathlib import Path
from retinue.log import locks
lock = locks.try_lock(Path(sys.argv[1]))
locks.sign_lock(lock, "me", 1)
if os.fork() == 0:
    sys.stdin.read()
os._exit(0)
"""


async def test_a_child_of_a_killed_process_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child inherits the lock until it becomes another program, although the process that signed the lock is
    gone."""
    monkeypatch.setattr(locks, "CHILD_SECONDS", 100.0)
    file = tmp_path / "0001.db"
    held, end = os.pipe()  # of our own: asyncio closes a pipe of its own, and so ends the child, with the process
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", LEAVES_A_CHILD, str(file), stdin=held)
    os.close(held)
    assert await process.wait() == 0
    assert not locks.try_lock(file)
    looking = asyncio.create_task(asyncio.to_thread(locks.read_holder, file))
    os.close(end)
    assert await looking is None


async def test_a_writer_in_another_container_is_found_without_its_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid means another process here, or none."""
    log = SqliteLog(tmp_path)
    await fill(log, 2, end=False)
    assert (await log.read_status("t1")).pid == os.getpid()
    monkeypatch.setattr(locks, "CHILD_SECONDS", 0.02)
    monkeypatch.setattr(locks, "is_alive", lambda _: False)
    status = await SqliteReader(tmp_path).read_status("t1")
    assert (status.writer, status.pid) == (log.writer, None)
    await log.close()


async def test_a_lock_that_nobody_has_signed_names_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader waited for the last one to come back to life, for each tree that was removed, and then took it for the
    writer."""
    await Files(tmp_path).write_and_die(make_spawned())
    reader = SqliteReader(tmp_path)
    lock = locks.try_lock(tmp_path / "0001.db")
    assert lock is not None
    monkeypatch.setattr(locks, "CHILD_SECONDS", 0.02)
    status = await reader.read_status("t1")
    assert (status.writer, await reader.list_trees(only="live")) == (None, [])
    os.close(lock)


async def test_a_waiter_that_is_not_awaited_makes_no_noise_when_writing_fails(tmp_path: Path) -> None:
    said: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: said.append(told["message"]))
    log = SqliteLog(tmp_path)
    await fill(log, 3, end=False)
    with Files(tmp_path).block_writes(log):
        log.append(make_event(4), True)  # as of a run that was cancelled before it began
        with pytest.raises(LogError):
            await write(log, make_ended(5))
    await log.close()
    gc.collect()
    assert said == []


async def test_many_events_take_few_commits(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await fill(log, 5000)
    assert log.commits <= 3
    await log.close()


async def test_events_appended_without_a_pause_are_in_the_same_batch(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    log.append(make_spawned())
    log.append(make_event(2), True)
    await asyncio.sleep(0)  # the writer thread is told now, and works while this thread appends
    log.append(make_event(3))
    pause = threading.Event()
    while log.commits < 1:
        pause.wait(0.001)
    stored = [event.seq for event in sqlite_reader.read_events(log.path, "t1")]
    log.append(make_event(4), True)
    await log.close()
    assert stored == [1, 2]
    assert [event.seq for event in await SqliteReader(tmp_path).read("t1")] == [1, 2, 3, 4]


async def test_a_tree_s_events_stay_together_where_many_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "PIECE", 10)
    log = SqliteLog(tmp_path)
    pause = threading.Event()
    for tree in ("t1", "t2", "t3"):
        for seq in range(1, 31):
            log.append(make_event(seq, tree=tree))
            while tree == "t2" and log.commits < 1:  # written while this thread appends
                pause.wait(0.001)
    await log.close()
    with sqlite_reader.open_log_file(log.path) as db:
        places = db.execute("SELECT tree, seq FROM places ORDER BY tree, seq").fetchall()
    assert places == [("t1", 1), ("t2", 1), ("t3", 1)]


async def leave_tail(folder: Path, *batches: list[Event]) -> Path:
    """Write two trees, and batches after them whose writer is killed before it has indexed them; return the file."""
    log = SqliteLog(folder)
    await fill(log, 3, end=False)
    await fill(log, 3, tree="t2")
    await log.close()
    db = schema.open_writer(log.path)
    epoch = schema.begin_epoch(db)
    for batch in batches:
        schema.append_batch(db, epoch=epoch, batch=schema.next_batch(db), lines=encode_stored_events(batch))
    db.close()
    return log.path


def read_index(file: Path) -> tuple[list[tuple[object, ...]], ...]:
    """Return what an index tells, in the file itself."""
    with sqlite_reader.open_log_file(file) as db:
        queries = (
            "SELECT indexed FROM writer",
            "SELECT tree, seq, batch FROM places ORDER BY 1, 2",
            "SELECT id, tree, last_seq, ended, last_batch FROM trees ORDER BY 1",
            "SELECT tree, run, tally FROM tallies ORDER BY 1, 2",
            "SELECT name, tree, run FROM names ORDER BY 1, 2, 3",
        )
        return tuple(db.execute(query).fetchall() for query in queries)


def test_a_writer_that_was_replaced_changes_neither_batches_nor_index(tmp_path: Path) -> None:
    file = tmp_path / "0001.db"
    db = schema.open_writer(file)
    old, new = schema.begin_epoch(db), schema.begin_epoch(db)
    for epoch, count in ((old, 0), (new, 1)):
        index = TreeIndex()
        index.apply([make_spawned()], 1)
        assert schema.append_batch(db, epoch=epoch, batch=1, lines=encode_event(make_spawned())) is (epoch == new)
        schema.index_batches(db, epoch=epoch, batch=1, index=index)
        assert db.execute("SELECT count(*) FROM batches").get == count
        assert [len(rows) for rows in read_index(file)] == [1, count, count, count, 4 * count]
    db.close()


@pytest.mark.finding("R4")
@pytest.mark.parametrize(("work", "step"), [("index_tail", "_fold_tail"), ("reseal_batches", "unpack_lines")])
async def test_a_writer_that_was_replaced_cannot_write_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, step: str
) -> None:
    """SQLite refuses a write after a read if another process wrote in between, and the file would not open."""
    file = await leave_tail(tmp_path, *TAIL)
    db, replaced = apsw.Connection(str(file)), apsw.Connection(str(file))
    do_step, refused = getattr(schema, step), list[apsw.BusyError]()

    def write_after_step(*args: Any) -> Any:
        done = do_step(*args)
        try:
            replaced.execute("UPDATE writer SET epoch = epoch + 1")
        except apsw.BusyError as error:
            refused.append(error)
        return done

    monkeypatch.setattr(schema, step, write_after_step)
    getattr(schema, work)(db)
    assert len(refused) >= len(TAIL)
    assert read_index(file)[0] == [(4,)]
    db.close()
    replaced.close()


TAIL = (
    [make_event(4), make_spawned(5, run=1, label="looker"), make_spawned(tree="t3", label="third", at=101.0)],
    [make_event(6, run=1), make_ended(7, run=1), make_ended(8), make_event(2, tree="t3", at=102.0)],
)


@pytest.mark.finding("R1")
async def test_what_a_killed_writer_has_not_indexed_is_read_all_the_same(tmp_path: Path) -> None:
    file = await leave_tail(tmp_path, *TAIL)
    assert read_index(file)[0] == [(2,)]
    reader = SqliteReader(tmp_path)

    async def look() -> list[object]:
        trees = await reader.list_trees()
        return [
            [(stored.tree, stored.last_seq, stored.last_at, stored.ended, stored.writer) for stored in trees],
            [(run.first.tree, run.first.run, run.tally) for run in await reader.read_runs(["t1", "t2", "t3"])],
            [[run.ref.tree for run in await reader.find_runs(name)] for name in ("looker", "third", "main", "t")],
            [[event.seq for event in await reader.read(tree, after=3)] for tree in ("t1", "t2", "t3")],
            await reader.count_trees(),
            await reader.check_health(),
        ]

    seen = await look()
    assert seen[0] == [
        ("t3", 2, 102.0, False, None), ("t2", 3, 100.0, True, None), ("t1", 8, 100.0, True, None)
    ]  # fmt: skip
    assert seen[2:5] == [[["t1"], ["t3"], ["t2", "t1"], ["t3", "t2", "t1"]], [[4, 5, 6, 7, 8], [], []], 3]
    assert seen[5] == "3 trees in 1 file, all of them whole, version 6"
    await SqliteLog(tmp_path).close()  # the next writer completes the index
    assert read_index(file)[0] == [(4,)]
    assert await look() == seen


async def test_the_index_is_the_same_however_late_it_is_written(tmp_path: Path) -> None:
    late = await leave_tail(tmp_path / "late", *TAIL)
    await SqliteLog(late.parent).close()
    log = SqliteLog(tmp_path / "early")
    for tree, end in (("t1", False), ("t2", True)):
        await fill(log, 3, tree=tree, end=end)
    await log.close()
    for batch in TAIL:
        log = SqliteLog(tmp_path / "early")
        await log.claim("t1")
        await write(log, *batch)
        await log.close()
    assert read_index(log.path) == read_index(late)


async def test_a_damaged_batch_that_is_not_indexed_costs_only_itself(tmp_path: Path) -> None:
    file = await leave_tail(tmp_path, *TAIL)
    db = apsw.Connection(str(file))
    db.execute("UPDATE batches SET lines = x'00' WHERE id = 3")
    db.close()
    problems: list[LogError] = []
    assert [stored.tree for stored in await SqliteReader(tmp_path).list_trees(problems.append)] == ["t3", "t2", "t1"]
    assert ["events that you did not write" in str(problem) for problem in problems] == [True]
    for _ in range(2):
        events = await SqliteReader(tmp_path).read("t1")
        assert [(event.seq, event.kind) for event in events] == [
            (1, "run.spawned"), (2, "turn.started"), (3, "turn.started"), (5, "gap"), (6, "turn.started"),
            (7, "run.ended"), (8, "run.ended"),
        ]  # fmt: skip
        await SqliteLog(tmp_path).close()


@pytest.mark.finding("R8")
async def test_an_event_that_cannot_be_decoded_hides_no_other(tmp_path: Path) -> None:
    file = await leave_tail(tmp_path)
    lines = encode_stored_events([make_event(4), make_spawned(tree="t3")]).replace(b'"turn":4', b'"turn":4.5')
    db = schema.open_writer(file)
    schema.append_batch(db, epoch=schema.begin_epoch(db), batch=schema.next_batch(db), lines=lines)
    db.close()
    for _ in range(2):
        reader = SqliteReader(tmp_path)
        assert {stored.tree for stored in await reader.list_trees()} == {"t1", "t2", "t3"}
        assert [event.seq for event in await reader.read("t3")] == [1]
        with pytest.raises(LogError, match="a line that is not an event"):
            await reader.read("t1")
        await SqliteLog(tmp_path).close()


@pytest.mark.finding("R8")
async def test_a_damaged_row_of_the_index_hides_no_other_tree(tmp_path: Path) -> None:
    file = await leave_tail(tmp_path, *TAIL)
    db = apsw.Connection(str(file))
    db.execute("UPDATE trees SET last_seq = 77 WHERE tree = 't1'")
    db.close()
    for expected in (["t3", "t2", "t1"], ["t4", "t3", "t2", "t1"], ["t4", "t3", "t2", "t1"]):
        reader = SqliteReader(tmp_path)
        assert [stored.tree for stored in await reader.list_trees()] == expected
        assert [event.seq for event in await reader.read("t1")] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert [event.seq for event in await reader.read("t3")] == [1, 2]
        assert [run.ref.tree for run in await reader.find_runs("third")] == ["t3"]
        kinds = [event.tree async for event in reader.read_kind("run.spawned", since=1.0)]
        assert sorted(set(kinds)) == sorted(expected)
        log = SqliteLog(tmp_path)
        watched = [item async for item in log.watch("t1")]
        assert [item.seq for item in watched if isinstance(item, Event)] == [1, 2, 3, 4, 5, 6, 7, 8]
        if "t4" not in expected:
            await write(log, make_spawned(tree="t4", at=103.0))
        await log.close()


async def test_a_page_of_a_tree_with_a_damaged_row_is_read_without_the_row(tmp_path: Path) -> None:
    """Else each page of a long tree would read the whole file again, to make the row anew."""
    file = await leave_tail(tmp_path)
    db = apsw.Connection(str(file))
    db.execute("UPDATE trees SET last_seq = 77 WHERE tree = 't1'")
    db.close()
    with sqlite_reader.open_log_file(file) as db:
        assert [stored.seq for stored in islice(schema.read_tree(db, "t1", after=0), 2)] == [1, 2]
        with pytest.raises(LogDamaged):
            list(schema.read_tree(db, "t1", after=2))
    reader = SqliteReader(tmp_path)
    assert [stored.seq for stored in await reader.read_lines("t1", after=2)] == [3]


async def test_what_is_appended_while_a_batch_is_written_is_not_lost_by_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_write, append_batch = threading.Event(), threading.Event(), schema.append_batch

    def hold(*args: Any, **options: Any) -> bool:
        begun.set()
        assert may_write.wait(60)
        return append_batch(*args, **options)

    monkeypatch.setattr(schema, "append_batch", hold)
    log = SqliteLog(tmp_path)
    first = log.append(make_spawned(), True)
    assert await asyncio.to_thread(begun.wait, 60)
    log.append(make_event(2))
    async with TaskOwner() as owner:
        closing = owner.start(log.close())
        await asyncio.sleep(0)
        may_write.set()
        await closing
    assert first is not None
    await first
    assert [event.seq for event in await SqliteReader(tmp_path).read("t1")] == [1, 2]


@pytest.mark.finding("R1")
async def test_a_tail_costs_no_look_at_the_rest_of_the_log(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    for number in range(1000):
        tree = f"tree{number:03d}"
        log.append(make_spawned(tree=tree, label=f"label {number}", at=float(number)))
        log.append(make_ended(2, tree=tree, at=float(number)))
    await log.close()

    def count_steps() -> list[int]:
        counts = []
        for query in (
            lambda db: schema.list_trees(db, latest=20, reported=True, first_batch=1, only=None),
            lambda db: list(schema.read_runs(db, ["tree007"])),
            lambda db: list(schema.find_runs(db, "label 123")),
        ):
            with sqlite_reader.open_log_file(log.path) as db:
                schema.begin_reading(db)
                steps = [0]
                db.set_progress_handler(lambda steps=steps: steps.append(0) or False, 10)
                assert query(db)
                counts.append(len(steps) * 10)
        return counts

    without = count_steps()
    db = schema.open_writer(log.path)
    lines = encode_stored_events([make_spawned(tree="new", at=1000.0)])
    schema.append_batch(db, epoch=schema.begin_epoch(db), batch=schema.next_batch(db), lines=lines)
    db.close()
    for before, after in zip(without, count_steps(), strict=True):
        assert after < before + 2000  # a look at each tree takes more than 10,000


async def test_an_index_is_not_counted_twice(tmp_path: Path) -> None:
    """Damage can leave an old number of the newest indexed batch."""
    file = await leave_tail(tmp_path, *TAIL)
    await SqliteLog(tmp_path).close()
    before = read_index(file)
    db = apsw.Connection(str(file))
    db.execute("UPDATE writer SET indexed = 1")
    db.close()
    runs = await SqliteReader(tmp_path).read_runs(["t1", "t2", "t3"])
    assert [run.tally.last_seq for run in runs] == [8, 7, 3, 2]
    await SqliteLog(tmp_path).close()
    assert read_index(file) == before


async def test_an_index_that_cannot_be_written_costs_no_event(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = SqliteLog(tmp_path)
    await fill(log, 3)
    blocker = apsw.Connection(str(log.path))
    log._own._db.set_busy_timeout(1)
    log._own._write_index()
    await write(log, make_spawned(tree="t2"))
    blocker.execute("BEGIN IMMEDIATE")
    await until(lambda: caplog.messages)
    assert "cannot write the index of the log" in caplog.messages[0]
    assert [stored.tree for stored in await SqliteReader(tmp_path).list_trees()] == ["t2", "t1"]
    blocker.execute("ROLLBACK")
    blocker.close()
    await log.close()
    assert [tree for _, tree, *_ in read_index(log.path)[2]] == ["t1", "t2"]


async def test_the_journal_is_moved_into_the_file_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "JOURNAL_PAGES", 10)
    monkeypatch.setattr(sqlite, "INDEX_BYTES", 10_000)
    log = SqliteLog(tmp_path)
    await write(log, make_spawned())
    for seq in range(2, 12):
        await write(log, make_event(seq, Message(random.Random(seq).randbytes(50_000).hex())))
    journal = log.path.with_name(f"{log.path.name}-wal")
    assert journal.stat().st_size < 200_000 and log.path.stat().st_size > 400_000
    await log.close()


async def test_reading_a_tree_touches_no_batch_of_another(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await write(log, make_spawned())
    for seq in range(1, 30):
        await write(log, make_event(seq, tree="t2"))
    await write(log, make_ended(2))
    await log.close()
    db = apsw.Connection(str(log.path))
    db.execute("UPDATE batches SET lines = x'00' WHERE id IN (SELECT batch FROM places WHERE tree = 't2')")
    db.close()
    reader = SqliteReader(tmp_path)
    assert [event.seq for event in await reader.read("t1")] == [1, 2]
    assert (await reader.read_status("t1")).ended


async def test_a_cursor_reads_no_batch_before_it(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await write(log, make_spawned())
    for seq in range(2, 30):
        await write(log, make_event(seq))
    await log.close()
    db = apsw.Connection(str(log.path))
    db.execute("UPDATE batches SET lines = x'00' WHERE id < 20")
    db.close()
    assert [stored.seq for stored in await SqliteReader(tmp_path).read_lines("t1", after=20)] == list(range(21, 30))


async def test_a_large_batch_is_stored_packed_and_read_as_it_was(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    for tree in ("t1", "t2"):
        await fill(log, 400, tree=tree)
    await fill(log, 3, tree="t3")
    await log.close()
    db = apsw.Connection(str(log.path))
    largest: bytes = db.execute("SELECT lines FROM batches ORDER BY length(lines) DESC LIMIT 1").get
    smallest: bytes = db.execute("SELECT lines FROM batches ORDER BY length(lines) LIMIT 1").get
    db.close()
    assert not largest.startswith(b"{") and smallest.startswith(b'{"seq":')  # a small one can be read without us
    reader = SqliteReader(tmp_path)
    events = [await reader.read(tree) for tree in ("t1", "t2")]
    assert [[event.seq for event in own] for own in events] == [list(range(1, 401))] * 2
    assert len(encode_stored_events(events[0])) > 10 * len(largest) > schema.LARGE_BATCH / 10
    await reader.adopt_events()
    assert await reader.read("t2") == events[1]


async def test_a_tree_is_removed_from_a_packed_batch(tmp_path: Path) -> None:
    async def discard(tree: str) -> bool:
        return True

    log = SqliteLog(tmp_path)
    both = [
        (make_spawned if seq == 1 else make_event)(seq, tree=tree) for tree in ("t1", "t2") for seq in range(1, 240)
    ]
    await write(log, *both, make_ended(240, tree="t1"), make_ended(240, tree="t2"))
    assert log.commits == 1
    await log.close()
    reader = SqliteReader(tmp_path)
    done = await reader.remove_trees({"t1": 240}, discard=discard)
    assert (done.removed, done.problems) == (["t1"], [])
    assert [event.seq for event in await reader.read("t2")] == list(range(1, 241))
    with schema.open_reader(log.path) as db:
        assert b'"t1"' not in schema.load_batch(db, 1)


@pytest.mark.parametrize(
    "bomb", [zlib.compress(b"{" + b" " * 2**20), b"x", zlib.compress(b"{}")[:-1]], ids=["large", "nonsense", "cut"]
)
async def test_a_batch_that_cannot_be_unpacked_costs_only_itself(
    bomb: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that came from elsewhere are read with the user's word only, and even then cost no more than ours."""
    log = SqliteLog(tmp_path)
    await write(log, make_spawned())
    await write(log, make_event(2))
    await write(log, make_ended(3))
    await log.close()
    monkeypatch.setattr(schema, "LARGEST_UNPACKED", 2**20)
    db = apsw.Connection(str(log.path))
    db.execute("UPDATE batches SET lines = ? WHERE id = 2", (bomb,))
    with pytest.raises(LogDamaged, match="cannot be unpacked"):
        schema.unpack_lines(db, bomb)
    db.close()
    reader = SqliteReader(tmp_path)
    await reader.adopt_events()
    assert [(event.seq, event.kind) for event in await reader.read("t1")] == [
        (1, "run.spawned"), (2, "gap"), (3, "run.ended"),
    ]  # fmt: skip


async def test_unknown_fields_come_out_untouched(tmp_path: Path) -> None:
    await write_files(tmp_path, make_spawned(), make_ended(2))
    newer = encode_stored_events([make_event(3, Message("hi"))])[:-2] + b',"mood":"new"}}'
    db = schema.open_writer(tmp_path / "logs/0001.db")
    schema.append_batch(db, epoch=schema.begin_epoch(db), batch=schema.next_batch(db), lines=newer)
    db.close()
    [stored] = await SqliteReader(tmp_path / "logs").read_lines("t1", after=2)
    assert stored.line == encode_event(make_event(3, Message("hi")))[:-1] + b',"mood":"new"}'


async def test_what_is_not_a_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0001.db").write_bytes(b"not a database, but long enough to be looked at" * 40)
    with pytest.raises(LogError, match=r"0001\.db: .*; move it away, and a new one is begun"):
        SqliteLog(tmp_path)
    (tmp_path / "0001.db").unlink()
    other = apsw.Connection(str(tmp_path / "0001.db"))
    other.execute("CREATE TABLE x (y)")
    other.close()
    with pytest.raises(LogError, match="is not a log of retinue"):
        SqliteLog(tmp_path)
    assert sqlite.lock_free_file(tmp_path)[0].name == "0001.db"


async def test_each_broken_file_is_named(tmp_path: Path) -> None:
    await write_files(tmp_path, make_spawned(), make_ended(2))
    (tmp_path / "logs/0002.db").write_bytes(b"nonsense" * 1000)
    (tmp_path / "logs/0003.db").touch()
    apsw.Connection(str(tmp_path / "logs/0004.db")).execute("CREATE TABLE other (x)")
    problems: list[LogError] = []
    reader = SqliteReader(tmp_path / "logs")
    assert [stored.tree for stored in await reader.list_trees(problems.append)] == ["t1"]
    for number, problem in zip((2, 3, 4), problems, strict=True):
        assert f"000{number}.db" in str(problem)


async def write_many(folder: Path) -> Path:
    """Write trees in commits of their own, long enough to fill several pages; return the file."""
    log = SqliteLog(folder)
    for number in range(40):
        tree = f"tree{number:02d}"
        await write(
            log,
            make_spawned(tree=tree, label=f"label {number}"),
            make_event(2, Message(f"words of {tree}; " * 20), tree=tree),
        )
        await write(log, make_ended(3, tree=tree))
    await log.close()
    return log.path


async def count_whole(folder: Path, problems: list[LogError]) -> int:
    """Count the trees that are listed and all of whose events can be read."""
    reader = SqliteReader(folder)
    trees = [stored.tree for stored in await reader.list_trees(problems.append)]
    listed = {run.first.tree for run in await reader.read_runs(trees, problems.append)}
    events = [await reader.read(tree) for tree in trees]
    return sum([e.kind for e in each] == KINDS and each[0].tree in listed for each in events)


KINDS = ["run.spawned", "message", "run.ended"]


@pytest.mark.finding("R8")
async def test_a_damaged_page_costs_what_is_on_it_and_is_found(tmp_path: Path) -> None:
    file = await write_many(tmp_path / "logs")
    whole = file.read_bytes()
    pages, lost = len(whole) // 4096, list[int]()
    for page in range(1, pages):
        file.write_bytes(whole[: page * 4096] + b"\x5a" * 4096 + whole[(page + 1) * 4096 :])
        problems: list[LogError] = []
        readable = await count_whole(file.parent, problems)
        found: list[LogError] = []
        assert await SqliteReader(file.parent).check_health(found.append) == ""
        assert found and all(isinstance(each, LogDamaged) and "\n" not in str(each) for each in (*found, *problems))
        if readable < 40:
            lost.append(40 - readable)
    assert pages > 15
    *others, most = sorted(lost)
    assert (max(others) <= 8, most) == (True, 40)  # one page leads to all batches
    assert len(lost) < pages / 2  # pages of the index cost nothing


@pytest.mark.finding("R8")
async def test_no_flipped_bit_goes_unnoticed_or_costs_more_than_its_batch(tmp_path: Path) -> None:
    file = await write_many(tmp_path / "logs")
    whole = file.read_bytes()
    chosen = random.Random(7)
    places = [at for at, byte in enumerate(whole) if byte and at > 4096]
    for place in chosen.sample(places, 60):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chosen.randrange(8)]) + whole[place + 1 :])
        problems: list[LogError] = []
        readable = await count_whole(file.parent, problems)
        await SqliteReader(file.parent).check_health(problems.append)
        assert readable == 40 or problems, place
    file.write_bytes(whole.replace(b"words of tree07", b"Words of tree07"))
    assert await count_whole(file.parent, []) == 39


@pytest.mark.finding("R8")
async def test_checking_the_health_of_a_log_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await write_many(tmp_path / "logs")
    monkeypatch.setattr(sqlite_reader, "HEALTH_SECONDS", 0.0)
    found = await SqliteReader(tmp_path / "logs").check_health()
    assert found == "40 trees in 1 file, the newest of them whole (80 batches of older events were not checked)"


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match=os.fspath(tmp_path / "file")):
        SqliteLog(tmp_path / "file" / "logs")


def test_a_lock_is_taken_once(tmp_path: Path) -> None:
    lock = locks.try_lock(tmp_path / "0001.db")
    assert lock is not None and locks.try_lock(tmp_path / "0001.db") is None
    os.close(lock)
    again = locks.try_lock(tmp_path / "0001.db")
    assert again is not None
    os.close(again)


def test_a_lock_that_cannot_be_cleared_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, length: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as failing:
        failing.setattr(os, "ftruncate", fail)
        with pytest.raises(LogError, match="Input/output error"):
            locks.try_lock(tmp_path / "0001.db")
    lock = locks.try_lock(tmp_path / "0001.db")
    assert lock is not None
    os.close(lock)
