"""Clients of the processes that run trees. Commands go to a process's control server, effects are read from the log."""

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
    """Return a control client of the process `pid`, or None if the process has no control server."""
    address = find_address(project.state / "control", pid)
    return None if address is None else ControlClient(address)


def find_clients(project: ProjectLog) -> list[ControlClient]:
    """Return a control client for each process of the project that has a control server."""
    return [ControlClient(address) for address in find_addresses(project.state / "control")]


async def find_client_of(project: ProjectLog, tree: str) -> ControlClient | None:
    """Return a control client of the process that runs `tree`, or None if there is no process or no control server."""
    pid = (await project.log.read_status(tree)).writer
    return None if pid is None else find_client(project, pid)


async def connect_to_run(project: ProjectLog, found: RunRef) -> ControlClient | None:
    """Return a control client of the process that runs `found`, or None if that run has ended.

    Raises ConfigError if the process is gone or has no control server."""
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
    """Return the RunEnded event of a run, or None if the run has not ended."""
    async for event in iterate_events(log, found.tree):
        if event.run == found.run and isinstance(event.body, RunEnded):
            return event.body
    return None


def describe_user() -> str:
    """Return a name for the user of this process, which the log records as the giver of an answer."""
    for fd in (0, 1, 2):
        try:
            return f"user at {os.ttyname(fd).removeprefix('/dev/')}"
        except OSError:
            continue
    return f"user in process {os.getpid()}"
