"""Checks that the end of a tree leaves nothing: processes, control groups, containers, mounts, sockets, temporary
files."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retinue.sandbox.container import find_engine
from tests.sandbox.crash_scenes import containers, remains

SECONDS = 100.0


@contextmanager
def nothing_left(runtime: str, *, own_folder: bool = True) -> Iterator[None]:
    """Fails when something is left for more than 10 s. Meanwhile this process has a folder of its own for temporary
    files, since others make theirs in the usual one. (Not where a user's home is made in it: podman is slow to end
    containers when the paths of its sockets grow too long.)"""
    folder = Path(tempfile.mkdtemp(prefix="retinue-left-"))
    folder.chmod(0o755)
    kept = tempfile.tempdir
    if own_folder:
        tempfile.tempdir = str(folder)
    had_sockets, had_mounts = _sockets(), _mounts()
    deadline, pause = time.monotonic(), threading.Event()
    try:
        yield
        deadline = time.monotonic() + SECONDS
        while found := _left(runtime, folder, had_sockets, had_mounts):
            assert time.monotonic() < deadline, found
            pause.wait(0.05)
    finally:
        tempfile.tempdir = kept
        shutil.rmtree(folder)


def _left(runtime: str, folder: Path, had_sockets: set[str], had_mounts: set[str]) -> list[str]:
    found = [*remains(), *sorted(_sockets() - had_sockets), *_files(folder)]
    found += _ours(_mounts() - had_mounts, folder, by_engine=runtime == "container")
    return found + (containers() if runtime == "container" else [])


def _files(folder: Path) -> list[str]:
    """All that is below. Some of it may go meanwhile, which `walk` bears and `rglob` does not."""
    return [os.path.join(above, name) for above, folders, files in os.walk(folder) for name in (*folders, *files)]


def _sockets() -> set[str]:
    """Return the sockets that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def _mounts() -> set[str]:
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def _ours(mounts: set[str], folder: Path, *, by_engine: bool) -> list[str]:
    """Return the new mounts of our folders and of removed containers. Other programs have containers too."""
    found = [path for path in mounts if path.startswith(f"{folder}/") or "/retinue" in path]
    stored = [path for path in mounts if "/overlay-containers/" in path or path.endswith("/merged")]
    if not (by_engine and stored):
        return found
    known = find_engine().call("ps", "--all", "--quiet", "--no-trunc").stdout + find_engine().call("mount").stdout
    return found + [path for path in stored if path not in known and Path(path).parts[-3] not in known]
