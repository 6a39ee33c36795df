"""The host's end of the connection to one tool server: its calls, the calls that it asks for, and its end.

The tool server is not trusted: it answers calls, and it requests calls from code mode, which pass the same checks as
any call of the run. A protocol error ends the run. If the tool server dies or stops answering, the calls in flight
fail. `tool_server_session.py` starts the tool server and decides whether a lost one is started again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from retinue.concurrency import TaskOwner, retrieve_error
from retinue.core.errors import Failed, Limited, RetinueError, Stop
from retinue.core.limits import CANCEL_ASK_SECONDS, INLINE_BYTES, MIB
from retinue.core.messages import Call
from retinue.core.ports import Execution, ProgramCallResult
from retinue.core.rules import CODE_MODE
from retinue.files.trees import measure_folder
from retinue.protocol import tool_server as frames
from retinue.protocol.frames import ProtocolError
from retinue.sandbox.box import Box
from retinue.sandbox.channel import FrameChannel
from retinue.sandbox.hints import NO_MEMORY
from retinue.sandbox.process import Process

if TYPE_CHECKING:
    from retinue.sandbox.network_proxy import RunProxy

START_SECONDS = 60.0
FILE_SECONDS = 600.0  # timeout of calls without their own time limit: a stopped sandbox must not hang a run
LOOK_SECONDS = 1.0
LOOK_SHARE = 20  # measuring the folders takes at most 1/20 of the time
STOP_SECONDS = 2.0
PROGRAM_CALLS = 64
UNWATCHED = "the size of what the run writes could not be watched any more: {error}"
TOO_MANY = ProgramCallResult(error=f"More than {PROGRAM_CALLS} calls of one program at once.")
FILES_TOO_LARGE = "its files are {used} bytes, more than the {most} it may have"


class SandboxLost(Exception):
    """The tool server died or stopped answering. The outcome of the calls in flight is unknown."""

    def __init__(self, why: str, *, out_of_memory: bool = False) -> None:
        super().__init__(why)
        self.out_of_memory = out_of_memory


class CallNotRun(SandboxLost):
    """The tool server was lost before it accepted the call."""


@dataclass(eq=False)
class _Request:
    """A call or preview without an answer yet. `execution` is None for a preview; only calls are accepted."""

    tool: str
    answer: asyncio.Future[Any]
    execution: Execution | None = None
    is_accepted: bool = False
    program_calls: set[asyncio.Task[None]] = field(default_factory=set)


class ToolServerConnection:
    """The connection to one tool server, from its start until all its processes have ended.

    Includes the run's proxy and the task that watches the size of its files. Several calls run at once."""

    def __init__(self, process: Process, box: Box, proxy: RunProxy | None, protections: tuple[str, ...]) -> None:
        self._process, self.box, self.proxy = process, box, proxy
        self._unreported = protections
        self.was_stopped = False  # the tool server was ended by us, not lost
        self._memory_kills = 0
        self._numbers = 0
        self._requests: dict[int, _Request] = {}
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._greeted.add_done_callback(retrieve_error)  # it may never be awaited
        self._tasks = TaskOwner()
        # If the watch fails, end the run: it must not write without a limit.
        self._watch = TaskOwner(on_error=lambda error: self.fail(Failed(UNWATCHED.format(error=error))))
        self._ending: asyncio.Task[None] | None = None
        self.error: Stop | SandboxLost | None = None  # why the connection is unusable
        self._channel = FrameChannel(
            process.reading,
            process.writing,
            sender="server",
            on_frame=self._handle_frame,
            on_end=self._handle_end,
        )

    async def greet(self, start: frames.Start) -> None:
        """Send the start frame and wait for the tool server's hello. Raises RetinueError if none arrives."""
        self._channel.send(start)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._greeted
        except TimeoutError:
            raise RetinueError("the tool server did not start in time") from None
        except SandboxLost as lost:
            raise RetinueError(f"the tool server did not start: {lost}") from None
        if self.proxy is not None:
            self.proxy.unlink_socket()
        self._watch.start(self._watch_size())

    async def preview(self, tool: str, call: Call) -> frames.Previewed:
        number, request = self._open_request(tool, None)
        try:
            self._channel.send(frames.Preview(number, tool, call.name, call.args))
            answer: frames.Previewed = await asyncio.wait_for(asyncio.shield(request.answer), CANCEL_ASK_SECONDS)
            return answer
        except TimeoutError:
            lost = SandboxLost("it did not answer")
            self.fail(lost)
            raise lost from None

    async def execute(self, tool: str, call: Call, execution: Execution, *, is_timed: bool) -> frames.ResultFrame:
        """Run a call in the sandbox, with the timeout kept here on the host.

        At the timeout, the tool server gets CANCEL_ASK_SECONDS to answer with a partial result; otherwise it is
        killed. Raises SandboxLost, or CallNotRun if the call certainly had no effect."""
        number, request = self._open_request(tool, execution)
        expiry = self._tasks.start(execution.wait_for_expiry())
        try:
            self._channel.send(frames.CallFrame(number, tool, call.name, call.args))
            seconds = None if is_timed else FILE_SECONDS
            await asyncio.wait((request.answer, expiry), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not request.answer.done():
                self._channel.send(frames.Cancel(number, "timeout"))
                await asyncio.wait((request.answer,), timeout=CANCEL_ASK_SECONDS)
            if not request.answer.done():
                self.fail(SandboxLost("it did not answer at the end of a call's time"))
            answer: frames.ResultFrame = await request.answer
            return answer
        except SandboxLost as lost:
            if request.is_accepted or not self._channel.is_read_out:
                raise
            raise CallNotRun(str(lost), out_of_memory=lost.out_of_memory) from None
        except asyncio.CancelledError:
            self._channel.send(frames.Cancel(number, "stop"))
            await self.stop(request.answer)
            raise
        finally:
            left = {expiry, *request.program_calls}
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=STOP_SECONDS)

    def fail(self, error: Stop | SandboxLost | None) -> None:
        """End the tool server and fail all calls with `error`. If `error` is None, the error says how the process
        ended."""
        if error is not None:
            self._fail(error)
        if self._ending is None:
            self._ending = self._tasks.start(self._end_process())

    async def stop(self, answer: asyncio.Future[Any] | None = None) -> None:
        """End the tool server and all its processes: at once, or after some time for `answer` to arrive.

        The size of its files is watched until the end."""
        self.was_stopped |= self.error is None
        try:
            await self._process.stop(answer)
        finally:
            self._watch.cancel()
            self._channel.close()
            self._fail(SandboxLost("it was stopped"))
            if self.proxy is not None:
                await self.proxy.close()

    def take_protections(self) -> tuple[str, ...]:
        """Return the protections of the sandbox for the first call that reports them, else nothing."""
        protections, self._unreported = self._unreported, ()
        return protections

    def find_memory_hint(self) -> str:
        """Return a hint if the kernel has killed a process for lack of memory since the last call, or ""."""
        before, self._memory_kills = self._memory_kills, self._process.count_memory_kills()
        return NO_MEMORY.format(mib=self.box.resource_limits.memory // MIB) if self._memory_kills > before else ""

    async def _watch_size(self) -> None:
        """End the run when its files exceed the size limit."""
        box, loop, pause = self.box, asyncio.get_running_loop(), LOOK_SECONDS
        folders = (*([box.workspace] if box.own_workspace else []), box.outputs)
        while True:
            await asyncio.sleep(pause)
            before = loop.time()
            used = await asyncio.to_thread(lambda: sum(map(measure_folder, folders)))
            if used > box.resource_limits.workspace_bytes:
                self.fail(Limited(FILES_TOO_LARGE.format(used=used, most=box.resource_limits.workspace_bytes)))
                return
            pause = max(LOOK_SECONDS, LOOK_SHARE * (loop.time() - before))

    def _open_request(self, tool: str, execution: Execution | None) -> tuple[int, _Request]:
        """Create a request that waits for its answer. Returns its number and the request."""
        if self.error is not None:
            raise self.error
        answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(retrieve_error)  # it may never be awaited
        self._numbers += 1
        request = self._requests[self._numbers] = _Request(tool, answer, execution)
        return self._numbers, request

    def _handle_end(self, error: ProtocolError | None) -> None:
        self.fail(None if error is None else Failed(f"the tool server broke the protocol: {error}"))

    async def _end_process(self) -> None:
        """End the process, then fail all calls with the reason of its end, which is known only then."""
        process = self._process
        await process.stop()
        self._channel.close()
        said = f" ({process.stderr_tail})" if process.stderr_tail else ""
        self._fail(SandboxLost(process.why + said, out_of_memory=process.is_out_of_memory))

    def _fail(self, error: Stop | SandboxLost) -> None:
        if self.error is None:
            self.error = error
            for waiting in (self._greeted, *(request.answer for request in self._requests.values())):
                if not waiting.done():
                    waiting.set_exception(error)

    # Frames of the tool server

    def _handle_frame(self, frame: frames.FromServer) -> None:
        if not self._greeted.done():
            if not isinstance(frame, frames.Hello):
                raise ProtocolError("it did not say which version it speaks")
            _require(frame.version == frames.VERSION, f"it speaks version {frame.version}, and we {frames.VERSION}")
            self._greeted.set_result(None)
            return
        if isinstance(frame, frames.Hello):
            raise ProtocolError("a second hello")
        request = self._requests.get(frame.id)
        if request is None or request.answer.done():
            raise ProtocolError(f"an answer to a call that nobody made: {frame.id}")
        match frame:
            case frames.ResultFrame():
                _require(request.execution is not None, "a result of a preview")
                _require(len(frame.text) <= 2 * INLINE_BYTES, "a result that is too long")
                is_name = not set(frame.file) & {"/", "\0"} and frame.file not in (".", "..")
                _require(is_name, "a result in a file that is not its own")
                self._requests.pop(frame.id).answer.set_result(frame)
            case frames.Previewed():
                _require(request.execution is None, "a preview of a call that runs")
                self._requests.pop(frame.id).answer.set_result(frame)
            case frames.Accepted():
                _require(request.execution is not None and not request.is_accepted, "a call accepted out of turn")
                request.is_accepted = True
            case frames.Output():
                _require(request.is_accepted and len(frame.text) <= frames.OUTPUT_BYTES, "output of no call")
                assert request.execution is not None
                request.execution.show_output(frame.text.encode("utf-8", "replace"), is_cut=frame.is_cut)
            case frames.CallTool():
                _require(request.is_accepted and request.tool == CODE_MODE, f"a call within {request.tool!r}")
                self._serve_program(request, frame)

    def _serve_program(self, request: _Request, frame: frames.CallTool) -> None:
        if len(request.program_calls) >= PROGRAM_CALLS:
            self._channel.send(frames.ToolReturned(frame.id, frame.number, TOO_MANY.value, TOO_MANY.error))
            return
        assert request.execution is not None
        task = self._tasks.start(self._call_tool(request, request.execution, frame))
        request.program_calls.add(task)
        task.add_done_callback(request.program_calls.discard)

    async def _call_tool(self, request: _Request, execution: Execution, frame: frames.CallTool) -> None:
        try:
            made = await execution.call_tool(frame.name, frame.args)
        except Exception as error:  # noqa: BLE001 - an error that ends the run is not for the program
            if not request.answer.done():
                request.answer.set_exception(error)
            return
        self._channel.send(
            frames.ToolReturned(frame.id, frame.number, value=made.value, error=made.error, note=made.note)
        )


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ProtocolError(what)
