"""What a log file looks like inside, and how one is opened and read. All the SQL there is stands here.

A row is one commit: the lines of a whole batch, whatever trees they are of, and the names of the trees that begin in
it. One statement a commit, because each statement gives the interpreter lock away and under load is slow to get it
back. A tree's lines lie in the rows from its first one on. They are kept as `encode_kept` makes them; readers get
those of `encode`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import quote

import apsw

from retinue.core.errors import LogError
from retinue.core.events import line_of

APPLICATION_ID = 0x7265746E  # "retn"
VERSION = 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PLACE = re.compile(rb'\{"seq":(\d+),"tree":"([^"]*)"')
_CREATE = f"""
CREATE TABLE batches (id INTEGER PRIMARY KEY, begun TEXT NOT NULL, lines BLOB NOT NULL) STRICT;
CREATE INDEX begun ON batches (id, begun) WHERE begun <> '';
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


class OtherVersion(LogError):
    """A log that another version of us has written."""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def trouble(what: str, error: BaseException, db: apsw.Connection | None = None) -> str:
    """What cannot be done with which file, and why, in one line. If the disk is full or fails the words are ours."""
    number = 0 if db is None else db.system_errno
    if isinstance(error, apsw.FullError) or (isinstance(error, apsw.IOError) and number in _FULL):
        return f"the disk is full: {what}"
    if isinstance(error, apsw.IOError):
        code = apsw.mapping_extended_result_codes.get(getattr(error, "extendedresult", 0), "SQLITE_IOERR")
        return f"the disk fails ({os.strerror(number) if number else code}): {what}"
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return f"{what}: the file is damaged ({one_line(error)})"
    return f"{what}: {one_line(error)}"


def make_folder(folder: Path) -> None:
    """The folder, and those above it, for nobody but us."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"cannot make {folder}: {error.strerror or error}") from None


def open_writer(path: Path) -> apsw.Connection:
    """The file, made if it is new, for its one writing process. Every commit is on the disk when it returns."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        db = apsw.Connection(str(path))
        db.set_busy_timeout(5000)
        for pragma, value in (("journal_mode", "wal"), ("synchronous", "full")):
            db.pragma(pragma, value)
        if not db.execute("SELECT count(*) FROM sqlite_schema").get:
            db.execute("BEGIN IMMEDIATE;" + _CREATE + "COMMIT;")
        check(db, path)
    except OSError as error:
        raise LogError(f"cannot write the log {path}: {error.strerror or error}") from None
    except apsw.Error as error:
        raise LogError(trouble(f"cannot open the log {path}", error)) from None
    return db


def open_reader(path: Path, *, still: bool = False) -> apsw.Connection:
    """The file for reading, also while its writer is at work; a `still` one has no writer and an empty journal, and
    nothing is made beside it."""
    try:
        if still:
            flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
            db = apsw.Connection(f"file:{quote(str(path))}?immutable=1", flags=flags)
        else:
            db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        db.set_busy_timeout(5000)
        db.execute("PRAGMA query_only = ON")
        check(db, path)
    except apsw.Error as error:
        raise LogError(trouble(f"cannot read the log {path}", error)) from None
    return db


def check(db: apsw.Connection, path: Path) -> None:
    application, version = db.pragma("application_id"), db.pragma("user_version")
    if not application and not db.execute("SELECT count(*) FROM sqlite_schema").get:
        raise LogError(f"{path} is not a log of retinue: it is empty (its making was broken off, or it was cut)")
    if application != APPLICATION_ID:
        raise LogError(f"{path} is not a log of retinue")
    if version != VERSION:
        age = "a newer" if version > VERSION else "an older"
        raise OtherVersion(f"{path} was written by {age} retinue (log version {version}, this one reads {VERSION})")


def insert(db: apsw.Connection, *, begun: Iterable[str], lines: bytes) -> None:
    """One row, which is one commit."""
    db.execute("INSERT INTO batches (begun, lines) VALUES (?, ?)", (" ".join(begun), lines))


def next_row(db: apsw.Connection) -> int:
    found: int | None = db.execute("SELECT max(id) FROM batches").get
    return 1 + (found or 0)


def trees(db: apsw.Connection) -> Iterator[tuple[str, int]]:
    """Every tree in the file with the row it begins in, in that order."""
    for row, names in db.execute("SELECT id, begun FROM batches WHERE begun <> '' ORDER BY id"):
        for name in names.split():
            yield name, row


def first_row(db: apsw.Connection, tree: str) -> int | None:
    """The row a tree begins in."""
    query = "SELECT id FROM batches WHERE begun <> '' AND instr(' ' || begun || ' ', ?) ORDER BY id DESC LIMIT 1"
    found: int | None = db.execute(query, (f" {tree} ",)).get
    return found


def beginnings(db: apsw.Connection) -> Iterator[tuple[str, int, bytes]]:
    """Every tree in the file, the row it begins in and its first line, in that order."""
    for row, lines in db.execute("SELECT id, lines FROM batches WHERE begun <> '' ORDER BY id"):
        for line in lines.split(b"\n"):
            place = _PLACE.match(line)
            if place is not None and place[1] == b"1":
                yield place[2].decode("utf-8", "replace"), row, line_of(line)


def tree_lines(db: apsw.Connection, tree: str, *, row: int) -> Iterator[tuple[int, int, bytes]]:
    """A tree's lines from that row on: the row, the place in the tree's order, the line."""
    for at, lines in db.execute("SELECT id, lines FROM batches WHERE id >= ? ORDER BY id", (row,)):
        for seq, line in _lines_of(db, tree, lines):
            yield at, seq, line


def last_line(db: apsw.Connection, tree: str, *, row: int) -> tuple[int, bytes] | None:
    """A tree's newest line and its row, looked for from the end: trees that are looked at are mostly new ones."""
    for at, lines in db.execute("SELECT id, lines FROM batches WHERE id >= ? ORDER BY id DESC", (row,)):
        found = _lines_of(db, tree, lines)
        if found:
            return at, found[-1][1]
    return None


def all_lines(db: apsw.Connection) -> Iterator[bytes]:
    """Every line there is, of whatever tree, in the order they were written."""
    for (lines,) in db.execute("SELECT lines FROM batches ORDER BY id"):
        yield from map(line_of, lines.split(b"\n"))


def last_lines(db: apsw.Connection) -> dict[str, bytes]:
    """The newest line of every tree in the file."""
    found: dict[str, bytes] = {}
    for line in all_lines(db):
        place = _PLACE.match(line)
        if place is not None:
            found[place[2].decode("utf-8", "replace")] = line
    return found


def remove(db: apsw.Connection, gone: frozenset[str]) -> None:
    """Removes all lines of these trees in one transaction and gives their space back. The other rows keep their ids."""
    names = {name.encode() for name in gone}
    with db:
        for (row,) in db.execute("SELECT id FROM batches").fetchall():
            begun, lines = db.execute("SELECT begun, lines FROM batches WHERE id = ?", (row,)).get
            before = lines.split(b"\n")
            after = [line for line in before if (place := _PLACE.match(line)) is None or place[2] not in names]
            if not after:
                db.execute("DELETE FROM batches WHERE id = ?", (row,))
            elif len(after) < len(before):
                left = " ".join(name for name in begun.split() if name not in gone)
                db.execute("UPDATE batches SET begun = ?, lines = ? WHERE id = ?", (left, b"\n".join(after), row))
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _lines_of(db: apsw.Connection, tree: str, lines: bytes) -> list[tuple[int, bytes]]:
    name = tree.encode()
    if b'"tree":"%b"' % name not in lines:
        return []
    found = []
    for line in lines.split(b"\n"):
        place = _PLACE.match(line)
        if place is None:
            raise LogError(f"{db.filename} holds a line that is not an event")
        if place[2] == name:
            found.append((int(place[1]), line_of(line)))
    return found
