"""The log of a state folder: where it is, and how it is opened for reading. The commands that only read load no more
than this; `build` opens it for writing."""

from __future__ import annotations

from pathlib import Path

from retinue.core.errors import ConfigError
from retinue.core.ports import LogReader
from retinue.log.sqlite_reader import SqliteReader

LOGS = "logs"
STATE_FOLDERS = ("", LOGS, "runs", "control", "outbox", "applying")


def open_reader(state: Path) -> LogReader:
    """Open the log of a state folder for reading; the folder need not exist."""
    return SqliteReader(state / LOGS)


def check_state_folder(state: Path) -> Path:
    """Return the state folder, unless it or a folder in it is a link: a clone may have brought one along."""
    for name in STATE_FOLDERS:
        if (state / name).is_symlink():
            raise ConfigError(f"{state / name} is a link, and what is kept there would be wherever it leads: remove it")
    return state
