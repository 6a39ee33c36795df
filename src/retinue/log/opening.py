"""Opening the log of a state folder: in memory without one, else in SQLite files below it. Each backend is loaded when
it is asked for."""

from __future__ import annotations

from pathlib import Path

from retinue.core.errors import ConfigError
from retinue.core.ports import Log, LogReader

LOGS = "logs"
STATE_FOLDERS = ("", LOGS, "runs", "doors", "outbox", "applying")


def open_log(state: Path | None) -> Log:
    """Open the log for writing, in the event loop whose tasks append to it."""
    if state is None:
        from retinue.log.memory import MemoryLog

        return MemoryLog()
    from retinue.log.sqlite import SqliteLog

    return SqliteLog(check_state_folder(state) / LOGS)


def open_reader(state: Path) -> LogReader:
    """Open the log of a state folder for reading; the folder need not exist."""
    from retinue.log.sqlite_reader import SqliteReader

    return SqliteReader(state / LOGS)


def check_state_folder(state: Path) -> Path:
    """Return the state folder, unless it or a folder in it is a link: a clone may have brought one along."""
    for name in STATE_FOLDERS:
        if (state / name).is_symlink():
            raise ConfigError(f"{state / name} is a link, and what is kept there would be wherever it leads: remove it")
    return state
