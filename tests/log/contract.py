"""The contract of the log port. A log is right if it passes: subclass the suites and give them a `backend` fixture.

`LogContract` is for every log, `DurableLogContract` for those that outlive their process: they have several writers,
can lose the right to write, and hold data that somebody may have damaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from decimal import Decimal
from typing import Protocol

import pytest
from msgspec import structs

from retinue.core.errors import LogDamaged, LogError, LogHeld, LogLost, LogVersionError, NotFound
from retinue.core.events import (
    ApprovalAsked,
    Delta,
    Event,
    Gap,
    Message,
    RunResumed,
    RunSpawned,
    RunStarted,
    RunWaiting,
    ToolCall,
    ToolResult,
    TurnStarted,
    Unknown,
    UsageReported,
    Warned,
    encode_event,
)
from retinue.core.ports import Log, LogReader
from retinue.core.usage import Usage
from retinue.log import feed
from retinue.log.reading import follow_lines, iterate_lines, wait_for_event
from retinue.log.runs import Runs
from retinue.log.threads import read_histories
from retinue.log.tree_index import summarize_runs
from tests.log.kit import fill, make_ended, make_event, make_spawned, write

SPENT = UsageReported("model", Usage(7, 3))


class Backend(Protocol):
    """One place where trees are stored, empty at first."""

    def open(self) -> Log:
        """Open it for writing, as a new process does."""
        ...

    def reader(self) -> LogReader:
        """Open it for reading, as a command does; of a log in memory, the log that was opened."""
        ...

    def count_watched(self, log: Log) -> int:
        """Count the trees for which the log keeps something because of its watchers."""
        ...


class DurableBackend(Backend, Protocol):
    def take_over(self, log: Log) -> Log:
        """Open for writing what the log writes, although it is still there: its right to write is lost."""
        ...

    def block_writes(self, log: Log) -> AbstractContextManager[None]:
        """While it lasts, nothing can be committed."""
        ...

    def damage(self, tree: str) -> None:
        """Make the second event of a tree unreadable."""
        ...

    def destroy(self, tree: str) -> None:
        """Make the part of the log that a tree is in unreadable."""
        ...

    async def write_and_die(self, *events: Event) -> None:
        """Write events in a process that is killed as soon as they are written."""
        ...

    def remove_events(self) -> None:
        """Take away the events of all trees, and nothing else."""
        ...

    def set_version(self, version: int) -> None:
        """Have everything that is stored look as if another version had written it."""
        ...


@asynccontextmanager
async def opened(backend: Backend) -> AsyncIterator[Log]:
    log = backend.open()
    try:
        yield log
    finally:
        await log.close()


async def watch_all(log: Log, tree: str = "t1", *, after: int = 0) -> list[int]:
    return [item.seq async for item in log.watch(tree, after=after) if isinstance(item, Event)]


def seqs(events: list[Event]) -> list[int]:
    return [event.seq for event in events]


class LogContract:
    """Tests that every log passes."""

    # Appending and reading

    async def test_appended_events_are_read_in_order(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await fill(log, 1500)
            await fill(log, 3, tree="t2")
            assert seqs(await log.read("t1")) == list(range(1, 1501))
            assert seqs(await log.read("t2")) == [1, 2, 3]
            assert await log.read("nosuch") == []

    async def test_flushed_events_are_written_although_nobody_waited_for_them(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await log.flush()  # of nothing
            for round_number in range(3):
                for seq in range(5 * round_number + 1, 5 * round_number + 6):
                    log.append(make_spawned() if seq == 1 else make_event(seq))
                await log.flush()
                assert seqs(await backend.reader().read("t1")) == list(range(1, 5 * round_number + 6))

    async def test_trees_that_share_commits_are_kept_apart(self, backend: Backend) -> None:
        async with opened(backend) as log:
            for seq in range(1, 101):
                for tree in ("t1", "t2", "t3"):
                    log.append(make_spawned(tree=tree) if seq == 1 else make_event(seq, tree=tree))
            await write(log, make_ended(101, tree="t1"))
            assert [seqs(await log.read(tree, after=98)) for tree in ("t1", "t2", "t3")] == [
                [99, 100, 101],
                [99, 100],
                [99, 100],
            ]

    @pytest.mark.parametrize("after", [-1, 0, 1, 7, 1498, 1500, 1501])
    async def test_a_cursor_reads_on_in_pages(self, backend: Backend, after: int) -> None:
        async with opened(backend) as log:
            for start in range(1, 1500, 300):
                await write(
                    log, *(make_spawned() if seq == 1 else make_event(seq) for seq in range(start, start + 300))
                )
            expected = list(range(max(after, 0) + 1, 1501))
            assert seqs(await log.read("t1", after=after)) == expected
            assert seqs(await log.read("t1", after=after, limit=400)) == expected[:400]
            assert [stored.seq async for stored in iterate_lines(log, "t1", after=after)] == expected
            lines = await log.read_lines("t1", after=after, limit=2)
            assert [stored.seq for stored in lines] == expected[:2]
            assert all(stored.line == encode_event(make_event(stored.seq)) for stored in lines if stored.seq > 1)

    async def test_texts_that_a_database_may_refuse_are_kept(self, backend: Backend) -> None:
        odd = "a\0b \x1b[1m \u2028 \U0001f600 '\"\\%_"
        events = [make_spawned(label=odd), make_event(2, Message(odd)), make_ended(3)]
        async with opened(backend) as log:
            await write(log, *events)
            reader = backend.reader()
            assert await reader.read("t1") == events
            for name in (odd, odd[:3]):
                assert [run.ref.label for run in await reader.find_runs(name)] == [odd]
            assert await reader.find_runs("\0") == await reader.read("t1\0") == []

    @pytest.mark.requirement("P9")
    async def test_an_unknown_event_passes_through_and_breaks_no_fold(self, backend: Backend) -> None:
        unknown = make_event(2, Unknown("run.dreamt", {"of": ["sheep", 1.5], "deep": {"er": None}}))
        async with opened(backend) as log:
            await write(log, make_spawned(), unknown, make_ended(3))
            seen = [item async for item in log.watch("t1") if isinstance(item, Event)]
            lines = await log.read_lines("t1")
            assert [stored.line for stored in lines] == [
                encode_event(event) for event in (make_spawned(), unknown, make_ended(3))
            ]
        assert [event.kind for event in seen] == ["run.spawned", "run.dreamt", "run.ended"]
        assert Runs.of("t1", seen).runs[0].status == "done"

    async def test_events_of_one_kind_are_read_from_all_trees(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await write(
                log, make_spawned(), make_event(2, ToolCall("c", "x", {"kind": "usage"})), make_spawned(3, run=1)
            )
            await write(log, make_spawned(tree="t2"), make_event(2, SPENT, tree="t2"))
            await write(log, make_event(4, SPENT), make_ended(5))
            spent = [event async for event in log.read_kind(UsageReported.kind)]
            assert sorted((event.tree, event.seq) for event in spent) == [("t1", 4), ("t2", 2)]
            spawned = [event async for event in log.read_kind(RunSpawned.kind)]
            assert [event.run for event in spawned if event.tree == "t1"] == [0, 1]

    @pytest.mark.finding("R1")
    async def test_events_of_one_kind_since_a_time(self, backend: Backend) -> None:
        async with opened(backend) as log:
            for tree, times in (("old", (1.0, 2.0)), ("new", (8.0, 9.0)), ("long", (1.0, 9.0))):
                await write(log, make_spawned(tree=tree, at=times[0]))
                for seq, at in enumerate(times, 2):
                    await write(log, make_event(seq, SPENT, tree=tree, at=at))
            for since, wanted in ((0.0, 6), (2.0, 4), (8.5, 2), (10.0, 0)):
                spent = [event async for event in log.read_kind(UsageReported.kind, since=since)]
                assert len(spent) == wanted and all(event.at >= since for event in spent)

    async def test_a_log_that_nobody_has_written_is_empty(self, backend: Backend) -> None:
        reader, problems = backend.reader(), list[LogError]()
        assert await reader.list_trees(problems.append) == await reader.list_trees(only="live") == []
        assert await reader.find_runs("a", problems.append) == await reader.read_runs(["t1"], problems.append) == []
        assert await reader.read("t1") == await reader.read_lines("t1") == []
        assert [event async for event in reader.read_kind(RunSpawned.kind, problems.append)] == []
        assert (await reader.count_trees(), await reader.check_health(problems.append), problems) == (0, "", [])
        with pytest.raises(NotFound, match="there is no tree 't1'"):
            await reader.read_status("t1")
        await reader.adopt_events()

    # Trees

    async def test_trees_are_listed_newest_first_whatever_their_ids(self, backend: Backend) -> None:
        async with opened(backend) as log:
            assert await log.list_trees() == []
            for tree, at in (("zz", 1.0), ("aa", 3.0), ("mm", 2.0), ("bb", 3.0)):
                await write(log, make_spawned(tree=tree, at=at))
            assert [stored.tree for stored in await log.list_trees()] == ["bb", "aa", "mm", "zz"]
            found = (await log.list_trees())[2]
            assert (found.tree, found.spawned_at, found.last_seq, found.ended) == ("mm", 2.0, 1, False)

    @pytest.mark.finding("R1")
    async def test_a_list_is_as_long_as_asked_and_has_only_what_is_asked(self, backend: Backend) -> None:
        async with opened(backend) as log:
            for number in range(1, 8):
                spawned = RunSpawned(None, "main", 0, "task", "id", "/w", origin=f"before-{number}")
                spawned = structs.replace(spawned, reported="theirs" if number % 2 else "")
                await write(log, make_event(1, spawned, tree=f"t{number}", at=float(number)))
            await write(log, make_ended(2, tree="t6"), make_ended(2, tree="t7"))
            assert [stored.tree for stored in await log.list_trees(latest=3)] == ["t7", "t6", "t5"]
            assert [stored.tree for stored in await log.list_trees(latest=2, reported=False)] == ["t6", "t4"]
            assert [stored.tree for stored in await log.list_trees(only="live", latest=2)] == ["t5", "t4"]
            assert await log.list_trees(only="interrupted") == []
            assert (await log.count_trees(), await log.count_trees(reported=False)) == (7, 3)
            newest = (await log.list_trees(latest=1))[0]
            assert (newest.reported, newest.origin) == ("theirs", "before-7")
            assert [run.is_reported for run in await log.read_runs(["t6", "t7"])] == [False, True]

    @pytest.mark.finding("R1")
    async def test_runs_are_listed_as_their_events_tell(self, backend: Backend) -> None:
        spent = UsageReported("model", Usage(100, 20), cost=Decimal("0.10"))  # no binary fraction
        wait = ToolCall("c1", "spawn", {"big": "x" * 1000}, waits=True)
        events = [
            make_spawned(),
            make_event(2, RunStarted("inherited"), at=101.0),
            make_event(3, TurnStarted(1)),
            make_event(4, spent),
            make_event(5, wait),
            make_spawned(6, run=1, label="dig"),
            make_event(7, RunStarted("inherited"), run=1),
            make_event(8, ToolCall("c2", "read", {}), run=1),
            make_event(9, ApprovalAsked("a1", "c2", "read", {}), run=1),
        ]
        async with opened(backend) as log:
            for event in events:
                await write(log, event)
            await write(log, make_spawned(tree="t2"))
            found = await backend.reader().read_runs(["t2", "t1", "nosuch"])
            assert [(run.first.tree, run.first.run) for run in found] == [("t2", 0), ("t1", 0), ("t1", 1)]
            assert found[1:] == summarize_runs(events)
            assert [run.tally for run in found[1:]] == [
                view.make_tally() for view in Runs.of("t1", events).runs.values()
            ]
            views = Runs("t1")
            for run in found[1:]:
                views.restore(run)
            assert [view.state for view in views.runs.values()] == ["waiting_children", "waiting_approval"]
            primary = views.runs[0]
            assert (primary.turns, primary.tool_count, primary.usage, primary.cost) == (
                1,
                1,
                Usage(100, 20),
                spent.cost,
            )
            assert (primary.started_at, primary.children, primary.last_seq) == (101.0, (views.runs[1],), 5)
            await write(log, make_ended(10, run=1, at=110.0), make_event(11, Warned("slow", "stalled")))
            await write(log, make_event(12, ToolResult("c1", "spawn", "done")), make_ended(13))
            found = await log.read_runs(["t1"])
            assert [(run.tally.status, run.tally.ended_at) for run in found] == [("done", 100.0), ("done", 110.0)]
            assert found == summarize_runs(await log.read("t1"))

    async def test_a_resumed_conversation_has_its_wait_counted_once(self, backend: Backend) -> None:
        events = [
            make_spawned(),
            make_event(2, RunStarted("inherited")),
            make_event(3, RunWaiting(), at=110.0),
            make_event(4, RunResumed(), at=150.0),
            make_event(5, TurnStarted(2), at=160.0),
        ]
        async with opened(backend) as log:
            await write(log, *events)
            [run] = await log.read_runs(["t1"])
            assert run.tally.away == 50.0

    @pytest.mark.finding("R1")
    async def test_runs_are_found_by_the_beginning_of_a_name(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await write(log, make_spawned(tree="aa1", at=1.0), make_spawned(2, tree="aa1", run=1, label="dig é"))
            await write(log, make_spawned(tree="ab2", label="dig deeper", at=2.0))
            for name, wanted in {
                "dig": ["ab2/0", "aa1/1"],
                "dig é": ["aa1/1"],
                "a": ["ab2/0", "aa1/0"],
                "/main/worker-1": ["aa1/1"],
                "id-1": ["aa1/1"],
                "aa1/1": [],
                "digs": [],
                "DIG": [],
                "%": [],
                "_": [],
            }.items():
                assert [run.ref.name for run in await backend.reader().find_runs(name)] == wanted, name
            half = "\udcff"  # of a command line that is no UTF-8
            assert await backend.reader().find_runs(half) == await backend.reader().read(half) == []

    async def test_the_status_of_a_tree_is_that_of_its_newest_event(self, backend: Backend) -> None:
        async with opened(backend) as log:
            at = 1_763_552_052.123_456_7  # finer than the clock of a database
            await write(log, make_spawned(), make_event(2, at=at))
            status = await log.read_status("t1")
            assert (status.last_seq, status.last_at, status.ended) == (2, at, False)
            await write(log, make_spawned(3, run=1), make_ended(4, run=1))
            assert not (await log.read_status("t1")).ended
            await write(log, make_ended(5, at=109.0))
            assert await log.read_status("t1") == await backend.reader().read_status("t1")
            status = await log.read_status("t1")
            assert (status.last_seq, status.last_at, status.ended) == (5, 109.0, True)
            with pytest.raises(NotFound, match="there is no tree 'nosuch'"):
                await log.read_status("nosuch")

    async def test_a_tree_that_is_continued_ends_again(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await fill(log, 3)
            await log.claim("t1")
            await write(log, make_spawned(4, run=1))
            assert not (await log.read_status("t1")).ended
            watching = asyncio.create_task(watch_all(log))
            await asyncio.sleep(0)
            await write(log, make_ended(5, run=1))
            assert (await log.read_status("t1")).ended
            assert await watching == [1, 2, 3, 4, 5]

    async def test_the_writer_of_a_tree_is_known_while_it_is_there(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await fill(log, 3, end=False)
            [stored] = await log.list_trees()
            assert log.writer and {stored.writer, (await log.read_status("t1")).writer} == {log.writer}
        reader = backend.reader()
        [stored] = await reader.list_trees()
        assert (stored.writer, (await reader.read_status("t1")).writer) == (None, None)

    async def test_a_tree_that_is_not_there_cannot_be_claimed(self, backend: Backend) -> None:
        async with opened(backend) as log:
            with pytest.raises(NotFound, match="there is no tree 'nosuch'"):
                await log.claim("nosuch")

    # Watching

    async def test_a_watcher_of_a_tree_to_come_sees_it_begin_or_leaves_nothing(self, backend: Backend) -> None:
        async with opened(backend) as log:
            log.watch("never", after=0)
            for name in ("nosuch", "soon"):
                watching = log.watch(name)
                waiting = asyncio.ensure_future(anext(watching))
                await asyncio.sleep(0)
                if name == "soon":
                    await fill(log, 3, tree=name)
                    first = await waiting
                    assert isinstance(first, Event)
                    assert [first.seq, *[item.seq async for item in watching if isinstance(item, Event)]] == [1, 2, 3]
                    continue
                waiting.cancel()
                await asyncio.wait([waiting])
                await watching.aclose()
                assert backend.count_watched(log) == 0
            assert [stored.tree for stored in await log.list_trees()] == ["soon"]

    async def test_a_watcher_may_come_before_the_first_event_and_after_the_last(self, backend: Backend) -> None:
        async with opened(backend) as log:
            watching = asyncio.create_task(watch_all(log))
            await asyncio.sleep(0)
            await fill(log, 10)
            assert await watching == list(range(1, 11))
            assert await watch_all(log) == list(range(1, 11))

    @pytest.mark.requirement("P5")
    @pytest.mark.parametrize("after", [0, 1, 7, 2500, 4999])
    async def test_a_watcher_that_comes_back_misses_nothing(self, backend: Backend, after: int) -> None:
        async with opened(backend) as log:
            await fill(log, 2500, end=False)

            async def write_the_rest() -> None:
                for seq in range(2501, 5000):
                    log.append(make_event(seq))
                    if seq % 100 == 0:
                        await asyncio.sleep(0)
                log.append(make_ended(5000))

            writing = asyncio.create_task(write_the_rest())
            seen = await watch_all(log, after=after)
            await writing
            assert seen == list(range(after + 1, 5001))

    async def test_events_committed_while_a_watcher_reads_are_not_missed(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await fill(log, 5, end=False)
            seen: list[int] = []
            async for item in log.watch("t1"):
                assert isinstance(item, Event)
                seen.append(item.seq)
                if item.seq < 100:
                    await write(log, make_event(5 + item.seq) if item.seq < 99 else make_ended(104))
            assert seen == list(range(1, 105))

    @pytest.mark.requirement("P6")
    async def test_a_slow_watcher_blocks_nobody_and_only_loses_deltas_which_are_counted(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await fill(log, 5, end=False)
            watching = log.watch("t1", deltas=True)
            first = await anext(watching)
            assert isinstance(first, Event) and first.seq == 1
            extra = 100
            for _ in range(feed.DELTAS_KEPT + extra):
                log.show(Delta("t1", 0, "/main", "main", "x"))
            await write(log, *(make_event(seq) for seq in range(6, 10_000)), make_ended(10_000))
            rest = [item async for item in watching]
            assert [item.seq for item in rest if isinstance(item, Event)] == list(range(2, 10_001))
            deltas = [item for item in rest if isinstance(item, Delta)]
            assert (deltas[0].kind, deltas[0].dropped) == ("dropped", extra)
            assert len(deltas) == feed.DELTAS_KEPT + 1

    async def test_a_watcher_gets_deltas_only_if_it_asks_for_them(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await write(log, make_spawned())
            watchers = [log.watch("t1", deltas=deltas) for deltas in (True, False)]
            for watcher in watchers:
                await anext(watcher)
            log.show(Delta("t1", 0, "/main", "main", "x"))
            await write(log, make_ended(2))
            kinds = [[type(item) async for item in watcher] for watcher in watchers]
            assert kinds == [[Delta, Event], [Event]]

    async def test_following_misses_nothing_and_ends_with_the_tree(self, backend: Backend) -> None:
        async with opened(backend) as log:
            await write(log, make_spawned())
            reader, seen = backend.reader(), list[bytes]()

            async def follow() -> None:
                async for stored in follow_lines(reader, "t1"):
                    seen.append(stored.line)

            following = asyncio.create_task(follow())
            more = [make_event(seq, Message(f"m{seq}")) for seq in range(2, 50)]
            for event in more:
                await write(log, event)
            assert not following.done()
            log.append(make_ended(50))
            await following
            assert seen == [encode_event(event) for event in (make_spawned(), *more, make_ended(50))]
            assert [stored.seq async for stored in follow_lines(reader, "t1", after=49)] == [50]
            assert [stored.seq async for stored in follow_lines(reader, "t1", after=50)] == []
            found = await wait_for_event(reader, "t1", lambda event: event.seq == 7, seconds=100)
            assert found == more[5]
            assert await wait_for_event(reader, "t1", lambda event: event.seq == 51, seconds=100) is None

    # Removing

    async def test_trees_are_removed_unless_they_are_held_kept_or_have_grown(self, backend: Backend) -> None:
        asked: list[str] = []

        async def discard(tree: str) -> bool:
            asked.append(tree)
            return tree != "kept"

        async with opened(backend) as log:
            for tree in ("gone", "kept", "grown", "left"):
                await fill(log, 3, tree=tree)
            held = await backend.reader().remove_trees({"gone": 3}, discard=discard)
            assert (held.removed, len(held.held), asked) == ([], 1, [])
        reader = backend.reader()
        wanted = {"gone": 3, "kept": 3, "grown": 2, "nosuch": 1}
        trial = await reader.remove_trees(wanted, discard=discard, dry_run=True)
        assert (trial.removed, len(await reader.list_trees())) == (["gone"], 4)
        asked.clear()
        done = await reader.remove_trees(wanted, discard=discard)
        assert (done.removed, done.held, done.problems, asked) == (["gone"], [], [], ["gone", "kept"])
        assert {stored.tree for stored in await reader.list_trees()} == {"kept", "grown", "left"}
        assert await reader.read("gone") == []
        assert [seqs(await reader.read(tree)) for tree in ("kept", "grown", "left")] == [[1, 2, 3]] * 3
        assert await reader.check_health()


class DurableLogContract:
    """Tests that every log passes whose contents outlive the process."""

    async def test_a_log_is_read_by_others_while_it_is_written(self, backend: DurableBackend) -> None:
        async with opened(backend) as first, opened(backend) as second:
            await write(first, make_spawned(tree="old", at=1.0))
            await write(second, make_spawned(tree="new", at=3.0))
            await write(first, make_spawned(tree="mid", at=2.0))
            for reader in (backend.reader(), first, second):
                assert [stored.tree for stored in await reader.list_trees()] == ["new", "mid", "old"]
                assert await reader.read("mid") == [make_spawned(tree="mid", at=2.0)]
            assert {event.tree async for event in second.read_kind(RunSpawned.kind)} == {"new", "mid", "old"}

    async def test_writers_in_two_containers_have_different_ids(
        self, backend: DurableBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each of them may be process 1 of its container, on a machine of the same name."""
        monkeypatch.setattr("os.getpid", lambda: 1)
        async with opened(backend) as first, opened(backend) as second:
            assert first.writer != second.writer
            for log, tree in ((first, "t1"), (second, "t2")):
                await write(log, make_spawned(tree=tree))
            writers = {stored.tree: stored.writer for stored in await backend.reader().list_trees()}
            assert writers == {"t1": first.writer, "t2": second.writer}
            with pytest.raises(LogHeld) as held:
                await second.claim("t1")
            assert held.value.writer == first.writer

    async def test_only_trees_that_their_writer_has_written_are_live(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await write(log, make_spawned(tree="dead"))
        async with opened(backend) as log:
            await write(log, make_spawned(tree="live", at=200.0))
            reader = backend.reader()
            assert {stored.tree: stored.writer for stored in await reader.list_trees()} == {
                "live": log.writer,
                "dead": None,
            }
            assert [(await reader.read_status(tree)).is_live for tree in ("live", "dead")] == [True, False]
            assert [stored.tree for stored in await reader.list_trees(only="live")] == ["live"]
            assert [stored.tree for stored in await reader.list_trees(only="interrupted")] == ["dead"]

    @pytest.mark.finding("R1")
    async def test_a_tree_that_goes_on_in_another_process_keeps_its_counts(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await write(log, make_spawned(), make_event(2, RunStarted("inherited")), make_event(3, TurnStarted(1)))
        async with opened(backend) as log:
            await log.claim("t1")
            await write(log, make_event(4, RunResumed(), at=150.0), make_event(5, TurnStarted(2), at=151.0))
            [run] = await backend.reader().read_runs(["t1"])
            assert (run.tally.turns, run.tally.away, run.tally.state) == (2, 50.0, "running")
            await write(log, make_ended(6, at=152.0))
            await log.claim("t1")
            await write(log, make_spawned(7, run=1))
            assert await backend.reader().read_runs(["t1"]) == summarize_runs(await log.read("t1"))
            assert [stored.tree for stored in await log.list_trees(only="live")] == ["t1"]

    @pytest.mark.finding("R1")
    async def test_lists_and_look_ups_read_no_event(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await fill(log, 5)
            await write(log, make_spawned(tree="t2", label="dig"))
        backend.remove_events()
        reader = backend.reader()
        assert [event.body for event in await reader.read("t1")] == [Gap(5, "the log is damaged here", "damaged")]
        assert {stored.tree: stored.ended for stored in await reader.list_trees()} == {"t1": True, "t2": False}
        assert [run.ref.name for run in await reader.find_runs("dig")] == ["t2/0"]
        assert [run.tally.turns for run in await reader.read_runs(["t1"])] == [4]

    async def test_a_batch_that_is_written_late_counts_once(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await write(log, make_spawned(), make_event(2, RunStarted("inherited")))
            with backend.block_writes(log), pytest.raises(LogError):
                await write(log, make_event(3, SPENT), make_event(4, ToolCall("c", "x", {})))
            await write(log, make_event(5, TurnStarted(1)))
            assert await log.read_runs(["t1"]) == summarize_runs(await log.read("t1"))

    async def test_following_ends_when_nobody_is_left_to_write(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await write(log, make_spawned(), make_event(2, Message("last words")))
        reader = backend.reader()
        assert [stored.seq async for stored in follow_lines(reader, "t1")] == [1, 2]
        assert not (await reader.read_status("t1")).ended

    async def test_an_interrupted_tree_ends_for_watchers_unless_it_is_resumed(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await fill(log, 5, end=False)
        async with opened(backend) as log:
            await log.claim("t1")
            assert await watch_all(log) == [1, 2, 3, 4, 5]
            log.append(make_event(6))  # not yet committed
            watching = asyncio.create_task(watch_all(log))
            await asyncio.sleep(0)
            log.append(make_ended(7))
            assert await watching == [1, 2, 3, 4, 5, 6, 7]

    async def test_a_killed_writer_leaves_what_it_wrote_and_holds_nothing(self, backend: DurableBackend) -> None:
        events = [make_spawned(), make_event(2, RunStarted("inherited")), make_event(3, TurnStarted(1))]
        await backend.write_and_die(*events)
        reader = backend.reader()
        assert await reader.read("t1") == events
        assert [(stored.tree, stored.writer) for stored in await reader.list_trees(only="interrupted")] == [
            ("t1", None)
        ]
        assert (await reader.read_status("t1")).writer is None
        assert [stored.seq async for stored in follow_lines(reader, "t1")] == [1, 2, 3]
        async with opened(backend) as log:
            await log.claim("t1")
            await write(log, make_event(4, RunResumed()), make_ended(5))
            assert await log.read_runs(["t1"]) == summarize_runs(await reader.read("t1"))
        assert seqs(await reader.read("t1")) == [1, 2, 3, 4, 5]

    async def test_nobody_may_write_a_tree_while_it_is_removed(self, backend: DurableBackend) -> None:
        async with opened(backend) as first, opened(backend) as second:
            await fill(first, 3)
            await fill(second, 3, tree="t2")
            await first.close()

            async def discard(tree: str) -> bool:
                with pytest.raises(LogHeld):
                    await second.claim(tree)
                return True

            assert (await backend.reader().remove_trees({"t1": 3}, discard=discard)).removed == ["t1"]

    async def test_a_second_writer_of_a_tree_is_refused(self, backend: DurableBackend) -> None:
        async with opened(backend) as first, opened(backend) as second:
            await fill(first, 3, end=False)
            await fill(second, 3, tree="t2", end=False)
            for log, tree, other in ((second, "t1", first), (first, "t2", second)):
                with pytest.raises(LogHeld) as held:
                    await log.claim(tree)
                assert held.value.writer == other.writer
            await first.close()
            await second.claim("t1")
            await write(second, make_event(4), make_ended(5))
            assert await watch_all(second) == [1, 2, 3, 4, 5]
            await write(second, make_ended(4, tree="t2"))
            assert seqs(await second.read("t2")) == [1, 2, 3, 4]
        assert seqs(await backend.reader().read("t1")) == [1, 2, 3, 4, 5]

    async def test_a_writer_that_has_lost_its_right_writes_nothing_and_tries_nothing_again(
        self, backend: DurableBackend
    ) -> None:
        first = backend.open()
        await fill(first, 3, end=False)
        second = backend.take_over(first)
        await second.claim("t1")
        await write(second, make_event(4, Message("mine")))
        with pytest.raises(LogLost):
            await write(first, make_event(4, Message("stale")))
        for wait in (False, True):  # taken by nobody, so it piles up nowhere
            with pytest.raises(LogLost):
                first.append(make_event(5, Message("stale")), wait)
        await write(second, make_ended(5))
        await second.close()
        with pytest.raises(LogLost, match="1 event is lost"):
            await first.close()
        events = await backend.reader().read("t1")
        assert seqs(events) == [1, 2, 3, 4, 5]
        assert events[3].body == Message("mine") and events[4] == make_ended(5)

    async def test_a_batch_that_cannot_be_written_is_told_and_written_later(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await fill(log, 3, end=False)
            with backend.block_writes(log):
                with pytest.raises(LogError) as error:
                    await write(log, make_event(4))
                with pytest.raises(LogError) as again:
                    await log.flush()
            assert not isinstance(error.value, LogLost) and not isinstance(again.value, LogLost)
            await write(log, make_ended(5))
            assert seqs(await log.read("t1")) == [1, 2, 3, 4, 5]

    async def test_events_appended_in_a_row_are_written_all_or_none(self, backend: DurableBackend) -> None:
        """`Link.write_calls` and the resuming of a tree rely on this."""
        many, trees = 1500, ("t1", "t2")

        def append_in_a_row(log: Log) -> None:
            for tree in trees:
                for seq in range(2, many + 1):
                    log.append(make_event(seq, tree=tree))

        async def count_written() -> set[int]:
            return {len(await backend.reader().read(tree)) for tree in trees}

        async with opened(backend) as log:
            for tree in trees:
                await write(log, make_spawned(tree=tree))
            with backend.block_writes(log):
                append_in_a_row(log)
                with pytest.raises(LogError):
                    await log.flush()
                assert await count_written() == {1}
            flushing = asyncio.create_task(log.flush())
            while not flushing.done():
                assert await count_written() <= {1, many}
            await flushing
            assert await count_written() == {many}

    async def test_of_events_appended_in_a_row_a_lost_log_has_all_or_none(self, backend: DurableBackend) -> None:
        first = backend.open()
        await write(first, make_spawned())
        for seq in range(2, 1501):
            first.append(make_event(seq))
        second = backend.take_over(first)  # before the events are written, or after
        with suppress(LogLost):
            await first.close()
        assert len(await second.read("t1")) in (1, 1500)
        await second.close()

    async def test_events_are_adopted_unless_a_process_writes_them(self, backend: DurableBackend) -> None:
        async with opened(backend) as log:
            await fill(log, 3)
            with pytest.raises(LogError):
                await backend.reader().adopt_events()
        reader = backend.reader()
        await reader.adopt_events()
        assert seqs(await reader.read("t1")) == [1, 2, 3] and await reader.check_health()
        backend.destroy("t1")
        with pytest.raises(LogError):
            await reader.adopt_events()

    async def test_events_that_were_never_written_are_told_of_at_the_end(self, backend: DurableBackend) -> None:
        log = backend.open()
        await fill(log, 3, end=False)
        with backend.block_writes(log):
            log.append(make_event(4), True)  # as of a run that was cancelled before it began
            with pytest.raises(LogError):
                await write(log, make_ended(5))
            with pytest.raises(LogError, match="2 events are lost"):
                await log.close()

    @pytest.mark.finding("R8")
    async def test_a_damaged_event_is_a_gap_and_costs_nothing_else(self, backend: DurableBackend) -> None:
        problems: list[LogError] = []
        async with opened(backend) as log:
            for event in (make_spawned(), make_event(2, SPENT), make_event(3, SPENT), make_ended(4)):
                await write(log, event)
            await fill(log, 3, tree="t2")
            assert await backend.reader().check_health(problems.append) and not problems
        backend.damage("t1")
        reader = backend.reader()
        events = await reader.read("t1")
        assert seqs(events) == [1, 2, 3, 4]
        assert events[1].body == Gap(1, "the log is damaged here", "damaged")
        assert [seqs(await reader.read("t1", after=after, limit=2)) for after in (0, 1, 2)] == [[1, 2], [2, 3], [3, 4]]
        assert seqs(await reader.read("t2")) == [1, 2, 3]
        assert [stored.tree for stored in await reader.list_trees(problems.append)] == ["t2", "t1"]
        assert problems == []
        spent = [event.seq async for event in reader.read_kind(UsageReported.kind, problems.append)]
        assert (spent, len(problems)) == ([3], 1)
        assert await reader.check_health(problems.append) == ""
        assert isinstance(problems[1], LogDamaged) and "\n" not in str(problems[1])
        with pytest.raises(LogDamaged, match="t1 cannot be resumed or continued: some of its events are damaged"):
            await read_histories(reader, "t1")

    async def test_a_part_that_cannot_be_read_hides_no_other(self, backend: DurableBackend) -> None:
        async with opened(backend) as first, opened(backend) as second:
            await fill(first, 3)
            await fill(second, 3, tree="t2")
            assert await first.check_health()
        backend.destroy("t1")
        problems: list[LogError] = []
        reader = backend.reader()
        assert [stored.tree for stored in await reader.list_trees(problems.append)] == ["t2"]
        assert len(problems) == 1 and "\n" not in str(problems[0])
        assert reader.cure and "\n" not in reader.cure + reader.location
        assert [event.tree async for event in reader.read_kind(RunSpawned.kind, problems.append)] == ["t2"]
        assert [run.ref.tree for run in await reader.find_runs("id-0", problems.append)] == ["t2"]
        assert await reader.check_health(problems.append) == ""
        assert len(problems) == 4
        assert [run.ref.tree for run in await reader.read_runs(["t1", "t2"])] == ["t2"]
        assert await reader.count_trees() == 1

    @pytest.mark.parametrize("version", [1, 99])
    async def test_another_version_is_refused_in_one_sentence(self, backend: DurableBackend, version: int) -> None:
        async with opened(backend) as log:
            await fill(log, 3)
        backend.set_version(version)
        age = "an older" if version == 1 else "a newer"
        problems: list[LogError] = []
        assert await backend.reader().list_trees(problems.append) == []
        [problem] = problems
        assert isinstance(problem, LogVersionError) and f"was written by {age} retinue" in str(problem)
        with pytest.raises(LogVersionError, match=f"was written by {age} retinue"):
            backend.open()
