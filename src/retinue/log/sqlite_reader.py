"""Reading and removing trees in a folder of SQLite log files, even while their writers are active.

Each call opens the files it needs again, in a thread, so it sees the newest state. A file that cannot be read does not
hide the others. The lock next to a file tells whether the process that wrote a tree is alive.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing, contextmanager, suppress
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import apsw

from retinue.concurrency import finish_despite_cancel
from retinue.core.errors import LogDamaged, LogError, NotFound
from retinue.core.events import Event, make_line
from retinue.core.ports import (
    OnProblem,
    Removal,
    StoredLine,
    StoredRun,
    StoredTree,
    Unfinished,
    ignore_problem,
)
from retinue.core.sendable import is_text
from retinue.log import locks, schema
from retinue.log.reading import decode_line
from retinue.log.schema import one_line
from retinue.log.tree_index import TreeRow

BATCHES_AT_ONCE = 256
HEALTH_SECONDS = 10.0
P = ParamSpec("P")
T = TypeVar("T")


def make_awaitable(work: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Wrap a blocking method as a coroutine function that runs it in a thread."""

    @wraps(work)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.to_thread(work, *args, **kwargs)

    return run


class SqliteReader:
    """A reader for the log files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Path] = {}  # cache of lookups: a tree never moves to another file

    @property
    def location(self) -> str:
        return str(self.folder)

    @property
    def cure(self) -> str:
        return f"move it out of {self.folder}; the other logs are read all the same"

    async def read_kind(
        self, kind: str, on_problem: OnProblem = ignore_problem, *, since: float = 0.0
    ) -> AsyncIterator[Event]:
        wanted = b'"kind":"%b"' % kind.encode()  # may match in the arguments of a call too, so events are checked below
        for file in await asyncio.to_thread(self.list_files):
            problems: dict[str, LogError] = {}
            try:
                batches = await asyncio.to_thread(_list_batches, file, since)
                for start in range(0, len(batches), BATCHES_AT_ONCE):
                    some = batches[start : start + BATCHES_AT_ONCE]
                    for event in await asyncio.to_thread(_read_matching, file, wanted, some, problems):
                        if event.kind == kind and event.at >= since:
                            yield event
            except LogError as error:
                problems.setdefault(str(error), error)
            for problem in problems.values():
                on_problem(problem)

    def list_files(self) -> list[Path]:
        """Return the log files of the folder, sorted by name, or an empty list if the folder does not exist."""
        try:
            return sorted(entry for entry in self.folder.iterdir() if entry.suffix == ".db")
        except FileNotFoundError:
            for path in (self.folder.parent, self.folder):
                if path.is_symlink() and not path.exists():
                    raise LogError(f"cannot read the logs: {path} is a link to nothing ({path.readlink()})") from None
            return []
        except NotADirectoryError:
            path = self.folder if self.folder.parent.is_dir() else self.folder.parent
            raise LogError(f"cannot read the logs: {path} is not a folder") from None
        except OSError as error:
            raise LogError(f"cannot read the logs in {self.folder}: {error.strerror or error}") from None

    def find_file(self, tree: str) -> Path | None:
        """Return the file that holds a tree, or None."""
        if tree not in self._files and is_text(tree):
            for file in self.list_files():
                with suppress(LogError):  # a damaged file must not hide the others
                    if query_file(file, lambda db: schema.load_tree(db, tree), trees=[tree]) is not None:
                        self._files[tree] = file
                        break
        return self._files.get(tree)

    @make_awaitable
    def list_trees(
        self,
        on_problem: OnProblem = ignore_problem,
        *,
        latest: int | None = None,
        only: Unfinished | None = None,
        reported: bool = True,
    ) -> list[StoredTree]:
        ask = partial(_list_trees_of, on_problem=on_problem, latest=latest, only=only, reported=reported)
        found: list[StoredTree] = []
        for file, there in self._ask_files(ask, on_problem):
            found += there[::-1]
            self._files |= {stored.tree: file for stored in there}
        return sorted(found, key=lambda stored: stored.spawned_at)[::-1][:latest]

    @make_awaitable
    def count_trees(self, *, reported: bool = True) -> int:
        ask = partial(query_file, query=partial(schema.count_trees, reported=reported))
        return sum(count for _, count in self._ask_files(ask, ignore_problem))  # `list_trees` reports problems

    @make_awaitable
    def read_status(self, tree: str) -> StoredTree:
        file = self.find_file(tree)
        status = None if file is None else _load_status(file, tree)
        if status is None:
            raise NotFound(f"there is no tree '{tree}' in {self.location}")
        return status

    @make_awaitable
    def read_runs(self, trees: Sequence[str], on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        found: list[StoredRun] = []
        for file, names in self._group_by_file(trees).items():
            try:
                query = partial(schema.read_runs, trees=names)
                found += query_file(file, query, on_problem, trees=names)
            except LogError as error:
                on_problem(error)
        places = {tree: place for place, tree in enumerate(trees)}
        return sorted(found, key=lambda run: (places[run.first.tree], run.first.run))

    @make_awaitable
    def find_runs(self, name: str, on_problem: OnProblem = ignore_problem) -> list[StoredRun]:
        if not is_text(name):
            return []
        ask = partial(query_file, query=partial(schema.find_runs, name=name), on_problem=on_problem)
        found = [runs for _, runs in self._ask_files(ask, on_problem)]
        return list(heapq.merge(*found, key=lambda run: -run.first.at))

    @make_awaitable
    def read(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
        file = self.find_file(tree)
        return [] if file is None else read_events(file, tree, after=after, limit=limit)

    @make_awaitable
    def read_lines(self, tree: str, *, after: int = 0, limit: int | None = None) -> list[StoredLine]:
        file = self.find_file(tree)
        return [] if file is None else _read_tree(file, tree, after=after, limit=limit)

    async def remove_trees(
        self, trees: Mapping[str, int], *, discard: Callable[[str], Awaitable[bool]], dry_run: bool = False
    ) -> Removal:
        removed: list[str] = []
        held: list[str] = []
        problems: list[str] = []
        freed = 0
        for file, names in (await asyncio.to_thread(self._group_by_file, trees)).items():
            try:
                lock = locks.try_lock(file)
                if lock is None:
                    held.append(str(file))
                    continue
                try:
                    found = {tree: await asyncio.to_thread(_load_status, file, tree) for tree in names}
                    left = [tree for tree, status in found.items() if status and status.last_seq == trees[tree]]
                    gone = [tree for tree in left if await discard(tree)]  # not those with newer events
                    if gone and not dry_run:
                        freed += await finish_despite_cancel(asyncio.to_thread(_delete_trees, file, gone))
                    removed += gone
                finally:
                    os.close(lock)
            except LogError as error:
                problems.append(str(error))
            except (apsw.Error, OSError) as error:
                problems.append(f"cannot clean up {file}: {one_line(error)}")
        return Removal(removed=removed, held=held, problems=problems, freed_bytes=freed)

    @make_awaitable
    def adopt_events(self) -> None:
        for file in self.list_files():
            lock = locks.try_lock(file)
            if lock is None:
                raise LogError(f"{file} is being written by another process: try later")
            try:
                with (
                    schema.translate_errors(f"cannot take over the log {file}"),
                    closing(schema.open_writer(file)) as db,
                ):
                    schema.reseal_batches(db)
            finally:
                os.close(lock)

    @make_awaitable
    def check_health(self, on_problem: OnProblem = ignore_problem) -> str:
        files, trees, problems, left = self.list_files(), 0, 0, 0
        ends = time.monotonic() + HEALTH_SECONDS
        for file in files:
            try:
                with open_log_file(file) as db:
                    schema.begin_reading(db)
                    trees += schema.count_trees(db, reported=True)
                    left += _check_file(db, ends)
            except LogError as error:
                problems += 1
                on_problem(error)
        if not trees or problems:
            return ""
        count = f"{trees} tree{'' if trees == 1 else 's'} in {len(files)} file{'' if len(files) == 1 else 's'}"
        if left:
            return f"{count}, the newest of them whole ({left} batches of older events were not checked)"
        return f"{count}, all of them whole, version {schema.VERSION}"

    def _ask_files(self, ask: Callable[[Path], T], on_problem: OnProblem) -> Iterator[tuple[Path, T]]:
        """Yield each file with its answer to `ask`. Report files that cannot be read to `on_problem`."""
        for file in self.list_files():
            try:
                answer = ask(file)
            except LogError as error:
                if locks.read_holder(file) is None:  # else a process may be creating it right now
                    on_problem(error)
            else:
                yield file, answer

    def _group_by_file(self, trees: Iterable[str]) -> dict[Path, list[str]]:
        """Return the files that hold the given trees, each with its trees."""
        found: dict[Path, list[str]] = {}
        for tree in trees:
            file = self.find_file(tree)
            if file is not None:
                found.setdefault(file, []).append(tree)
        return found


def _check_file(db: apsw.Connection, ends: float) -> int:
    """Raise LogDamaged if any part of a file differs from the data written. Check the newest batches first and stop at
    time `ends`; return the number of unchecked batches."""
    last = schema.find_last_batch(db)
    damaged: list[LogDamaged] = []
    row = last
    while row and time.monotonic() < ends:
        try:
            if schema.has_batch(db, row):
                schema.check_batch(db, row)
        except LogDamaged as error:
            damaged.append(error)
        row -= 1
    if damaged:
        more = "" if len(damaged) == 1 else f" ({len(damaged)} batches of events)"
        raise LogDamaged(f"{damaged[0]}{more}; the rest of it can be read")
    db.set_progress_handler(lambda: time.monotonic() > ends, 10_000)
    try:
        schema.check_index(db)
        schema.check_pages(db)
    except apsw.InterruptError:
        return max(row, 1)
    finally:
        db.set_progress_handler(None)
    return row


def read_events(file: Path, tree: str, *, after: int = 0, limit: int | None = None) -> list[Event]:
    """Read the events of a tree after number `after` from its file."""
    return [decode_line(stored.line, file) for stored in _read_tree(file, tree, after=after, limit=limit)]


def _read_tree(file: Path, tree: str, *, after: int, limit: int | None) -> list[StoredLine]:
    return query_file(file, lambda db: list(islice(schema.read_tree(db, tree, after=after), limit)), trees=[tree])


@contextmanager
def open_log_file(file: Path) -> Iterator[apsw.Connection]:
    """Open a log file for reading. SQLite errors in the block become LogErrors."""
    with closing(_connect(file)) as db, schema.translate_errors(f"cannot read the log {file}"):
        yield db


def query_file(
    file: Path,
    query: Callable[[apsw.Connection], T],
    on_problem: OnProblem = ignore_problem,
    *,
    trees: Collection[str] | None = None,
) -> T:
    """Run a query on a log file and return its answer. With `trees`, only these trees are sure to be up to date.

    If the index is damaged, report that to `on_problem` and repeat the query on a new index of the events that can be
    read. Damaged batches that are not indexed yet are reported too.
    """
    with closing(_connect(file)) as db:
        try:
            with schema.translate_errors(f"cannot read the log {file}"):
                damaged = schema.begin_reading(db, trees)
                found = query(db)
        except LogDamaged as error:
            on_problem(error)
        else:
            for problem in damaged[:1]:  # one report for all of them
                on_problem(problem)
            return found
    with open_log_file(file) as db, closing(schema.recover_file(db)) as recovered:
        return query(recovered)


def _connect(file: Path) -> apsw.Connection:
    """Open a log file for reading. SQLite creates another file next to it; where the disk is full or read-only, open a
    file without a writer as immutable."""
    try:
        return schema.open_reader(file)
    except LogError:
        journal = file.with_name(f"{file.name}-wal")
        if locks.read_holder(file) is not None or (journal.exists() and journal.stat().st_size):
            raise
        with suppress(LogError):
            return schema.open_reader(file, immutable=True)
        raise


def _list_trees_of(
    file: Path, on_problem: OnProblem, *, latest: int | None, only: Unfinished | None, reported: bool
) -> list[StoredTree]:
    """List the trees of a file. Processes reuse files, so the holder of the lock is the writer only of trees with a
    batch of its own."""
    holder = locks.read_holder(file) or locks.Holder()
    query = partial(schema.list_trees, latest=latest, only=only, reported=reported, first_batch=holder.first_batch)
    return [_describe_tree(row, holder) for row in query_file(file, query, on_problem)]


def _load_status(file: Path, tree: str) -> StoredTree | None:
    """Return the state of a tree in the file, or None if the file does not contain the tree."""
    holder = locks.read_holder(file) or locks.Holder()
    row = query_file(file, partial(schema.load_tree, tree=tree), trees=[tree])
    return None if row is None else _describe_tree(row, holder)


def _describe_tree(row: TreeRow, holder: locks.Holder) -> StoredTree:
    is_live = row.last_batch >= holder.first_batch
    return row.describe(holder.writer, holder.pid) if is_live else row.describe(None, None)


def _list_batches(file: Path, since: float) -> Sequence[int]:
    """List the batches of a file; with `since`, only those of trees with events since then."""
    with open_log_file(file) as db:
        last = schema.find_last_batch(db)
        if since:
            with suppress(apsw.CorruptError, LogDamaged):
                schema.begin_reading(db)
                return schema.list_batches(db, since)
    return range(1, last + 1)


def _read_matching(file: Path, wanted: bytes, batches: Sequence[int], problems: dict[str, LogError]) -> list[Event]:
    """Return the events in these batches whose line contains the bytes `wanted`. Batches deleted meanwhile are
    skipped."""
    events: list[Event] = []
    with open_log_file(file) as db:
        for row in batches:
            try:
                lines = schema.load_batch(db, row) if schema.has_batch(db, row) else b""
            except LogDamaged as error:
                problems.setdefault(str(error), error)
                continue
            if wanted in lines:
                found = (make_line(line) for line in lines.split(b"\n") if wanted in line)
                events += [decode_line(line, file) for line in found]
    return events


def _delete_trees(file: Path, trees: list[str]) -> int:
    """Delete trees from a file whose lock we hold, and return the bytes freed.

    Works in place, with a transaction and VACUUM, which SQLite makes safe against a crash. Moving a new file over the
    old one would not be safe, since readers have its journal open by name.
    """
    size = _size_of(file)
    with closing(schema.open_writer(file)) as db:
        schema.delete_trees(db, trees)
    return max(0, size - _size_of(file))


def _size_of(file: Path) -> int:
    files = (file, file.with_name(f"{file.name}-wal"))
    return sum(each.stat().st_size for each in files if each.exists())
