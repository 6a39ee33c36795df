"""What a log file looks like inside, and how one is opened. SQL lives here, in the writer and in the archive."""

from __future__ import annotations

import os
from pathlib import Path

import apsw

from retinue.core.errors import LogError

APPLICATION_ID = 0x7265746E  # "retn"
VERSION = 1
_CREATE = f"""
CREATE TABLE trees (id INTEGER PRIMARY KEY, name TEXT NOT NULL, first INTEGER NOT NULL) STRICT;
CREATE TABLE events (id INTEGER PRIMARY KEY, tree INTEGER NOT NULL, seq INTEGER NOT NULL, line BLOB NOT NULL) STRICT;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
        for pragma, value in (("journal_mode", "wal"), ("synchronous", "full"), ("wal_autocheckpoint", 4000)):
            db.pragma(pragma, value)
        if not db.execute("SELECT count(*) FROM sqlite_schema").get:
            db.execute("BEGIN IMMEDIATE;" + _CREATE + "COMMIT;")
        check(db, path)
    except OSError as error:
        raise LogError(f"cannot write the log {path}: {error.strerror or error}") from None
    except apsw.Error as error:
        raise LogError(f"cannot open the log {path}: {one_line(error)}") from None
    return db


def open_reader(path: Path) -> apsw.Connection:
    """The file for reading, also while its writer is at work."""
    try:
        db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        db.set_busy_timeout(5000)
        db.execute("PRAGMA query_only = ON")
        check(db, path)
    except apsw.Error as error:
        raise LogError(f"cannot read the log {path}: {one_line(error)}") from None
    return db


def check(db: apsw.Connection, path: Path) -> None:
    application, version = db.pragma("application_id"), db.pragma("user_version")
    if application != APPLICATION_ID:
        raise LogError(f"{path} is not a log of retinue")
    if version > VERSION:
        raise LogError(f"{path} was written by a newer retinue (log version {version}, this one reads {VERSION})")
