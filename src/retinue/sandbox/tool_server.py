"""The tool server: the process inside a sandbox that runs the file, shell and code calls of one run for the host.

The host starts it with the frames on stdin and stdout. The tool server imports little, holds no keys and no
conversation, and reaches the network only through the host's proxy, if at all. First of all it limits its own
resources. It keeps no timeouts: the host says when the time of a call is up.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retinue.concurrency import TaskOwner
from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES, ResourceLimits
from retinue.core.messages import Call
from retinue.core.network import PROXY_VARIABLE
from retinue.core.ports import LocalTool, Outcome, ProgramCallResult
from retinue.protocol import tool_server as frames
from retinue.sandbox.byte_streams import copy_bytes
from retinue.sandbox.channel import FrameChannel
from retinue.sandbox.process_privacy import hide_process
from retinue.tools.live_output import LiveOutput
from retinue.tools.local import make_sandboxed_tool

UMASK = 0o027


def main() -> None:
    """Serve calls forever. The host ends this process and everything it started."""
    hide_process()
    os.umask(UMASK)
    reading, writing = os.dup(0), os.dup(1)  # so that prints, reads and commands cannot touch the frames
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    asyncio.run(ToolServer().serve(reading, writing))


class SandboxFolders:
    """The folders named by the host. Text that does not fit inline goes to the run's own outputs folder."""

    def __init__(self, start: frames.Start) -> None:
        self.workspace = Path(start.workspace)
        self.roots: Sequence[Path] = tuple(map(Path, start.roots))
        self.search_roots: Sequence[Path] = tuple(map(Path, start.search_roots))
        self.hidden_paths: Sequence[str] = start.hidden_paths
        self.granted_paths: Sequence[str] = tuple(pin.path for pin in start.pinned)
        self._outputs = Path(start.outputs)
        self._spilled = start.spilled

    def spill(self, name: str) -> Path:
        self._spilled += 1
        return self._outputs / f"{self._spilled:03d}-{name}"


def check_pins(pinned: Sequence[frames.Pin]) -> bool:
    """Return True if each path shows the file or folder that the host has checked; else say on stderr which does
    not."""
    for pin in pinned:
        try:
            status = Path(pin.path).stat()
        except OSError:
            status = None
        if status is None or (status.st_dev, status.st_ino) != (pin.device, pin.inode):
            print(f"{pin.path} was replaced while the sandbox was made", file=sys.stderr, flush=True)
            return False
    return True


class _Execution:
    """One running call as its tool sees it. Requests of the tool go to the host."""

    def __init__(self, number: int, server: ToolServer, *, is_timed: bool) -> None:
        self._number, self._server = number, server
        self.is_timed = is_timed
        self.folders = server.folders
        self.path = server.start.path
        self.expiry = asyncio.Event()
        self._asked = 0
        self.waiting: dict[int, asyncio.Future[frames.ToolReturned]] = {}
        self.output = LiveOutput(  # sends the last lines, once the host has read all earlier frames
            lambda text, is_cut: server.channel.send(frames.Output(number, text, is_cut)),
            is_ready=server.channel.is_idle,
            masks=False,
        )
        self.show_output = self.output.feed

    async def wait_for_expiry(self) -> None:
        await self.expiry.wait()

    async def call_tool(self, name: str, args: dict[str, Any]) -> ProgramCallResult:
        self._asked += 1
        number = self._asked
        returned = self.waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._server.channel.send(frames.CallTool(self._number, number, name, args))
            answer = await returned
        finally:
            self.waiting.pop(number, None)
        return ProgramCallResult(answer.value, answer.error, answer.note)


class ToolServer:
    """The server. It runs any number of calls at once."""

    def __init__(self) -> None:
        self.channel: FrameChannel
        self.start: frames.Start
        self.folders: SandboxFolders
        self._started = asyncio.Event()
        self._ready = asyncio.Event()
        self._tools: dict[str, LocalTool] = {}
        self._executions: dict[int, _Execution] = {}
        self._owner = TaskOwner()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, reading: int, writing: int) -> None:
        self.channel = FrameChannel(
            reading, writing, sender="host", on_frame=self._handle_frame, on_end=lambda _: os._exit(1)
        )
        self.channel.send(frames.Hello(frames.VERSION))
        await self._started.wait()
        start = self.start
        set_resource_limits(start.resource_limits, memory=start.limit_memory)
        if start.proxy:
            os.environ[PROXY_VARIABLE] = f"http://127.0.0.1:{await forward_connections(start.proxy)}"
        self._ready.set()
        await asyncio.get_running_loop().create_future()  # wait until the host ends this process and its children

    def _handle_frame(self, frame: frames.FromHost) -> None:
        match frame:
            case frames.Start():
                if frame.version != frames.VERSION or not check_pins(frame.pinned):
                    os._exit(1)
                self.start, self.folders = frame, SandboxFolders(frame)
                self._tools = {name: make_sandboxed_tool(name, frame.program_tools) for name in frame.tools}
                self._started.set()
            case frames.Preview() | frames.CallFrame():
                task = self._owner.start(self._answer(frame))
                self._tasks[frame.id] = task
                task.add_done_callback(lambda _: self._tasks.pop(frame.id, None))
            case frames.Cancel():
                self._cancel(frame)
            case frames.ToolReturned():
                execution = self._executions.get(frame.id)
                waiting = None if execution is None else execution.waiting.get(frame.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(frame)

    def _cancel(self, frame: frames.Cancel) -> None:
        execution = self._executions.get(frame.id)
        if frame.reason == "timeout" and execution is not None and execution.is_timed:
            execution.expiry.set()
        elif frame.id in self._tasks:
            self._tasks[frame.id].cancel()

    async def _answer(self, frame: frames.Preview | frames.CallFrame) -> None:
        call = Call(str(frame.id), frame.name, frame.args)
        try:
            await self._ready.wait()
            tool = self._tools[frame.tool]
            if isinstance(frame, frames.Preview):
                self.channel.send(frames.Previewed(frame.id, tool.preview(call, self.folders)))
            else:
                self.channel.send(frames.Accepted(frame.id))
                await self.channel.flush()
                outcome = await self._execute(frame.id, tool, call)
                folder, _, name = outcome.file.rpartition("/")
                file = name if folder == self.start.outputs else ""
                self.channel.send(frames.ResultFrame(frame.id, outcome.text, outcome.success, file))
        except asyncio.CancelledError:
            self._fail(frame, f"{frame.name} took too long and was stopped.")
        except ToolError as error:
            self._fail(frame, str(error))
        except Exception as error:  # noqa: BLE001 - the boundary to tools: the host tells the model
            self._fail(frame, f"{frame.name} failed: {type(error).__name__}: {error}")

    async def _execute(self, number: int, tool: LocalTool, call: Call) -> Outcome:
        is_timed = tool.time_limit(call) is not None
        self._executions[number] = execution = _Execution(number, self, is_timed=is_timed)
        try:
            return await tool(call, execution)
        finally:
            execution.output.close()  # before the result, because the host accepts no output after it
            del self._executions[number]

    def _fail(self, frame: frames.Preview | frames.CallFrame, text: str) -> None:
        text = text[:INLINE_BYTES]
        if isinstance(frame, frames.Preview):
            self.channel.send(frames.Previewed(frame.id, text, failed=True))
        else:
            self.channel.send(frames.ResultFrame(frame.id, text, success=False))


def set_resource_limits(resource_limits: ResourceLimits, *, memory: bool) -> None:
    """Limit the resources of this process and its children. The limits cannot be raised again."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: resource_limits.processes,
        resource.RLIMIT_CPU: resource_limits.cpu_seconds,
        resource.RLIMIT_FSIZE: resource_limits.file_bytes,
        resource.RLIMIT_NOFILE: resource_limits.open_files,
    }
    if memory:
        limits[resource.RLIMIT_AS] = resource_limits.memory
    for kind, most in limits.items():
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


async def forward_connections(path: str) -> int:
    """Listen on the loopback of our network namespace and forward connections to the proxy's socket. Returns the port.

    Serves programs that cannot connect to a unix socket. Checks nothing: the proxy on the host does."""
    tasks = TaskOwner()

    server = await asyncio.start_server(
        lambda reader, writer: tasks.start(_forward_connection(path, reader, writer)), "127.0.0.1", 0
    )
    port: int = server.sockets[0].getsockname()[1]
    return port


async def _forward_connection(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    proxy_writer = None
    try:
        proxy_reader, proxy_writer = await asyncio.open_unix_connection(path)
        async with TaskOwner() as owner:
            owner.start(copy_bytes(reader, proxy_writer))
            await copy_bytes(proxy_reader, writer)
    except OSError:
        return
    finally:
        for end in (writer, proxy_writer):
            if end is not None:
                end.close()
