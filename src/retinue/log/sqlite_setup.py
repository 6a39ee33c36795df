"""The setup of the SQLite log: its library and its folder. Needs no working library, so that `retinue doctor` can
report a broken one."""

from __future__ import annotations

from pathlib import Path

from retinue.core.errors import ConfigError

LIBRARY = "sqlite"


def describe_library() -> str:
    """Return the versions of the library. Raises ConfigError if the library cannot be loaded."""
    try:
        import apsw
    except ImportError as error:
        raise ConfigError(f"apsw cannot be loaded: {error}") from None
    return f"{apsw.sqlite_lib_version()} in apsw {apsw.apsw_version()}"


def has_folder(folder: Path) -> bool:
    """Return True if the folder of a log exists, perhaps without any file."""
    return folder.is_dir()
