"""Reading and writing file contents: small files up to a limit, open files and pipes in chunks."""

from __future__ import annotations

import os
import select
from collections.abc import Collection, Iterator

from retinue.files.opening import AnyPath, RefusedFile, open_regular_file

CHUNK_BYTES = 1024 * 1024


def read_small_file(
    path: AnyPath,
    limit: int,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
    owners: Collection[int] = (),
    forbidden_mode: int = 0,
) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. `open_regular_file` lists the refused files."""
    fd = open_regular_file(path, dir_fd=dir_fd, follow=follow, owners=owners, forbidden_mode=forbidden_mode)
    try:
        return read_up_to(fd, limit)
    finally:
        os.close(fd)


def read_up_to(fd: int, limit: int) -> bytes:
    """Return the content of an open file. Raises `RefusedFile` ("too_large") above `limit` bytes, also for a growing
    file."""
    if os.fstat(fd).st_size > limit:  # refuses a huge sparse file before reading it
        raise RefusedFile("too_large")
    data = bytearray()
    while len(data) <= limit and (piece := os.read(fd, min(CHUNK_BYTES, limit + 1 - len(data)))):
        data += piece
    if len(data) > limit:
        raise RefusedFile("too_large")
    return bytes(data)


def read_chunks(fd: int) -> Iterator[bytes]:
    """Yield the rest of an open file in chunks."""
    while chunk := os.read(fd, CHUNK_BYTES):
        yield chunk


def read_available(fd: int, limit: int) -> bytes | None:
    """Return the bytes that a pipe, socket or terminal holds now, at most `limit`.

    Returns None if there is no data yet, and b"" at the end or if the other side is gone."""
    try:
        return os.read(fd, limit)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, with as many system calls as needed."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another program made the shared terminal or pipe non-blocking
            waiting = select.poll()
            waiting.register(fd, select.POLLOUT)
            waiting.poll()
