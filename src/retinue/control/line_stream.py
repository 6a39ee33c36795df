"""Sends the lines of a stream command, such as a watch, over one connection.

A peer that reads slowly holds up nobody but itself. One that takes nothing for too long is dropped; a watcher then
comes back with `after=` the last event it has seen. An empty line is a heartbeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

from retinue.concurrency import run_until_first
from retinue.core.errors import RetinueError
from retinue.http.server import ServerConnection

HEARTBEAT_SECONDS = 5.0
STUCK_SECONDS = 30.0
BUFFERED_BYTES = 64 * 1024
LINES_PER_TURN = 64


async def send_lines(lines: AsyncIterator[bytes], connection: ServerConnection) -> None:
    """Send the whole response. Returns when there are no more lines, or the peer is gone."""
    connection.start_response(200, {"Content-Type": "application/x-ndjson"})
    with suppress(OSError, RetinueError):  # the peer is gone or stuck, or the lines end: it sees an unfinished response
        await run_until_first(
            [_write_lines(lines, connection), _send_heartbeats(connection), connection.wait_for_peer()]
        )


async def _write_lines(lines: AsyncIterator[bytes], connection: ServerConnection) -> None:
    written = 0
    async with aclosing(lines):  # type: ignore[type-var]
        async for line in lines:
            connection.send_chunk(line + b"\n")
            written += 1
            if connection.unsent_bytes > BUFFERED_BYTES:
                async with asyncio.timeout(STUCK_SECONDS):
                    await connection.drain()
            elif written % LINES_PER_TURN == 0:
                await asyncio.sleep(0)  # runs get their turn while a fast peer reads a long history
    connection.end_response()


async def _send_heartbeats(connection: ServerConnection) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        if not connection.unsent_bytes:
            connection.send_chunk(b"\n")
