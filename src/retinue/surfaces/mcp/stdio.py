"""MCP on stdin and stdout: one message a line, one client, which is there until the input ends.

The two descriptors are taken away from everybody else first: what any library prints goes to stderr, so that the
client reads protocol and nothing else. Threads of their own read and write, so that a pipe that is slow or full holds
up no run.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Iterator

from retinue.concurrency import TaskOwner
from retinue.surfaces.mcp import messages, revisions
from retinue.surfaces.mcp.messages import INVALID_REQUEST, LARGEST, Problem, Request
from retinue.surfaces.mcp.server import Server, Session

CHUNK = 64 * 1024
MOST_WAITING = 1000
LAST_WORDS_SECONDS = 2.0


async def serve(server: Server, stop: asyncio.Event) -> None:
    """Until the client closes its end, or `stop` is set."""
    loop = asyncio.get_running_loop()
    incoming, outgoing = _claim(0, os.open(os.devnull, os.O_RDONLY)), _claim(1, os.dup(2))
    writer = _Writer(outgoing, lambda: loop.call_soon_threadsafe(stop.set))
    front = _Front(server, writer)
    threading.Thread(target=_read, args=(incoming, front, loop, stop), name="retinue-mcp-in", daemon=True).start()
    try:
        await stop.wait()
    finally:
        await front.close()
        writer.close()


def _claim(fd: int, instead: int) -> int:
    """A descriptor of our own for the client; the well-known number is somebody else's from now on."""
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(instead, fd)
    os.close(instead)
    return own


class _Front:
    """The one session of this process, and its requests at work."""

    def __init__(self, server: Server, writer: _Writer) -> None:
        self._server, self._writer = server, writer
        self._session = Session(server, about="stdio")
        self._session.channel = writer
        self._tasks = TaskOwner()

    async def take(self, line: bytes) -> None:
        """One line of the client. Returns at once: requests go on beside each other."""
        try:
            message = messages.read(line)
            if not isinstance(message, Request):
                self._session.heard(message)
            elif message.method == "initialize":
                self._writer.send(self._session.initialize(message))
            else:
                self._tasks.start(self._respond(message))
        except Problem as problem:
            self._writer.send(messages.error(problem.id, problem))
        self._server.begin()

    def too_long(self) -> None:
        problem = Problem(INVALID_REQUEST, f"a message is larger than {LARGEST} bytes")
        self._writer.send(messages.error(None, problem))

    async def _respond(self, request: Request) -> None:
        session = self._session
        try:
            client = revisions.enveloped(request) if revisions.is_enveloped(request) else session.client
            if client is None and request.method != "ping":
                raise Problem(INVALID_REQUEST, "the first request is 'initialize', or has the envelope of 2026-07-28")
            answer = await session.answer(request, client or revisions.NOBODY, self._writer)
        except Problem as problem:
            answer = messages.error(request.id, problem)
        self._writer.send(answer)

    async def close(self) -> None:
        """What was asked before the input ended is still answered, unless that is subagents' work."""
        if not self._session.at_work():
            await self._tasks.wait(LAST_WORDS_SECONDS)
        await self._session.close()
        await self._tasks.close(None)


def _read(fd: int, front: _Front, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """A thread: hands over one line after the other, each when the one before is taken."""
    try:
        for line in _lines(fd):
            if line is None:
                loop.call_soon_threadsafe(front.too_long)
            elif line.strip():
                asyncio.run_coroutine_threadsafe(front.take(line), loop).result()
        loop.call_soon_threadsafe(stop.set)
    except RuntimeError:
        pass  # the loop is closed: it was told to stop while we read


def _lines(fd: int) -> Iterator[bytes | None]:
    """Lines without their ends; None for one that was too long, of which nothing is kept."""
    kept, skipping = bytearray(), False
    while chunk := _chunk(fd):
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield None if skipping or len(kept) + len(end) > LARGEST else bytes(kept + end)
            kept, skipping = bytearray(), False
        skipping = skipping or len(kept) + len(rest) > LARGEST
        kept = bytearray() if skipping else kept + rest
    if kept:
        yield bytes(kept)


def _chunk(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK)
    except OSError:
        return b""


class _Writer:
    """Puts messages on lines, in order. Notifications to a client that does not read are dropped, answers are kept."""

    open = True

    def __init__(self, fd: int, gone: Callable[[], object]) -> None:
        self._fd, self._gone = fd, gone
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="retinue-mcp-out", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        if self._waiting.qsize() < MOST_WAITING or b'"id":' in message[:30]:
            self._waiting.put(message)

    def _write(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                view = memoryview(message + b"\n")
                while view:
                    view = view[os.write(self._fd, view) :]
        except OSError:  # nobody reads us any more
            self._gone()

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(LAST_WORDS_SECONDS)
