"""The log of a state folder: where it is, and how it is opened for reading. The commands that only read load no more
than this; `build` opens it for writing."""

from __future__ import annotations

from pathlib import Path

from retinue.core.ports import LogReader
from retinue.files.state_owner import verify_state_folder
from retinue.log.sqlite_reader import SqliteReader

LOGS = "logs"


def open_reader(state: Path) -> LogReader:
    """Open the log of a state folder for reading; the folder need not exist. Raises ConfigError if it is not ours."""
    verify_state_folder(state)
    return SqliteReader(state / LOGS)
