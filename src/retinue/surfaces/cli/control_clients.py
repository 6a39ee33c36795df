"""Reaching the process that runs a tree from another one. Commands go through its door; what came of them is read from
the log, like everything else."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from retinue.control import address_files as files
from retinue.control.client import DoorClient
from retinue.core.errors import ConfigError
from retinue.core.events import Event, RunEnded
from retinue.log.archive import Archive, Stored, event_of
from retinue.log.lookup import Found


def doors_of(archive: Archive) -> Path:
    return archive.folder.parent / "doors"


def open_door(archive: Archive, stored: Stored) -> DoorClient | None:
    """The door of the process that runs this tree; None when no process runs it, or it has none."""
    pid = archive.process(stored)
    address = None if pid is None else files.find(doors_of(archive), pid)
    return None if address is None else DoorClient(address)


def reach(archive: Archive, found: Found) -> DoorClient | None:
    """The door behind which a run lives; None when the run has ended. ConfigError when nobody can be told."""
    ended = ending(archive, found)
    if ended is not None:
        return None
    pid = archive.process(found.stored)
    if pid is None:
        raise ConfigError(f"{found.name} is interrupted, its process gone: retinue resume {found.stored.tree}")
    door = open_door(archive, found.stored)
    if door is None:
        raise ConfigError(f"process {pid}, which runs {found.name}, has no door: it was started with --no-door")
    return door


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
