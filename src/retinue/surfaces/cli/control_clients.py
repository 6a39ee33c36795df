"""Clients of the process that runs a tree. Commands go to its control server; their effects are read from the log."""

from __future__ import annotations

import os

from retinue.control.address_files import find_address, find_addresses
from retinue.control.client import ControlClient
from retinue.core.errors import ConfigError
from retinue.core.events import RunEnded
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader
from retinue.log.reading import iterate_events
from retinue.surfaces.cli.output import ProjectLog


def find_client(project: ProjectLog, pid: int) -> ControlClient | None:
    """Return a client of a process. None if it has no control server."""
    address = find_address(project.state / "control", pid)
    return None if address is None else ControlClient(address)


def find_clients(project: ProjectLog) -> list[ControlClient]:
    """Return clients of all processes of the project with a control server."""
    return [ControlClient(address) for address in find_addresses(project.state / "control")]


async def find_client_of(project: ProjectLog, tree: str) -> ControlClient | None:
    """Return a client of the process that runs this tree. None if no process does, or it has no control server."""
    pid = (await project.log.read_status(tree)).writer
    return None if pid is None else find_client(project, pid)


async def reach(project: ProjectLog, found: RunRef) -> ControlClient | None:
    """Return a client of the process that runs a run. None if the run has ended; ConfigError if there is no client."""
    if await find_ending(project.log, found) is not None:
        return None
    pid = (await project.log.read_status(found.tree)).writer
    if pid is None:
        raise ConfigError(f"{found.name} was interrupted, its process is gone: retinue resume {found.tree}")
    client = find_client(project, pid)
    if client is None:
        raise ConfigError(
            f"process {pid} runs {found.name} and has no control server: it was started with --no-control"
        )
    return client


async def find_ending(log: LogReader, found: RunRef) -> RunEnded | None:
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
