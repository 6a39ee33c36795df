"""MCP on stdin and stdout: one message per line, one client, until the input ends.

The server first takes both descriptors away from all other code. Output that a library prints then goes to stderr, and
the client reads only the protocol. Threads read and write, so a slow or full pipe blocks no run.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from retinue.concurrency import TaskOwner
from retinue.core.errors import OutputFailed
from retinue.files.content import write_all
from retinue.surfaces.mcp import messages, revisions
from retinue.surfaces.mcp.messages import MAX_MESSAGE_BYTES, ErrorCode, RpcError, RpcRequest
from retinue.surfaces.mcp.server import Server, Session

CHUNK = 64 * 1024
MAX_WAITING = 1000
GRACE_SECONDS = 2.0


async def serve_stdio(server: Server, stop: asyncio.Event) -> None:
    """Serve until the client closes the input or `stop` is set. Raises OutputFailed if stdout cannot be written."""
    loop = asyncio.get_running_loop()
    incoming, outgoing = _claim_descriptor(0, os.open(os.devnull, os.O_RDONLY)), _claim_descriptor(1, os.dup(2))
    writer = _Writer(outgoing, lambda: loop.call_soon_threadsafe(stop.set))
    session = StdioSession(server, writer)
    threading.Thread(
        target=_read_lines, args=(incoming, session, loop, stop), name="retinue-mcp-in", daemon=True
    ).start()
    try:
        await stop.wait()
    finally:
        await session.close()
        writer.close()
    if writer.failure is not None:
        raise OutputFailed(writer.failure)


def _claim_descriptor(fd: int, instead: int) -> int:
    """Return a private duplicate of `fd` for the client, and let `fd` itself refer to `instead` from now on."""
    own = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.dup2(instead, fd)
    os.close(instead)
    return own


class StdioSession(Session):
    """The session of this process's only client, and its running requests."""

    def __init__(self, server: Server, writer: _Writer) -> None:
        super().__init__(server, about="stdio", channel=writer)
        self._writer = writer
        self._tasks = TaskOwner()

    async def handle_line(self, line: bytes) -> None:
        """Handle one line without waiting for its answer: requests run concurrently. Only `initialize` is awaited."""
        try:
            message = messages.parse_message(line)
        except RpcError as error:
            self._writer.send(messages.encode_error(error.id, error))
        else:
            if not isinstance(message, RpcRequest):
                self.handle_message(message)
            elif message.method == "initialize":  # the next line may depend on it
                await self._send_answer(message)
            else:
                self._tasks.start(self._send_answer(message))
        self.server.start_loading()

    def refuse_long_line(self) -> None:
        error = RpcError(ErrorCode.INVALID_REQUEST, f"a message is larger than {MAX_MESSAGE_BYTES} bytes")
        self._writer.send(messages.encode_error(None, error))

    async def _send_answer(self, request: RpcRequest) -> None:
        try:
            if request.method == "initialize":
                answer = self.initialize(request)
            else:
                client = revisions.read_envelope(request) if revisions.is_enveloped(request) else self.client
                if client is None and request.method != "ping":
                    text = "the first request is 'initialize', or has the envelope of 2026-07-28"
                    raise RpcError(ErrorCode.INVALID_REQUEST, text)
                answer = await self.answer(request, client or revisions.UNKNOWN_CLIENT, self._writer)
        except RpcError as error:
            answer = messages.encode_error(request.id, error)
        self._writer.send(answer)

    async def close(self) -> None:
        """Answer the requests that arrived before the input ended, unless subagents are running, and end the
        session."""
        if not self.has_running_subagents():
            await self._tasks.wait(GRACE_SECONDS)
        await super().close()
        await self._tasks.close(None)


def _read_lines(fd: int, session: StdioSession, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Pass lines to the session one at a time, from a thread. Each line waits until the previous line is handled."""
    try:
        for line in _split_lines(fd):
            if line is None:
                loop.call_soon_threadsafe(session.refuse_long_line)
            elif line.strip():
                asyncio.run_coroutine_threadsafe(session.handle_line(line), loop).result()
        loop.call_soon_threadsafe(stop.set)
    except RuntimeError:
        pass  # the event loop was closed while we read


def _split_lines(fd: int) -> Iterator[bytes | None]:
    """Yield lines without their ends, and None for a line that is too long."""
    kept, skipping = bytearray(), False
    with suppress(OSError):  # a terminal that is gone also ends the input
        while chunk := os.read(fd, CHUNK):
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                yield None if skipping or len(kept) + len(end) > MAX_MESSAGE_BYTES else bytes(kept + end)
                kept, skipping = bytearray(), False
            skipping = skipping or len(kept) + len(rest) > MAX_MESSAGE_BYTES
            kept = bytearray() if skipping else kept + rest
    if kept:
        yield bytes(kept)


class _Writer:
    """A thread that writes messages in order. If the client does not read, it drops notifications and keeps
    answers."""

    is_open = True
    failure: OSError | None = None

    def __init__(self, fd: int, gone: Callable[[], object]) -> None:
        self._fd, self._gone = fd, gone
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="retinue-mcp-out", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        if self._waiting.qsize() < MAX_WAITING or b'"id":' in message[:30]:
            self._waiting.put(message)

    def _write(self) -> None:
        try:
            while (message := self._waiting.get()) is not None:
                write_all(self._fd, message + b"\n")
        except OSError as error:
            if not isinstance(error, BrokenPipeError):  # a broken pipe only means that the client is gone
                self.failure = error
            self._gone()

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(GRACE_SECONDS)
