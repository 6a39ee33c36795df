"""The format of a log file, and all the SQL that reads and writes it.

A row of `batches` is one commit. It holds the lines of one batch, with events of one or many trees, in the format of
`encode_stored_events`; readers get the format of `encode_event`. The lines of a large batch are compressed: they repeat
the same names and tools, so writing a twentieth of them takes less time than writing them all.

The other tables are the index (`tree_index`), the only source of lists and lookups. `places` has the number of each
tree's first event in a batch, so reading a tree touches only its own batches. The first event of a run can be long, so
it is stored apart from the run's tally, which changes often.

The index is written after the batches, once for many of them and when there is time: nobody who waits for a commit
waits for the index too. `writer.indexed` is the newest indexed batch. Later batches are the tail: a reader folds them
in memory (`begin_reading`), the next writer of the file adds them to the index (`index_tail`).

`seal` is a checksum under the user's key. It detects damage, and files or journals that came with a clone or a pull. A
batch without a valid seal is never read; its trees have a `gap` instead. A file with a damaged index is read through
`recover_file`.

Batches and index are written with one statement each, the index through the view `indexed`: each statement releases
the interpreter lock, and under load takes long to get it back. Both statements do nothing for a writer whose epoch is
not the newest.
"""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import apsw
import msgspec
from msgspec import structs

from retinue.core.errors import LogDamaged, LogError, LogVersionError
from retinue.core.events import Event, Gap, decode_event, decode_event_or_gap, encode_event, make_line
from retinue.core.ports import OnProblem, RunTally, StoredLine, StoredRun, Unfinished, ignore_problem
from retinue.files.locks import open_own_file
from retinue.files.user_key import load_user_key
from retinue.log.tree_index import TreeIndex, TreeRow, list_names

SEAL_BYTES = 16
T = TypeVar("T")
READER_CACHE_KIB = 16_384  # fits the index of about 20,000 trees, which a list reads in random order
_KEY_VARIABLES = ("XDG_STATE_HOME", "HOME")  # they determine where the key is
_TALLY = msgspec.json.Decoder(RunTally)
APPLICATION_ID = 0x7265746E  # "retn"
VERSION = 6
LARGE_BATCH = 16 * 2**10  # smaller ones are stored as they are: what is compressed can be read by Retinue only
LARGEST_UNPACKED = 256 * 2**20  # larger batches are stored as they are
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PLACE = re.compile(rb'\{"seq":(\d+),"tree":"([^"]*)"')
_INDEX = ("places", "trees", "runs", "tallies", "names")
_MAKE_LINES = f"""
CREATE TABLE batches (id INTEGER PRIMARY KEY, lines BLOB NOT NULL, seal BLOB NOT NULL) STRICT;
CREATE TABLE writer (epoch INTEGER NOT NULL, indexed INTEGER NOT NULL) STRICT;
INSERT INTO writer VALUES (0, 0);
CREATE VIEW indexed AS
  SELECT NULL AS epoch, NULL AS batch, NULL AS places, NULL AS trees, NULL AS runs, NULL AS tallies, NULL AS names;
CREATE TRIGGER index_batches INSTEAD OF INSERT ON indexed WHEN NEW.epoch = (SELECT epoch FROM writer) BEGIN
  INSERT INTO changes VALUES (NEW.places, NEW.trees, NEW.runs, NEW.tallies, NEW.names);
  UPDATE writer SET indexed = NEW.batch;
END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""
# The index of a file; with the prefix `tail_`, the index of the batches in the tail, in a reader's memory.
_MAKE_INDEX = """
CREATE {temp} TABLE {tail}places (
  tree TEXT NOT NULL, seq INTEGER NOT NULL, batch INTEGER NOT NULL, PRIMARY KEY (tree, seq)
) STRICT, WITHOUT ROWID;
CREATE {temp} TABLE {tail}trees (
  id INTEGER PRIMARY KEY, tree TEXT NOT NULL UNIQUE, spawned_at REAL NOT NULL, origin TEXT NOT NULL,
  reported TEXT NOT NULL, last_seq INTEGER NOT NULL, last_at REAL NOT NULL, gone_at REAL NOT NULL,
  root INTEGER NOT NULL, ended INTEGER NOT NULL, seal TEXT NOT NULL, last_batch INTEGER NOT NULL
) STRICT;
CREATE INDEX {tail}newest ON {tail}trees (spawned_at, id);
CREATE INDEX {tail}unfinished ON {tail}trees (spawned_at, id, last_batch) WHERE NOT ended;
CREATE {temp} TABLE {tail}runs (
  id INTEGER PRIMARY KEY, tree TEXT NOT NULL, run INTEGER NOT NULL, first TEXT NOT NULL, seal TEXT NOT NULL,
  UNIQUE (tree, run)
) STRICT;
CREATE {temp} TABLE {tail}tallies (
  tree TEXT NOT NULL, run INTEGER NOT NULL, tally TEXT NOT NULL, seal TEXT NOT NULL, PRIMARY KEY (tree, run)
) STRICT, WITHOUT ROWID;
CREATE {temp} TABLE {tail}names (
  name TEXT NOT NULL, tree TEXT NOT NULL, run INTEGER NOT NULL, PRIMARY KEY (name, tree, run)
) STRICT, WITHOUT ROWID;
CREATE {temp} VIEW {tail}changes AS
  SELECT NULL AS places, NULL AS trees, NULL AS runs, NULL AS tallies, NULL AS names;
CREATE {temp} TRIGGER {tail}take_changes INSTEAD OF INSERT ON {tail}changes BEGIN
  INSERT INTO {tail}places SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(NEW.places) WHERE true
    ON CONFLICT DO NOTHING;
  INSERT INTO {tail}trees
    (tree, spawned_at, origin, reported, last_seq, last_at, gone_at, root, ended, last_batch, seal)
    SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6, value ->> 7,
      value ->> 8, value ->> 9, value ->> 10 FROM json_each(NEW.trees) WHERE true
    ON CONFLICT (tree) DO UPDATE SET last_seq = excluded.last_seq, last_at = excluded.last_at,
      gone_at = excluded.gone_at, root = excluded.root, ended = excluded.ended, seal = excluded.seal,
      last_batch = excluded.last_batch;
  INSERT INTO {tail}runs (tree, run, first, seal)
    SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3 FROM json_each(NEW.runs) WHERE true
    ON CONFLICT DO NOTHING;
  INSERT INTO {tail}tallies
    SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3 FROM json_each(NEW.tallies) WHERE true
    ON CONFLICT (tree, run) DO UPDATE SET tally = excluded.tally, seal = excluded.seal;
  INSERT INTO {tail}names SELECT value ->> 0, value ->> 1, value ->> 2 FROM json_each(NEW.names) WHERE true
    ON CONFLICT DO NOTHING;
END;
"""
_CREATE = _MAKE_INDEX.format(temp="", tail="") + _MAKE_LINES
# Views that join the index with its tail. They hide the tables, because SQLite looks up names in the temporary schema
# first. SQLite uses the indexes of both parts only if the columns have the same affinity (hence the CAST) and the sort
# columns are selected.
_JOIN_TAIL = (
    _MAKE_INDEX.format(temp="TEMP", tail="tail_")
    + """
CREATE TEMP VIEW places AS SELECT * FROM main.places UNION ALL SELECT * FROM tail_places;
CREATE TEMP VIEW trees AS
  SELECT * FROM main.trees WHERE tree NOT IN (SELECT tree FROM tail_trees)
  UNION ALL SELECT CAST(coalesce((SELECT id FROM main.trees AS old WHERE old.tree = new.tree),
      (SELECT max(id) FROM main.trees) + id, id) AS INTEGER), tree, spawned_at, origin, reported, last_seq, last_at,
    gone_at, root, ended, seal, last_batch FROM tail_trees AS new;
CREATE TEMP VIEW runs AS SELECT * FROM main.runs UNION ALL SELECT * FROM tail_runs;
CREATE TEMP VIEW tallies AS
  SELECT * FROM main.tallies WHERE (tree, run) NOT IN (SELECT tree, run FROM tail_tallies)
  UNION ALL SELECT * FROM tail_tallies;
CREATE TEMP VIEW names AS SELECT * FROM main.names UNION ALL SELECT * FROM tail_names;
"""
)


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line, or its class name if the text is empty."""
    return " ".join(str(error).split()) or type(error).__name__


def describe_error(what: str, error: BaseException, db: apsw.Connection | None = None) -> str:
    """Return one line with the failed action (`what`) and the reason. Names a full or failing disk."""
    number = 0 if db is None else db.system_errno
    if isinstance(error, apsw.FullError) or (isinstance(error, apsw.IOError) and number in _FULL):
        return f"the disk is full: {what}"
    if isinstance(error, apsw.IOError):
        code = apsw.mapping_extended_result_codes.get(getattr(error, "extendedresult", 0), "SQLITE_IOERR")
        return f"the disk fails ({os.strerror(number) if number else code}): {what}"
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return f"{what}: the file is damaged ({one_line(error)})"
    return f"{what}: {one_line(error)}"


@contextmanager
def translate_errors(what: str, db: apsw.Connection | None = None) -> Iterator[None]:
    """Turn SQLite's errors in the block into LogErrors that begin with the failed action (`what`). A damaged file
    becomes LogDamaged."""
    try:
        yield
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise LogDamaged(describe_error(what, error, db)) from None
    except apsw.Error as error:
        raise LogError(describe_error(what, error, db)) from None
    except (AttributeError, TypeError, ValueError) as error:  # SQLite returned values of other types than we write
        raise LogDamaged(f"{what}: the file is damaged ({one_line(error)})") from None


def open_writer(path: Path) -> apsw.Connection:
    """Open a log file for its only writing process. Create a new file if needed, and complete the index if the last
    writer was killed. Commits are on disk when they return."""
    with ExitStack() as undo:
        try:
            os.close(open_own_file(path))
            with translate_errors(f"cannot open the log {path}"):
                db = apsw.Connection(str(path))
                undo.callback(close_quietly, db)
                db.set_busy_timeout(5000)
                for pragma, value in (("journal_mode", "wal"), ("synchronous", "full")):
                    db.pragma(pragma, value)
                if not db.execute("SELECT count(*) FROM sqlite_schema").get:
                    db.execute("BEGIN IMMEDIATE;" + _CREATE + "COMMIT;")
                check_version(db, path)
                index_tail(db)
        except OSError as error:
            raise LogError(f"cannot write the log {path}: {error.strerror or error}") from None
        except LogDamaged as error:
            raise LogDamaged(f"{error}; move it away, and a new one is begun") from None
        undo.pop_all()
    return db


def close_quietly(db: apsw.Connection) -> None:
    """Close a connection and ignore errors. Acknowledged events are in the file; the next writer repeats a cleanup
    that failed."""
    with suppress(apsw.Error):
        db.close()


def identify_files(path: Path) -> tuple[tuple[int, int], ...]:
    """Return the device and inode numbers of a log file and its journal. A missing file is left out."""
    found = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):
            status = each.lstat()
            found.append((status.st_dev, status.st_ino))
    return tuple(found)


def open_reader(path: Path, *, immutable: bool = False) -> apsw.Connection:
    """Open a log file for reading, even while its writer is active. With `immutable`, the file must have no writer and
    an empty journal; SQLite then creates no other files."""
    if path.is_symlink():
        raise LogError(f"cannot read the log {path}: it is a link")
    with ExitStack() as undo, translate_errors(f"cannot read the log {path}"):
        if immutable:
            flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
            db = apsw.Connection(f"file:{quote(str(path))}?immutable=1", flags=flags)
        else:
            db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        undo.callback(close_quietly, db)
        db.set_busy_timeout(5000)
        db.execute("PRAGMA temp_store = MEMORY; PRAGMA query_only = ON")
        db.pragma("cache_size", -READER_CACHE_KIB)
        check_version(db, path)
        undo.pop_all()
    return db


def check_version(db: apsw.Connection, path: Path) -> None:
    """Raise LogError unless the file is a log of this version."""
    application, version = db.pragma("application_id"), db.pragma("user_version")
    if not application and not db.execute("SELECT count(*) FROM sqlite_schema").get:
        raise LogError(f"{path} is not a log of retinue: it is empty (its creation was interrupted, or it was cut)")
    if application != APPLICATION_ID:
        raise LogError(f"{path} is not a log of retinue")
    if version != VERSION:
        age = "a newer" if version > VERSION else "an older"
        raise LogVersionError(f"{path} was written by {age} retinue (log version {version}, this one reads {VERSION})")


# Seals


class Sealer:
    """A maker of checksums under the user's key. Share one for all rows of a batch or a list: finding the key for each
    row would cost more than the checksum."""

    def __init__(self) -> None:
        self._begun = _begin_seal(*map(os.environ.get, _KEY_VARIABLES))

    def hash_data(self, data: bytes) -> blake2b:
        seal = self._begun.copy()
        seal.update(data)
        return seal

    def seal_tally(self, tree: str, run: int, tally: bytes) -> str:
        return self.hash_data(b"%b/%d %b" % (tree.encode(), run, tally)).hexdigest()

    def seal_tree(self, values: Sequence[Any]) -> str:
        tree, spawned_at, origin, reported, last_seq, last_at, gone_at, root, ended, _ = values
        times = float(spawned_at), float(last_at), float(gone_at)
        fields = tree, origin, reported, last_seq, root, bool(ended), *times
        return self.hash_data(msgspec.json.encode(fields)).hexdigest()


@lru_cache(4)
def _begin_seal(*variables: str | None) -> blake2b:
    """Return an empty checksum under the user's key. The cache reads the key once per location."""
    return blake2b(digest_size=SEAL_BYTES, key=load_user_key(), person=b"retinue log")


def seal_lines(stored: bytes) -> bytes:
    """Return the checksum of a batch, as it is stored, under the user's key."""
    return Sealer().hash_data(stored).digest()


def check_seal(db: apsw.Connection, seal: bytes | str, found: Any) -> None:
    """Raise LogDamaged if the seal found differs from the expected `seal`."""
    if not compare_digest(seal, found):
        raise LogDamaged(f"{db.filename} holds events that you did not write: it is damaged, or was brought here")


@contextmanager
def _begin_writing(db: apsw.Connection) -> Iterator[None]:
    """Lock the file before anything is read in a transaction. SQLite refuses a write after a read if another process
    wrote meanwhile, as one does whose lock was taken away."""
    with db:
        db.execute("UPDATE writer SET indexed = indexed")
        yield


def reseal_batches(db: apsw.Connection) -> None:
    """Seal all batches and the index with the user's key, no matter who wrote them. A batch that cannot be unpacked
    keeps its seal, so that readers show a gap there."""
    with _begin_writing(db):
        last = next_batch(db) - 1
        rows: list[int] = [row for (row,) in db.execute("SELECT id FROM batches")]
        for row in rows:
            stored = db.execute("SELECT lines FROM batches WHERE id = ?", (row,)).get
            with suppress(LogDamaged):
                unpack_lines(db, stored)
                db.execute("UPDATE batches SET seal = ? WHERE id = ?", (seal_lines(stored), row))
        for table in _INDEX:
            db.execute(f"DELETE FROM {table}")
        db.execute("UPDATE writer SET indexed = 0")
        index_tail(db)
        db.execute("UPDATE writer SET indexed = ?", (last,))


def index_tail(db: apsw.Connection) -> None:
    """Add to the index the batches that it lacks: those that a killed writer did not index, or all for a new index."""
    if list_tail(db):
        index = continue_index(db)
        with _begin_writing(db):
            for row in list_tail(db):  # one by one: all changes of a large file at once would fill the memory
                _fold_tail(db, index, [row])
                _insert_changes(db, index)
                db.execute("UPDATE writer SET indexed = ?", (row,))


def continue_index(db: apsw.Connection) -> TreeIndex:
    """Return a `TreeIndex` that continues the stored index. A damaged row counts as missing and blocks no other tree;
    a reader that finds the row builds its own index."""

    def load_whole(load: Callable[..., T], *place: str | int) -> T | None:
        with suppress(LogDamaged, AttributeError, TypeError, ValueError):
            return load(db, *place)
        return None

    return TreeIndex(partial(load_whole, load_tree), partial(load_whole, load_run))


def begin_reading(db: apsw.Connection, trees: Collection[str] | None = None) -> list[LogError]:
    """Begin a transaction with a snapshot of the file, and complete the index in memory with the tail. With `trees`,
    only the events of those trees are added. Return the errors of damaged batches in the tail."""
    db.execute("BEGIN")
    tail, damaged = list_tail(db), list[LogError]()
    if tail:
        index = TreeIndex(partial(load_tree, db), partial(load_run, db))
        _fold_tail(db, index, tail, trees, damaged.append)
        db.execute("PRAGMA query_only = OFF")
        db.execute(_JOIN_TAIL)
        _insert_changes(db, index, "tail_")
        db.execute("PRAGMA query_only = ON")
    return damaged


def list_tail(db: apsw.Connection) -> list[int]:
    """Return the ids of the batches that are not indexed yet."""
    return [row for (row,) in db.execute("SELECT id FROM batches WHERE id > (SELECT indexed FROM writer) ORDER BY id")]


def _fold_tail(
    db: apsw.Connection,
    index: TreeIndex,
    tail: Iterable[int],
    trees: Collection[str] | None = None,
    on_problem: OnProblem = ignore_problem,
) -> None:
    """Fold batches into an index, or only their events of `trees`. Batches that cannot be read are reported to
    `on_problem` and skipped."""
    names = None if trees is None else frozenset(tree.encode() for tree in trees)
    for row in tail:
        try:
            lines = load_batch(db, row)
        except LogDamaged as error:
            on_problem(error)
            continue
        index.apply(decode_lines(lines, names), row)


def _insert_changes(db: apsw.Connection, index: TreeIndex, prefix: str = "") -> None:
    db.execute(f"INSERT INTO {prefix}changes VALUES (?, ?, ?, ?, ?)", _encode_changes(index))
    index.settle()


def pack_lines(lines: bytes) -> bytes:
    """Return the lines of a batch in the form that is stored."""
    return zlib.compress(lines, 1) if LARGE_BATCH <= len(lines) <= LARGEST_UNPACKED else lines


def unpack_lines(db: apsw.Connection, stored: bytes) -> bytes:
    """Return the lines of a stored batch. Raises LogDamaged if they cannot be unpacked, or would be larger than any
    batch that `pack_lines` compresses."""
    if stored.startswith(b"{"):
        return bytes(stored)
    unpacker = zlib.decompressobj()
    try:
        lines = unpacker.decompress(stored, LARGEST_UNPACKED)
    except zlib.error:
        lines = b""
    if not unpacker.eof:
        raise LogDamaged(f"{db.filename} holds a batch of events that cannot be unpacked")
    return lines


def decode_lines(lines: bytes, trees: Collection[bytes] | None = None) -> list[Event]:
    """Return the events of a batch, or only those of `trees`. An undecodable line becomes a gap, which changes no
    list; readers of its tree see it."""
    found = lines.split(b"\n")
    if trees is not None:
        found = [line for line in found if (place := _PLACE.match(line)) is not None and place[2] in trees]
    return [decode_event_or_gap(make_line(line)) for line in found]


# Writing


def begin_epoch(db: apsw.Connection) -> int:
    """Make this process the only accepted writer of the file, and return its new epoch.

    The epoch keeps living processes apart, and they see it without a sync. A crash may lose it, so it is not synced.
    """
    db.pragma("synchronous", "normal")
    found: int = db.execute("UPDATE writer SET epoch = epoch + 1 RETURNING epoch").get
    db.pragma("synchronous", "full")
    return found


def append_batch(db: apsw.Connection, *, epoch: int, batch: int, lines: bytes) -> bool:
    """Commit one batch. Returns False, and writes nothing, if another process has begun a newer epoch."""
    stored = pack_lines(lines)
    insert = "INSERT INTO batches SELECT ?, ?, ? WHERE ? = (SELECT epoch FROM writer)"
    db.execute(insert, (batch, stored, seal_lines(stored), epoch))
    return bool(db.changes())


def index_batches(db: apsw.Connection, *, epoch: int, batch: int, index: TreeIndex) -> None:
    """Write the index changes of the batches up to `batch`, unless another process has begun a newer epoch. The write
    is not synced: if a crash of the machine loses the changes, the next writer repeats them."""
    db.pragma("synchronous", "normal")
    try:
        db.execute("INSERT INTO indexed VALUES (?, ?, ?, ?, ?, ?, ?)", (epoch, batch, *_encode_changes(index)))
    finally:
        db.pragma("synchronous", "full")
    index.settle()


def _encode_changes(index: TreeIndex) -> list[str]:
    """Return the changed rows of the index, one JSON text per table."""
    sealer, changes = Sealer(), index.list_changes()
    firsts = [(run.first.tree, run.first.run, encode_event(run.first)) for run in changes.spawned]
    tallies = [(run.first.tree, run.first.run, msgspec.json.encode(run.tally)) for run in changes.tallied]
    tables = (
        changes.places,
        [(*(values := structs.astuple(row)), sealer.seal_tree(values)) for row in changes.trees],
        [(tree, run, first.decode(), sealer.hash_data(first).hexdigest()) for tree, run, first in firsts],
        [(tree, run, tally.decode(), sealer.seal_tally(tree, run, tally)) for tree, run, tally in tallies],
        [(name, run.first.tree, run.first.run) for run in changes.spawned for name in list_names(run)],
    )
    return [msgspec.json.encode(rows).decode() for rows in tables]


def next_batch(db: apsw.Connection) -> int:
    """Return the id for the next batch. It is higher than every indexed batch, even if the newest batches were
    deleted."""
    found: int = db.execute("SELECT 1 + max(indexed, coalesce((SELECT max(id) FROM batches), 0)) FROM writer").get
    return found


def delete_trees(db: apsw.Connection, trees: Iterable[str]) -> None:
    """Remove all lines of the given trees in one transaction and free their space. The remaining batches keep their
    ids."""
    names = {tree.encode() for tree in trees}
    with _begin_writing(db):
        touched: set[int] = set()
        for name in names:
            tree = name.decode()
            touched.update(row for (row,) in db.execute("SELECT batch FROM places WHERE tree = ?", (tree,)))
            for table in _INDEX:
                db.execute(f"DELETE FROM {table} WHERE tree = ?", (tree,))
        for row in sorted(touched):
            before = load_batch(db, row).split(b"\n")
            after = [line for line in before if line and ((at := _PLACE.match(line)) is None or at[2] not in names)]
            if after:
                stored = pack_lines(b"\n".join(after))
                db.execute("UPDATE batches SET lines = ?, seal = ? WHERE id = ?", (stored, seal_lines(stored), row))
            else:
                db.execute("DELETE FROM batches WHERE id = ?", (row,))
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


# Reading


_ROW = "tree, spawned_at, origin, reported, last_seq, last_at, gone_at, root, ended, last_batch, seal"
_RUN = "runs.tree, runs.run, CAST(first AS BLOB), runs.seal, CAST(tally AS BLOB), tallies.seal"


def load_tree(db: apsw.Connection, tree: str) -> TreeRow | None:
    found = db.execute(f"SELECT {_ROW} FROM trees WHERE tree = ?", (tree,)).get
    return None if found is None else _make_tree(db, Sealer(), found)


def list_trees(
    db: apsw.Connection, *, latest: int | None, reported: bool, first_batch: int, only: Unfinished | None
) -> list[TreeRow]:
    """Return the rows of trees, newest first; see `LogReader.list_trees`. A tree is live if its newest batch is the
    writer's `first_batch` or a later one."""
    conditions = [] if reported else ["reported = ''"]
    if only is not None:
        conditions += ["NOT ended", f"last_batch {'>=' if only == 'live' else '<'} {first_batch}"]
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    query = f"SELECT id, {_ROW} FROM trees {where} ORDER BY spawned_at DESC, id DESC LIMIT ?"
    sealer = Sealer()
    return [_make_tree(db, sealer, row) for _, *row in db.execute(query, (-1 if latest is None else latest,))]


def count_trees(db: apsw.Connection, *, reported: bool) -> int:
    count: int = db.execute("SELECT count(*) FROM trees" + ("" if reported else " WHERE reported = ''")).get
    return count


def load_run(db: apsw.Connection, tree: str, run: int) -> StoredRun | None:
    query = f"SELECT {_RUN}, 0 FROM runs JOIN tallies USING (tree, run) WHERE tree = ? AND run = ?"
    found = db.execute(query, (tree, run)).get
    return None if found is None else _make_run(db, Sealer(), found)


def read_runs(db: apsw.Connection, trees: Iterable[str]) -> list[StoredRun]:
    """Return the runs of the given trees, unsorted: SQLite would sort long rows in a file."""
    query = f"""
        SELECT {_RUN}, trees.reported <> '' FROM json_each(?)
        JOIN trees ON trees.tree = value JOIN runs ON runs.tree = value JOIN tallies USING (tree, run)
    """
    sealer = Sealer()
    names = msgspec.json.encode(list(trees)).decode()
    return [_make_run(db, sealer, row) for row in db.execute(query, (names,))]


def find_runs(db: apsw.Connection, name: str) -> list[StoredRun]:
    """Return the runs with a name that starts with `name`, those of newer trees first."""
    query = f"""
        SELECT spawned_at, trees.id, {_RUN}, trees.reported <> ''
        FROM (SELECT DISTINCT tree, run FROM names WHERE name >= ?1 AND name < ?2)
        JOIN trees USING (tree) JOIN runs USING (tree, run) JOIN tallies USING (tree, run)
        ORDER BY spawned_at DESC, trees.id DESC, runs.run
    """
    sealer = Sealer()
    return [_make_run(db, sealer, row) for _, _, *row in db.execute(query, (name, name + "\U0010ffff"))]


def _make_tree(db: apsw.Connection, sealer: Sealer, row: Sequence[Any]) -> TreeRow:
    *values, seal = row
    check_seal(db, sealer.seal_tree(values), seal)
    values[-2] = bool(values[-2])  # SQLite has no booleans
    return TreeRow(*values)


def _make_run(db: apsw.Connection, sealer: Sealer, row: Sequence[Any]) -> StoredRun:
    tree, run, first, first_seal, tally, tally_seal, reported = row
    check_seal(db, sealer.hash_data(first).hexdigest(), first_seal)
    check_seal(db, sealer.seal_tally(tree, run, tally), tally_seal)
    return StoredRun(first=decode_event(first), tally=_TALLY.decode(tally), is_reported=bool(reported))


def read_tree(db: apsw.Connection, tree: str, *, after: int) -> Iterator[StoredLine]:
    """Yield the events of a tree after number `after`. A batch that cannot be read becomes a `gap`."""
    query = """
        SELECT seq, batch FROM places
        WHERE tree = ?1 AND seq >= (SELECT coalesce(max(seq), 0) FROM places WHERE tree = ?1 AND seq <= ?2)
        ORDER BY seq
    """
    newest = max(after, 0)
    for first, batch in db.execute(query, (tree, newest + 1)):
        if newest + 1 < first:
            yield _make_gap(load_tree(db, tree), tree, first - 1, count=first - 1 - newest)
            newest = first - 1
        try:
            own = lines_of_tree(db, tree, batch)
        except LogDamaged:
            continue
        for stored in own:
            if stored.seq > newest:
                newest = stored.seq
                yield stored
    row = load_tree(db, tree)  # last, so that a damaged row makes one page of a long tree need recovery, not every page
    if row is not None and newest < row.last_seq:
        yield _make_gap(row, tree, row.last_seq, count=row.last_seq - newest)


def _make_gap(row: TreeRow | None, tree: str, seq: int, *, count: int) -> StoredLine:
    """Return a `gap` line that replaces `count` damaged events of a tree, up to number `seq`."""
    at = 0.0 if row is None else row.spawned_at
    gap = Gap(count, "the log is damaged here", code="damaged")
    return StoredLine(seq, encode_event(Event(seq=seq, tree=tree, run=0, path="/", agent="", at=at, body=gap)))


def load_batch(db: apsw.Connection, row: int) -> bytes:
    """Return the lines of a batch. Raises LogDamaged if they were changed or are missing."""
    try:
        found = db.execute("SELECT lines, seal FROM batches WHERE id = ?", (row,)).get
    except apsw.CorruptError as error:
        raise LogDamaged(describe_error(f"cannot read the log {db.filename}", error)) from None
    if found is None:
        raise LogDamaged(f"{db.filename} has lost a batch of events")
    stored, seal = found
    check_seal(db, seal_lines(stored), seal)
    return unpack_lines(db, stored)


def lines_of_tree(db: apsw.Connection, tree: str, row: int) -> list[StoredLine]:
    """Return the lines of one tree in a batch. Raises LogDamaged like `load_batch`."""
    name = tree.encode()
    return [StoredLine(int(place[1]), make_line(line)) for place, line in _place_lines(db, row) if place[2] == name]


def _place_lines(db: apsw.Connection, row: int) -> Iterator[tuple[re.Match[bytes], bytes]]:
    """Yield the lines of a batch, each after the match of its number and tree. Raises LogDamaged like `load_batch`."""
    for line in load_batch(db, row).split(b"\n"):
        place = _PLACE.match(line)
        if place is None:
            raise LogDamaged(f"{db.filename} holds a line that is not an event")
        yield place, line


def find_last_batch(db: apsw.Connection) -> int:
    """Return the highest batch id in any part of the file that can be read."""
    found = [0]
    for query in ("SELECT max(id) FROM batches", "SELECT max(batch) FROM places", "SELECT max(last_batch) FROM trees"):
        with suppress(apsw.CorruptError):
            found.append(db.execute(query).get or 0)
    return max(found)


def list_batches(db: apsw.Connection, since: float) -> list[int]:
    """Return the ids of the batches with events of trees whose newest event is not older than `since`."""
    query = "SELECT DISTINCT batch FROM places JOIN trees USING (tree) WHERE last_at >= ? ORDER BY batch"
    return [row for (row,) in db.execute(query, (since,))]


def has_batch(db: apsw.Connection, row: int) -> bool:
    """Return True if there is a batch with this id, even a damaged one. Deleted trees leave ids without a batch."""
    try:
        return db.execute("SELECT 1 FROM batches WHERE id = ?", (row,)).get is not None
    except apsw.CorruptError:
        return True


def recover_file(db: apsw.Connection) -> apsw.Connection:
    """Return a temporary log with every batch of the file that can be read, and a new index. This is for a file with a
    damaged index; it takes time in proportion to the file's size."""
    recovered = apsw.Connection("")  # the empty name: a temporary file that SQLite removes
    recovered.execute(_CREATE)
    with recovered:
        for row in range(1, find_last_batch(db) + 1):
            with suppress(LogDamaged):
                stored = pack_lines(load_batch(db, row))
                recovered.execute("INSERT INTO batches VALUES (?, ?, ?)", (row, stored, seal_lines(stored)))
    index_tail(recovered)
    return recovered


def check_batch(db: apsw.Connection, row: int) -> None:
    """Raise LogDamaged if a batch or its places in the index differ from the data written."""
    firsts: dict[str, int] = {}
    for place, _ in _place_lines(db, row):
        firsts.setdefault(place[2].decode(), int(place[1]))
    for tree, seq in firsts.items():
        if db.execute("SELECT batch FROM places WHERE tree = ? AND seq = ?", (tree, seq)).get != row:
            raise LogDamaged(f"the index of {db.filename} is damaged: it lacks events of {tree}")


def check_index(db: apsw.Connection) -> None:
    """Raise LogDamaged if a row of a tree or a run differs from the data written."""
    query = f"SELECT {_RUN}, 0 FROM runs LEFT JOIN tallies USING (tree, run)"
    sealer = Sealer()
    for row in db.execute(query):
        run = None if row[4] is None else _make_run(db, sealer, row)
        names = () if run is None else list_names(run)
        known = "SELECT 1 FROM names WHERE name = ? AND tree = ? AND run = ?"
        if run is None or not all(db.execute(known, (name, *row[:2])).get for name in names):
            raise LogDamaged(f"the index of {db.filename} is damaged: it lacks a run of {row[0]}")
    for row in db.execute(f"SELECT {_ROW} FROM trees"):
        _make_tree(db, sealer, row)


def check_pages(db: apsw.Connection) -> None:
    """Raise LogDamaged if SQLite's integrity check finds damage."""
    found = db.pragma("integrity_check", 1)
    if found != "ok":
        raise LogDamaged(f"the log {db.filename} is damaged: {' '.join(found.split())}")
