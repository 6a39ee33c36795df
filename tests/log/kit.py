"""Events for tests of logs, and ways to write them."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

from retinue.core.events import Body, Event, RunEnded, RunSpawned, TurnStarted, Unknown
from retinue.core.ports import Log
from retinue.log.sqlite import SqliteLog


def make_event(
    seq: int, body: Body | Unknown | None = None, *, tree: str = "t1", run: int = 0, at: float = 100.0
) -> Event:
    """Without a body, the beginning of a turn."""
    path = "/main" if run == 0 else f"/main/worker-{run}"
    body = TurnStarted(seq) if body is None else body
    return Event(seq, tree, run, path, "main" if run == 0 else "worker", at, body)


def make_spawned(seq: int = 1, *, tree: str = "t1", run: int = 0, label: str = "main", at: float = 100.0) -> Event:
    parent = None if run == 0 else 0
    body = RunSpawned(parent, label, min(run, 1), "task", f"id-{run}", "/w")
    return make_event(seq, body, tree=tree, run=run, at=at)


def make_ended(seq: int, *, tree: str = "t1", run: int = 0, at: float = 100.0) -> Event:
    return make_event(seq, RunEnded("done", "text", 5), tree=tree, run=run, at=at)


async def write(log: Log, *events: Event) -> None:
    """Append events and wait for the last one."""
    written: Awaitable[None] | None = None
    for event in events:
        written = log.append(event, event is events[-1])
    if written is not None:
        await written


async def fill(log: Log, count: int, *, tree: str = "t1", end: bool = True) -> None:
    """Append a tree of so many events; the last one is its ending, unless `end` is False."""
    log.append(make_spawned(tree=tree))
    for seq in range(2, count):
        log.append(make_event(seq, tree=tree))
    written = log.append(make_ended(count, tree=tree) if end else make_event(count, tree=tree), True)
    if written is not None:
        await written


async def write_files(state: Path, *events: Event) -> None:
    """Write events as a process does that comes, writes and goes."""
    log = SqliteLog(state / "logs")
    for event in events:
        log.append(event)
    await log.close()
