"""The log of a state folder: its location, and how to open it for reading. Commands that only read import no more than
this module; `build` opens the log for writing."""

from __future__ import annotations

import os
from pathlib import Path

import apsw

from retinue.core.errors import LogError
from retinue.core.ports import LogReader
from retinue.files.state_owner import adopt_state_folder, verify_state_folder
from retinue.log import locks, schema
from retinue.log.sqlite_reader import SqliteReader

LOGS = "logs"


def open_reader(state: Path) -> LogReader:
    """Open the log of a state folder for reading. The folder need not exist. Raises ConfigError if it does not belong
    to us."""
    verify_state_folder(state)
    return SqliteReader(state / LOGS)


def take_over_state(state: Path) -> None:
    """Make the user the owner of a state folder and all events in it. Raises LogError if a log is unreadable or
    another process is writing it."""
    adopt_state_folder(state)
    for file in SqliteReader(state / LOGS).list_files():
        lock = locks.try_lock(file)
        if lock is None:
            raise LogError(f"{file} is being written by another process: try later")
        try:
            db = schema.open_writer(file)
            try:
                schema.reseal_batches(db)
            finally:
                db.close()
        except apsw.Error as error:
            raise LogError(schema.describe_error(f"cannot take over the log {file}", error)) from None
        finally:
            os.close(lock)
