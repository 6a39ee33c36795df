"""The format of a log file, and all the SQL that reads and writes one.

A row of `batches` is one commit: the lines of a whole batch, of one tree or of many. `places` is the index of the
trees: for each tree in a batch, the number of its first event there. Readers of a tree so touch the batches of that
tree and no others. Lines are stored as `encode_stored_events` makes them; readers get those of `encode_event`.

`seal` is a checksum of the lines under the user's key: a file or journal that came with a clone or a pull has none, and
damage is noticed. Nothing of a batch without its seal is read.

A batch is written by one statement, through the view `appended`: each statement releases the interpreter lock, and
under load is slow to get it back. Its trigger refuses a writer whose epoch is not the newest.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from pathlib import Path
from urllib.parse import quote

import apsw
import msgspec

from retinue.core.errors import LogError, LogVersionError
from retinue.core.events import make_line
from retinue.files.locks import open_own_file
from retinue.files.user_key import find_user_folder, load_user_key

SEAL_BYTES = 16
APPLICATION_ID = 0x7265746E  # "retn"
VERSION = 4
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PLACE = re.compile(rb'\{"seq":(\d+),"tree":"([^"]*)"')
_LOST = "the writer's epoch is over"
_CREATE = f"""
CREATE TABLE batches (id INTEGER PRIMARY KEY, lines BLOB NOT NULL, seal BLOB NOT NULL) STRICT;
CREATE TABLE places (
  tree TEXT NOT NULL, seq INTEGER NOT NULL, batch INTEGER NOT NULL, PRIMARY KEY (tree, seq)
) STRICT, WITHOUT ROWID;
CREATE INDEX beginnings ON places (batch) WHERE seq = 1;
CREATE TABLE writer (epoch INTEGER NOT NULL) STRICT;
INSERT INTO writer VALUES (0);
CREATE VIEW appended AS SELECT NULL AS epoch, NULL AS places, NULL AS lines, NULL AS seal;
CREATE TRIGGER append_batch INSTEAD OF INSERT ON appended BEGIN
  SELECT RAISE(ABORT, '{_LOST.replace("'", "''")}') WHERE NEW.epoch <> (SELECT epoch FROM writer);
  INSERT INTO batches (lines, seal) VALUES (NEW.lines, NEW.seal);
  INSERT INTO places SELECT key, value, last_insert_rowid() FROM json_each(NEW.places);
END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line, or its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def describe_error(what: str, error: BaseException, db: apsw.Connection | None = None) -> str:
    """Say on one line what cannot be done and why. A full or failing disk is named as such."""
    number = 0 if db is None else db.system_errno
    if isinstance(error, apsw.FullError) or (isinstance(error, apsw.IOError) and number in _FULL):
        return f"the disk is full: {what}"
    if isinstance(error, apsw.IOError):
        code = apsw.mapping_extended_result_codes.get(getattr(error, "extendedresult", 0), "SQLITE_IOERR")
        return f"the disk fails ({os.strerror(number) if number else code}): {what}"
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return f"{what}: the file is damaged ({one_line(error)})"
    return f"{what}: {one_line(error)}"


def open_writer(path: Path) -> apsw.Connection:
    """Open a log file for its one writing process, and create it if it is new. Commits are on disk when they return."""
    try:
        os.close(open_own_file(path))
        db = apsw.Connection(str(path))
        db.set_busy_timeout(5000)
        for pragma, value in (("journal_mode", "wal"), ("synchronous", "full")):
            db.pragma(pragma, value)
        if not db.execute("SELECT count(*) FROM sqlite_schema").get:
            db.execute("BEGIN IMMEDIATE;" + _CREATE + "COMMIT;")
        check_version(db, path)
    except OSError as error:
        raise LogError(f"cannot write the log {path}: {error.strerror or error}") from None
    except apsw.Error as error:
        raise LogError(describe_error(f"cannot open the log {path}", error)) from None
    return db


def open_reader(path: Path, *, immutable: bool = False) -> apsw.Connection:
    """Open a log file for reading, also while its writer is at work. An `immutable` file has no writer and an empty
    journal; SQLite then creates nothing beside it."""
    if path.is_symlink():
        raise LogError(f"cannot read the log {path}: it is a link")
    try:
        if immutable:
            flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
            db = apsw.Connection(f"file:{quote(str(path))}?immutable=1", flags=flags)
        else:
            db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        db.set_busy_timeout(5000)
        db.execute("PRAGMA query_only = ON")
        check_version(db, path)
    except apsw.Error as error:
        raise LogError(describe_error(f"cannot read the log {path}", error)) from None
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


def seal_lines(lines: bytes) -> bytes:
    """Return the checksum of a batch under the user's key."""
    return blake2b(
        lines, digest_size=SEAL_BYTES, key=_load_key(str(find_user_folder())), person=b"retinue log"
    ).digest()


def check_seal(db: apsw.Connection, lines: bytes, seal: bytes) -> bytes:
    """Return the lines of a batch; raises LogError if they are not as this user wrote them."""
    if not compare_digest(seal_lines(lines), seal):
        raise LogError(f"{db.filename} holds events that you did not write: it is damaged, or was brought here")
    return lines


def reseal_batches(db: apsw.Connection) -> None:
    """Seal all batches with the user's key, whoever wrote them."""
    with db:
        for (row,) in db.execute("SELECT id FROM batches").fetchall():
            lines = db.execute("SELECT lines FROM batches WHERE id = ?", (row,)).get
            db.execute("UPDATE batches SET seal = ? WHERE id = ?", (seal_lines(lines), row))


@lru_cache(4)
def _load_key(folder: str) -> bytes:
    """Return the user's key, read once for each folder it may be in: every batch needs it."""
    return load_user_key()


# Writing


def begin_epoch(db: apsw.Connection) -> int:
    """Make this process the only one whose batches are taken; return the epoch they carry.

    The epoch keeps living processes apart, which see it without the disk: a crash may lose it, so nothing is synced."""
    db.pragma("synchronous", "normal")
    found: int = db.execute("UPDATE writer SET epoch = epoch + 1 RETURNING epoch").get
    db.pragma("synchronous", "full")
    return found


def append_batch(db: apsw.Connection, *, epoch: int, places: Mapping[str, int], lines: bytes) -> None:
    """Commit one batch. `places` has the first event number in it of each tree."""
    arguments = (epoch, msgspec.json.encode(places).decode(), lines, seal_lines(lines))
    db.execute("INSERT INTO appended (epoch, places, lines, seal) VALUES (?, ?, ?, ?)", arguments)


def is_lost_epoch(error: BaseException) -> bool:
    """Return whether a batch was refused because another process has begun a newer epoch."""
    return isinstance(error, apsw.ConstraintError) and _LOST in str(error)


def next_batch(db: apsw.Connection) -> int:
    """Return the id of the batch that comes next."""
    found: int | None = db.execute("SELECT max(id) FROM batches").get
    return 1 + (found or 0)


def delete_trees(db: apsw.Connection, trees: Iterable[str]) -> None:
    """Remove all lines of these trees in one transaction and give their space back. Other batches keep their ids."""
    names = {tree.encode() for tree in trees}
    with db:
        touched: set[int] = set()
        for name in names:
            tree = name.decode()
            touched.update(row for (row,) in db.execute("SELECT batch FROM places WHERE tree = ?", (tree,)))
            db.execute("DELETE FROM places WHERE tree = ?", (tree,))
        for row in sorted(touched):
            found = db.execute("SELECT lines, seal FROM batches WHERE id = ?", (row,)).get
            before = [] if found is None else check_seal(db, *found).split(b"\n")
            after = [line for line in before if line and ((at := _PLACE.match(line)) is None or at[2] not in names)]
            if after:
                lines = b"\n".join(after)
                db.execute("UPDATE batches SET lines = ?, seal = ? WHERE id = ?", (lines, seal_lines(lines), row))
            else:
                db.execute("DELETE FROM batches WHERE id = ?", (row,))
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


# Reading


def has_tree(db: apsw.Connection, tree: str) -> bool:
    return db.execute("SELECT 1 FROM places WHERE tree = ? LIMIT 1", (tree,)).get is not None


def list_first_lines(db: apsw.Connection) -> Iterator[tuple[str, bytes]]:
    """Yield every tree that begins in the file with its first line, in the order they began."""
    for found in db.execute(
        "SELECT lines, seal FROM batches WHERE id IN (SELECT batch FROM places WHERE seq = 1) ORDER BY id"
    ):
        for line in check_seal(db, *found).split(b"\n"):
            place = _PLACE.match(line)
            if place is not None and place[1] == b"1":
                yield place[2].decode("utf-8", "replace"), make_line(line)


def list_trees_since(db: apsw.Connection, batch: int) -> set[str]:
    """Return the trees with a line in that batch or a later one."""
    return {tree for (tree,) in db.execute("SELECT DISTINCT tree FROM places WHERE batch >= ?", (batch,))}


def read_tree(db: apsw.Connection, tree: str, *, after: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and line of the events of a tree after that number."""
    query = """
        SELECT lines, seal FROM places JOIN batches ON batches.id = places.batch
        WHERE tree = ?1 AND seq >= (SELECT coalesce(max(seq), 0) FROM places WHERE tree = ?1 AND seq <= ?2)
        ORDER BY seq
    """
    for found in db.execute(query, (tree, max(after, 0) + 1)):
        for seq, line in lines_of_tree(db, tree, check_seal(db, *found)):
            if seq > after:
                yield seq, line


def read_last_line(db: apsw.Connection, tree: str) -> tuple[int, bytes] | None:
    """Return the newest line of a tree and the batch it is in."""
    found = db.execute(
        "SELECT batch, lines, seal FROM places JOIN batches ON id = batch WHERE tree = ? ORDER BY seq DESC LIMIT 1",
        (tree,),
    ).get
    if found is None:
        return None
    batch, lines, seal = found
    own = lines_of_tree(db, tree, check_seal(db, lines, seal))
    return (batch, own[-1][1]) if own else None


def read_batches(db: apsw.Connection, *, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Return id and stored lines of some batches, of all trees, in the order they were written."""
    query = "SELECT id, lines, seal FROM batches WHERE id > ? ORDER BY id LIMIT ?"
    return [(row, check_seal(db, lines, seal)) for row, lines, seal in db.execute(query, (after, limit))]


def check_pages(db: apsw.Connection) -> None:
    """Raise LogError if SQLite's own check of all pages finds damage."""
    found = db.pragma("quick_check")
    if found != "ok":
        raise LogError(f"the log {db.filename} is damaged: {' '.join(found.split())}")


def lines_of_tree(db: apsw.Connection, tree: str, lines: bytes) -> list[tuple[int, bytes]]:
    """Pick the lines of one tree out of a batch: number and line of each."""
    name = tree.encode()
    if b'"tree":"%b"' % name not in lines:
        return []
    found = []
    for line in lines.split(b"\n"):
        place = _PLACE.match(line)
        if place is None:
            raise LogError(f"{db.filename} holds a line that is not an event")
        if place[2] == name:
            found.append((int(place[1]), make_line(line)))
    return found
