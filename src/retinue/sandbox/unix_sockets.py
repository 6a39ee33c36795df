"""Unix sockets of this machine in folders that a run is shown: to read a folder is not to speak to who listens there.

A mount that is read-only does not keep anybody from connecting, so each socket is covered when a run begins. Those that
are made later, or by who has a network namespace of his own, are not known here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TABLE = Path("/proc/net/unix")
COVER = "/dev/null"


def find_bound_sockets(folders: Sequence[str], hidden: str) -> list[str]:
    """Return the sockets below these folders, which are real paths, and not in what is hidden of them. One that was
    bound by a relative path is looked for in the folders themselves."""
    found = set()
    with suppress(OSError):
        for line in TABLE.read_bytes().splitlines()[1:]:
            name = os.fsdecode(line.split(b" ", 7)[-1]) if line.count(b" ") >= 7 else ""
            if not name or name.startswith(("@", "/proc/")):
                continue
            for path in [name] if name.startswith("/") else [f"{folder}/{name}" for folder in folders]:
                real = os.path.realpath(path)
                shown = any(real.startswith(f"{folder}/") for folder in folders)
                if shown and not real.startswith(f"{hidden}/") and _is_socket(real):
                    found.add(real)
    return sorted(found)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False
