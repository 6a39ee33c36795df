"""Reaching the process that runs a tree from another one. Commands go through its door; what came of them is read from
the log, like everything else."""

from __future__ import annotations

import os

from retinue.control import address_files as files
from retinue.control.client import DoorClient
from retinue.core.errors import ConfigError
from retinue.core.events import RunEnded
from retinue.core.ports import LogReader
from retinue.log.lookup import FoundRun
from retinue.log.reading import iterate_events
from retinue.surfaces.cli.output import ProjectLog


def find_door(project: ProjectLog, pid: int) -> DoorClient | None:
    """Return a client of the control server of a process; None if the process has none."""
    address = files.find(project.state / "doors", pid)
    return None if address is None else DoorClient(address)


def find_doors(project: ProjectLog) -> list[DoorClient]:
    """Return clients of all control servers of the project."""
    return [DoorClient(address) for address in files.find_all(project.state / "doors")]


async def open_door(project: ProjectLog, tree: str) -> DoorClient | None:
    """Return a client of the process that runs this tree; None if no process runs it, or has no control server."""
    pid = (await project.log.read_status(tree)).writer
    return None if pid is None else find_door(project, pid)


async def reach(project: ProjectLog, found: FoundRun) -> DoorClient | None:
    """Return a client of the process a run lives in; None if the run has ended. ConfigError if nobody can be told."""
    if await find_ending(project.log, found) is not None:
        return None
    pid = (await project.log.read_status(found.tree)).writer
    if pid is None:
        raise ConfigError(f"{found.name} is interrupted, its process gone: retinue resume {found.tree}")
    door = find_door(project, pid)
    if door is None:
        raise ConfigError(f"process {pid}, which runs {found.name}, has no door: it was started with --no-door")
    return door


async def find_ending(log: LogReader, found: FoundRun) -> RunEnded | None:
    """Return how the run has ended, if it has."""
    async for event in iterate_events(log, found.tree):
        if event.run == found.run and isinstance(event.body, RunEnded):
            return event.body
    return None


def who() -> str:
    """Name the person who gives an answer, for the log: this user at this terminal."""
    for fd in (0, 1, 2):
        try:
            return f"user at {os.ttyname(fd).removeprefix('/dev/')}"
        except OSError:
            continue
    return f"user in process {os.getpid()}"
