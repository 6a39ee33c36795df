"""A watch over the door: one event a line, as it is stored, then live ones, until the tree has ended.

A watcher is a cursor in the log. One who reads slowly is waited for here and nowhere else; one who takes nothing for
too long is dropped, and comes back with `after=` the last place it has seen. An empty line is a heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from retinue.core.events import Delta, Event, encode
from retinue.http.server import HttpError, ServerConnection
from retinue.protocol.control import LONGEST_NAME, encode_delta
from retinue.supervisor.supervisor import Supervisor

BEAT_SECONDS = 5.0
STUCK_SECONDS = 30.0
BUFFERED = 64 * 1024
TURN = 64


async def stream(supervisor: Supervisor, query: dict[str, str], connection: ServerConnection) -> None:
    """Send the whole response. Returns when the tree has ended, or the peer is gone."""
    items = _items(supervisor, query)
    connection.start_response(200, {"Content-Type": "application/x-ndjson"})
    tasks = [
        asyncio.create_task(_write(items, connection)),
        asyncio.create_task(_beat(connection)),
        asyncio.create_task(connection.wait_for_peer()),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _items(supervisor: Supervisor, query: dict[str, str]) -> AsyncIterator[Event | Delta]:
    unknown = set(query) - {"tree", "after", "deltas"}
    if unknown:
        raise HttpError(400, f"unknown parameter {min(unknown)[:LONGEST_NAME]!r}")
    tree, after, deltas = query.get("tree", ""), query.get("after", "0"), query.get("deltas", "0")
    if not tree:
        raise HttpError(400, "the parameter 'tree' is missing")
    if not (after.isascii() and after.isdigit() and len(after) <= 18):
        raise HttpError(400, "'after' must be the number of an event, 0 or more")
    if deltas not in ("0", "1"):
        raise HttpError(400, "'deltas' must be 0 or 1")
    if tree in supervisor.trees:
        return supervisor.watch(tree, after=int(after), deltas=deltas == "1")
    if tree in supervisor.log_of(tree).trees():
        return _stored(supervisor, tree, int(after))
    raise HttpError(404, "there is no such tree here")


async def _stored(supervisor: Supervisor, tree: str, after: int) -> AsyncIterator[Event | Delta]:
    """A tree that nobody here runs: what is written of it is all there will be."""
    for event in supervisor.log_of(tree).read(tree, after=after):
        yield event


async def _write(items: AsyncIterator[Event | Delta], connection: ServerConnection) -> None:
    written = 0
    async with aclosing(items):  # type: ignore[type-var]
        async for item in items:
            line = encode_delta(item) if isinstance(item, Delta) else encode(item)
            connection.send_chunk(line + b"\n")
            written += 1
            if connection.unsent_bytes > BUFFERED:
                async with asyncio.timeout(STUCK_SECONDS):
                    await connection.drain()
            elif written % TURN == 0:
                await asyncio.sleep(0)  # lets runs have their turn while a fast peer reads a long history
    connection.end_response()


async def _beat(connection: ServerConnection) -> None:
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        if not connection.unsent_bytes:
            connection.send_chunk(b"\n")
