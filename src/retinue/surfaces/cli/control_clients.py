"""Clients of the process that runs a tree. Commands go to its control server; their effects are read from the log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from retinue.control.address_files import find_address
from retinue.control.client import ControlClient
from retinue.core.errors import ConfigError
from retinue.core.events import Event, RunEnded
from retinue.log.archive import Archive, Stored, event_of
from retinue.log.lookup import Found


def control_folder(archive: Archive) -> Path:
    return archive.folder.parent / "control"


def find_client(archive: Archive, stored: Stored) -> ControlClient | None:
    """Return a client of the process that runs this tree. None if no process does, or it has no control server."""
    pid = archive.process(stored)
    address = None if pid is None else find_address(control_folder(archive), pid)
    return None if address is None else ControlClient(address)


def reach(archive: Archive, found: Found) -> ControlClient | None:
    """Return a client of the process that runs a run. None if the run has ended; ConfigError if there is no client."""
    ended = ending(archive, found)
    if ended is not None:
        return None
    pid = archive.process(found.stored)
    if pid is None:
        raise ConfigError(f"{found.name} is interrupted, its process gone: retinue resume {found.stored.tree}")
    client = find_client(archive, found.stored)
    if client is None:
        raise ConfigError(
            f"process {pid} runs {found.name} and has no control server: it was started with --no-control"
        )
    return client


def ending(archive: Archive, found: Found) -> RunEnded | None:
    """How the run has ended, if it has."""
    for event in archive.events(found.stored):
        if event.run == found.run and isinstance(event.body, RunEnded):
            return event.body
    return None


async def wait_for(
    archive: Archive, stored: Stored, matches: Callable[[Event], bool], *, after: int = 0, seconds: float
) -> Event | None:
    """The first such event after that place; None when it does not come in time, or never will."""
    try:
        async with asyncio.timeout(seconds), aclosing(archive.follow(stored, after=after)) as lines:
            async for line in lines:
                event = event_of(line, stored.file)
                if matches(event):
                    return event
    except TimeoutError:
        pass
    return None


def who() -> str:
    """Who gives an answer, for the log: this user at this terminal."""
    for fd in (0, 1, 2):
        try:
            return f"user at {os.ttyname(fd).removeprefix('/dev/')}"
        except OSError:
            continue
    return f"user in process {os.getpid()}"
