"""A control group for each run, if the kernel permits it. It limits the memory and processes of the whole run.

Supports cgroup v1 (one folder per controller) and v2. The name of a group includes the pid of its creator, so that the
next process finds and removes the groups of a killed process.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from retinue.core.limits import ResourceLimits
from retinue.processes.group import is_alive

ROOT = Path("/sys/fs/cgroup")
PREFIX = "retinue-"
REMOVE_SECONDS = 2.0
OUT_OF_MEMORY_CODE = 86  # exit code of a container whose tool server was killed for lack of memory
_numbers = itertools.count(1)


class Group:
    """The folders of one run's group. The first process of the run writes itself into the files `procs`."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders
        self.procs = [str(folder / "cgroup.procs") for folder in folders]

    def count_memory_kills(self) -> int:
        """Return how many processes of the group the kernel has killed for lack of memory."""
        for folder in self._folders:
            for name in ("memory.oom_control", "memory.events"):
                with suppress(OSError):
                    for line in (folder / name).read_text().splitlines():
                        word, _, count = line.partition(" ")
                        if word == "oom_kill":
                            return int(count)
        return 0

    def remove(self) -> bool:
        """Remove the group. Returns False while a process in it is still exiting."""
        for folder in self._folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                return False
        return True

    def remove_soon(self) -> None:
        """Remove the group, waiting up to REMOVE_SECONDS for its last process to exit."""
        deadline, pause = time.monotonic() + REMOVE_SECONDS, threading.Event()
        while not self.remove() and time.monotonic() < deadline:
            pause.wait(0.005)


def find_parent_groups() -> list[Path] | None:
    """Return the folders below which groups for memory and processes can be created, or None.

    Removes the leftover groups of ended processes first."""
    folders = _find_folders()
    if folders is None:
        return None
    remove_leftover_groups(folders)
    try:
        make_group(folders, ResourceLimits()).remove()
    except OSError:
        return None
    return folders


def _find_folders() -> list[Path] | None:
    if (ROOT / "cgroup.controllers").exists():
        with suppress(OSError):
            given = (ROOT / "cgroup.subtree_control").read_text().split()
            if {"memory", "pids"} <= set(given) and os.access(ROOT, os.W_OK):
                return [ROOT]
        return None
    found = {}
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                found[name] = ROOT / name / path.lstrip("/")
    folders = [found[name] for name in ("memory", "pids") if name in found]
    return folders if len(folders) == 2 and all(os.access(folder, os.W_OK) for folder in folders) else None


def make_group(below: list[Path], resource_limits: ResourceLimits) -> Group:
    """Create a group with these limits. If it raises OSError, no group is left."""
    name = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    group = Group([folder / name for folder in below])
    memory = resource_limits.memory
    limits = {"memory.max": memory, "memory.limit_in_bytes": memory, "pids.max": resource_limits.processes}
    try:
        for folder in (parent / name for parent in below):
            folder.mkdir()
            for file, most in limits.items():
                if (folder / file).exists():
                    (folder / file).write_text(str(most))
            for file, most in (("memory.memsw.limit_in_bytes", memory), ("memory.swap.max", 0)):
                with suppress(OSError):  # a kernel that does not count swap
                    if (folder / file).exists():
                        (folder / file).write_text(str(most))
    except OSError:
        group.remove()
        raise
    return group


def remove_leftover_groups(below: list[Path]) -> None:
    """Remove the groups of processes that have ended."""
    for folder in below:
        for left in folder.glob(f"{PREFIX}*"):
            maker = left.name.removeprefix(PREFIX).partition("-")[0]
            if maker.isdecimal() and not is_alive(int(maker)):
                with suppress(OSError):
                    left.rmdir()
