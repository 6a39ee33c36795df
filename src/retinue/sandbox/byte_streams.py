"""Copying of bytes between the streams of a proxied connection, on both sides of a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHUNK_BYTES = 64 * 1024


async def copy_bytes(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    limit: int | None = None,
    on_data: Callable[[], object] = lambda: None,
) -> None:
    """Copy bytes from `reader` to `writer`: all of them, and then the end; or up to `limit`. `on_data` is called for
    each piece. A connection that breaks ends the copying."""
    try:
        while limit is None or limit > 0:
            data = await reader.read(CHUNK_BYTES if limit is None else min(CHUNK_BYTES, limit))
            if not data:
                break
            on_data()
            writer.write(data)
            await writer.drain()
            limit = None if limit is None else limit - len(data)
        if limit is None and writer.can_write_eof():
            writer.write_eof()
    except OSError:
        return
