"""Factories of logs: in memory or durable, observed by telemetry, with a failpoint for crash tests. Also the commands
for what a state folder stores.

Only this module chooses the backend of a log, so a setting for another backend is read here and nowhere else. Commands
that only read import this module, so it imports little at the top.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from retinue.core.errors import ConfigError
from retinue.core.ports import Log, LogReader
from retinue.core.traces import FindOrigin, Telemetry, TraceOrigin, baggage_of, traceparent_of
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.files.opening import RefusedFile
from retinue.files.state_folder import LOG_FOLDER
from retinue.files.state_owner import adopt_state_folder, claim_state_folder, verify_state_folder

if TYPE_CHECKING:
    from retinue.build.parts import Parts
    from retinue.core.control import Control

IGNORE_ALL = b"*\n"
LOG_LIBRARY = "sqlite"


def open_log(state: Path | None) -> Log:
    """Return a log in memory, or the durable log of a state folder. Git is told to ignore the state folder."""
    if state is None:
        from retinue.log.memory import MemoryLog

        return MemoryLog()
    from retinue.log.sqlite import SqliteLog

    claim_state_folder(state)
    _ignore_state(state / ".gitignore")
    return SqliteLog(state / LOG_FOLDER)


def open_log_reader(state: Path) -> LogReader:
    """Open the log of a state folder for reading. The folder need not exist.

    Raises ConfigError if the folder does not belong to the user."""
    from retinue.log.sqlite_reader import SqliteReader

    verify_state_folder(state)
    return SqliteReader(state / LOG_FOLDER)


def open_stored_control(state: Path) -> Control:
    """Return the Control of the stored trees of the project that the state folder is in, whichever process wrote
    them. It starts and steers nothing."""
    from retinue.supervisor.stored_control import StoredControl

    return StoredControl(open_log_reader(state), str(state), project=str(state.parent))


async def take_over_state(state: Path) -> None:
    """Make the user the owner of a state folder and of all events in its log.

    Raises LogError if the log is unreadable or another process is writing it."""
    adopt_state_folder(state)
    await open_log_reader(state).adopt_events()


def list_workspaces(state: Path) -> list[str]:
    """Return the ids of the trees that have a folder, whether or not a log has their events."""
    from retinue.workspaces.run_folders import list_tree_folders

    return list_tree_folders(state)


def are_unchanged_since(state: Path, tree: str, before: float) -> bool:
    """Return True if nothing in the folder of a tree was changed at the time `before` or later. Raises RetinueError if
    a part of the folder cannot be read."""
    from retinue.workspaces.run_folders import is_unchanged_since

    return is_unchanged_since(state, tree, before)


def remove_workspaces(state: Path, tree: str, *, dry_run: bool) -> int:
    """Remove the folder of a tree, with the workspaces of its runs. Return the number of bytes that are free again, or
    would be with `dry_run`. Raises RetinueError if a part of the folder remains."""
    from retinue.workspaces.run_folders import remove_tree_folder

    return remove_tree_folder(state, tree, dry_run=dry_run)


def describe_log_library() -> str:
    """Return the version of LOG_LIBRARY. Raises ConfigError if the library cannot be loaded."""
    try:
        import apsw
    except ImportError as error:
        raise ConfigError(f"apsw cannot be loaded: {error}") from None
    return f"{apsw.sqlite_lib_version()} in apsw {apsw.apsw_version()}"


def _ignore_state(ignore: Path) -> None:
    """Keep the state out of git. A clone may contain another .gitignore or a symlink in this place."""
    try:
        try:
            if read_small_file(ignore, len(IGNORE_ALL)) == IGNORE_ALL:
                return
        except (FileNotFoundError, RefusedFile):
            pass
        replace_file(ignore, IGNORE_ALL)
    except OSError as error:
        raise ConfigError(f"cannot write {ignore}: {error.strerror or error}") from None


def open_observed_log(parts: Parts) -> tuple[Log, FindOrigin | None]:
    """Return the log, observed by telemetry if `parts` ask for it, and the function that finds a new tree's trace."""
    log = _with_failpoint(open_log(parts.state))
    if parts.telemetry:
        from retinue.telemetry.observer import ObservedLog, current_trace
        from retinue.telemetry.providers import is_disabled, make_providers

        if not is_disabled(os.environ):
            wanted = parts.telemetry if isinstance(parts.telemetry, Telemetry) else Telemetry()
            return ObservedLog(log, make_providers(wanted)), current_trace
    return log, _read_environment_trace if parts.traced else None


def is_telemetry_wanted(setting: bool | None) -> bool:
    """Return the setting. If it is unset, return True if the environment names an OpenTelemetry collector."""
    if setting is None and any(name.startswith("OTEL_EXPORTER_") for name in os.environ):
        from retinue.telemetry.providers import is_requested

        return bool(is_requested(os.environ))
    return bool(setting)


def describe_telemetry() -> str:
    """Describe whether the packages for telemetry are installed, and whether the environment names a collector."""
    from retinue.telemetry.providers import is_installed, is_requested, make_telemetry_command

    if not is_installed():
        return f"not installed, and needed only to send spans and metrics; to add it: {make_telemetry_command()}"
    named = "OTEL_EXPORTER_OTLP_ENDPOINT is set" if is_requested(os.environ) else "no collector is named"
    return f"installed; {named}"


def _read_environment_trace() -> TraceOrigin:
    from retinue.protocol.inherited_limits import BAGGAGE, TRACE

    return TraceOrigin(traceparent_of(os.environ.get(TRACE, "")), baggage_of(os.environ.get(BAGGAGE, "")))


def _with_failpoint(log: Log) -> Log:
    """Return the log. In a crash test, return a log that kills this process at the named point."""
    point = os.environ.get("RETINUE_FAILPOINT")
    if not point or point.startswith("outbox_"):  # these are points of the outbox, in `files.failpoints`
        return log
    from retinue.log.forwarding_log import FailingLog

    return FailingLog(log, point)
