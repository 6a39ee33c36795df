"""The machine: Python, this package, SQLite, git, a shell, room on the disk."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from retinue import build
from retinue.surfaces.cli.checkup.check import Check, Look
from retinue.surfaces.cli.main import version

OLDEST_PYTHON = (3, 11)
LITTLE_ROOM = 200 * 1024 * 1024


def checks(look: Look) -> Iterator[Check]:
    new_enough = sys.version_info >= OLDEST_PYTHON
    need = "" if new_enough else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    yield Check("python", "ok" if new_enough else "fail", f"{platform.python_version()} at {sys.executable}", need)
    yield Check("retinue", "ok", f"{version()} at {Path(build.__file__).parents[1]}")
    yield _sqlite()
    yield _git()
    yield _shell()
    yield _disk(look.folder)


def _sqlite() -> Check:
    try:
        import apsw
    except ImportError as error:
        return Check("sqlite", "fail", f"apsw cannot be loaded: {error}", "pip install --force-reinstall apsw")
    return Check("sqlite", "ok", f"{apsw.sqlite_lib_version()} in apsw {apsw.apsw_version()}")


def _git() -> Check:
    found = shutil.which("git")
    if found is None:
        return Check("git", "warn", "not found; runs work, but there is no history to go back to", "install git")
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("git", "warn", f"{found} does not work: {error}", f"run `{found} --version` and see")
    return Check("git", "ok", f"{said.strip()} at {found}")


def _shell() -> Check:
    """What the tool `shell` starts."""
    found = shutil.which("bash") or shutil.which("sh")
    if found is None:
        return Check("shell", "warn", "there is no bash and no sh: the tool `shell` will fail", "install bash")
    return Check("shell", "ok", found)


def _disk(folder: Path) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", "warn", f"{folder}: {error.strerror or error}")
    text = f"{free / 1e9:.1f} GB free" if free > 1e9 else f"{free / 1e6:.0f} MB free"
    if free < LITTLE_ROOM:
        return Check("disk", "warn", f"{text}: a run stops when its log cannot be written", "free space; `retinue gc`")
    return Check("disk", "ok", text)
