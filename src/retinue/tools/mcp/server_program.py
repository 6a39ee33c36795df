"""A stdio server: a program in its own session that speaks MCP in lines and is ended with everything it has started.

Replaces the SDK's stdio transport, which has no limit for a line, closes the connection at one invalid byte, and
leaves processes behind. Entered and left by the task that owns the connection.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
from mcp.shared.message import SessionMessage

from retinue.core.errors import RetinueError
from retinue.processes.group import Guard, ProcessGroup, exit_code, start_group, wait_until
from retinue.tools.mcp.server_messages import MAX_MESSAGE_BYTES, explain_excess, parse_server_message
from retinue.tools.mcp.server_output import ServerOutput
from retinue.tools.mcp.server_text import describe_server_error, to_line

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

CHUNK = 64 * 1024
MAX_GARBAGE_BEFORE, MAX_GARBAGE = 5, 50
LEAVE_SECONDS = 2.0
TERM_SECONDS = 2.0
EXIT_SECONDS = 1.0


class ServerProgram:
    """One start of a server. `on_over` is called once, with the reason why the server can no longer be reached."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        output: ServerOutput,
        on_over: Callable[[str], None],
    ) -> None:
        self._argv, self._cwd, self._env = list(argv), cwd, dict(env)
        self._output = output
        self._on_over = on_over
        self._garbage: list[str] = []
        self._has_spoken = False
        self._leaving = self._over = self._drained = False

    @property
    def trouble(self) -> str:
        """The server's output that was not MCP and its last lines, to explain to a person why there is no answer."""
        parts = [f"it prints what is not MCP on stdout: {self._garbage[0]!r}"] if self._garbage else []
        if last := self._output.last_lines:
            parts.append(f"it said: {last}")
        return "; ".join(parts)

    @asynccontextmanager
    async def open_streams(self) -> AsyncIterator[TransportStreams]:
        """Start the program, yield its message streams, and end the program afterwards. Raises StartFailed."""
        group, pipes = self._start()
        try:
            async with AsyncExitStack() as stack:
                stdout, stderr, stdin = await self._connect(stack, pipes)
                to_us, ours = anyio.create_memory_object_stream[SessionMessage | Exception](0)
                theirs, from_us = anyio.create_memory_object_stream[SessionMessage](0)
                async with to_us, ours, theirs, from_us, anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read_messages, group, stdout, to_us)
                    tasks.start_soon(self._copy_stderr, stderr)
                    tasks.start_soon(self._write_messages, stdin, from_us)
                    try:
                        yield ours, theirs
                    finally:
                        self._leaving = True
                        with anyio.CancelScope(shield=True):
                            ours.close()  # so that the reader only drains from now on
                            stdin.close()
                            await group.end(leave=0 if self._over else LEAVE_SECONDS, term=TERM_SECONDS)
                        tasks.cancel_scope.cancel()
        finally:
            group.kill()  # does nothing unless `end` was hurried, or the event loop is being torn down

    def _start(self) -> tuple[ProcessGroup, tuple[int, int, int]]:
        ends = [os.pipe() for _ in range(3)]
        (in_read, in_write), (out_read, out_write), (err_read, err_write) = ends
        try:
            group = start_group(
                self._argv,
                cwd=self._cwd,
                env=self._env,
                stdin=in_read,
                stdout=out_write,
                stderr=err_write,
                guard=Guard(leave=3, term=2),
            )
        except (OSError, ValueError) as error:
            for fd in (in_write, out_read, err_read):
                os.close(fd)
            what = getattr(error, "strerror", None) or describe_server_error(error)
            if not os.path.isdir(self._cwd):  # noqa: PTH112 - only for the error text
                what = f"there is no folder {self._cwd}"
            raise StartFailed(f"cannot start {self._argv[0]!r}: {what}") from None
        finally:
            for fd in (in_read, out_write, err_write):
                os.close(fd)
        return group, (out_read, err_read, in_write)

    async def _connect(
        self, stack: AsyncExitStack, pipes: tuple[int, int, int]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        files = [stack.enter_context(os.fdopen(fd, "rb" if at < 2 else "wb", 0)) for at, fd in enumerate(pipes)]
        readers = []
        for file in files[:2]:
            reader = asyncio.StreamReader(CHUNK)
            transport, _ = await loop.connect_read_pipe(
                lambda reader=reader: asyncio.StreamReaderProtocol(reader),  # type: ignore[misc]
                file,
            )
            stack.callback(transport.close)
            readers.append(reader)
        writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, files[2])
        stack.callback(writing.close)
        return readers[0], readers[1], asyncio.StreamWriter(writing, protocol, None, loop)

    async def _read_messages(self, group: ProcessGroup, stdout: asyncio.StreamReader, to_us: Any) -> None:
        """Read lines of up to `MAX_MESSAGE_BYTES`. A line that is not a message is noted and skipped."""
        buffer = bytearray()
        why = ""
        async with to_us:
            while not why and (chunk := await stdout.read(CHUNK)):
                if not buffer and chunk.isspace():
                    continue  # line after line would take the event loop's time
                *lines, rest = chunk.split(b"\n")
                for piece in lines:
                    buffer += piece
                    why = why or await self._handle_line(bytes(buffer), to_us)
                    buffer.clear()
                buffer += rest
                if len(buffer) > MAX_MESSAGE_BYTES:
                    why = f"it printed a line of more than {MAX_MESSAGE_BYTES // 1024 // 1024} MiB"
            self._over = True
            if not self._leaving:
                self._on_over(why or await self._describe_end(group))
        while await stdout.read(CHUNK):  # drain the pipe, so that no process blocks on it
            pass

    async def _handle_line(self, line: bytes, to_us: Any) -> str:
        """Pass a message on. Return why the connection cannot continue, or "" if it can."""
        if not line or line.isspace():
            return ""
        if why := explain_excess(line):
            return why
        message = parse_server_message(line)
        if message is None:
            shown = to_line(line[:400].decode("utf-8", "replace"), 120)
            if b'"jsonrpc"' in line:  # it may be an answer, but nobody knows to which call
                return f"it sent a message that cannot be read: {shown!r}"
            self._garbage.append(shown)
            self._output.add_note(f"on stdout, and not MCP: {shown}")
            if len(self._garbage) >= (MAX_GARBAGE if self._has_spoken else MAX_GARBAGE_BEFORE):
                return f"it prints what is not MCP on stdout: {self._garbage[0]!r}"
            return ""
        self._has_spoken = True
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the connection is being closed
            await to_us.send(SessionMessage(message))
        return ""

    async def _describe_end(self, group: ProcessGroup) -> str:
        await wait_until(lambda: group.process.poll() is not None and self._drained, EXIT_SECONDS)
        code = group.process.poll()
        what = "it closed its stdout" if code is None else f"it ended with exit code {exit_code(code)}"
        return "; ".join(part for part in (what, self.trouble) if part)

    async def _copy_stderr(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(CHUNK):
            self._output.add_output(chunk)
        self._drained = True

    async def _write_messages(self, stdin: asyncio.StreamWriter, from_us: Any) -> None:
        async with from_us:
            with suppress(OSError):  # the reader reports that the server is gone
                async for each in from_us:
                    stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await stdin.drain()


class StartFailed(RetinueError):
    """The server cannot be started, and another attempt would not help."""
