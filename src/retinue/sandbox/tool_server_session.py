"""The host's side of sandboxes with a tool server: a sandbox of one kind, the session of a run, and the connection.

A sandbox holds no keys and has no network: hosts that the profile allows are reached through a proxy on the host.
Folders shared with the user are read-only inside; `write` and `edit` calls there run on the host, after approval. The
tool server is not trusted: it answers calls, and it requests calls from code mode, which pass the same checks as any
call of the run. A protocol error ends the run. If the tool server dies or stops answering, the calls in flight fail,
and the next call restarts it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from retinue.concurrency import TaskOwner, retrieve_error, start_task
from retinue.core.errors import Failed, Limited, RetinueError, Stop, ToolError
from retinue.core.events import LOST_SANDBOX_TEXT, UNKNOWN_AFTER_CRASH, RunStarted, Warned
from retinue.core.limits import CANCEL_ASK_SECONDS, INLINE_BYTES, MIB, TERM_SECONDS, ResourceLimits
from retinue.core.messages import Call
from retinue.core.network import Hosts
from retinue.core.plans import Job
from retinue.core.ports import Emit, Execution, Folders, LocalTool, Outcome, ProgramCallResult
from retinue.core.rules import CODE_MODE
from retinue.files.trees import is_public, measure_folder
from retinue.protocol import tool_server as frames
from retinue.protocol.frames import ProtocolError
from retinue.sandbox.box import (
    Box,
    find_closed_paths,
    find_output,
    is_below,
    make_box,
    mask_outputs,
)
from retinue.sandbox.builder import FULL_NETWORK, PROXY, SandboxBuilder
from retinue.sandbox.channel import FrameChannel
from retinue.sandbox.hints import NO_MEMORY, find_offline_hint
from retinue.sandbox.process import REAP_SECONDS, PreparedSandbox, Process
from retinue.tools.local import COMMANDS, EDITING, LOCAL
from retinue.tools.truncate import clean_cut
from retinue.workspaces.run_folders import RunFolders

if TYPE_CHECKING:
    from retinue.sandbox.network_proxy import RunProxy

START_SECONDS = 60.0
FILE_SECONDS = 600.0  # timeout of calls without their own time limit: a stopped sandbox must not hang a run
LOOK_SECONDS = 1.0
LOOK_SHARE = 20  # measuring the folders takes at most 1/20 of the time
STOP_SECONDS = 2.0
RESTARTS = 3
PROGRAM_CALLS = 64
PREVIEW_CHARACTERS = 1024 * 1024
UNWATCHED = "the size of what the run writes could not be watched any more: {error}"
FOREIGN_OBJECTS = (
    "git here reads objects of another repository, which a sandboxed worktree would show to the run: {path}. If it may "
    "see them, add `expose_paths: [{path}]` to retinue.yaml; else use workspace copy"
)
CLOSED_WORKSPACE = (
    "sandboxed runs of root have their own user, which may not read {path}: use workspace worktree or copy, "
    "or `chmod o+rx {path}`"
)
CLOSED = "the sandboxed run has its own user, which may not read {path}: it is left out"
TOO_LARGE = "The arguments of this {name} call are larger than a sandbox can be sent. It was not run."
TOO_MANY = ProgramCallResult(error=f"More than {PROGRAM_CALLS} calls of one program at once.")
NOT_STARTED = "The sandbox could not be started, so this call was not run: {why}"
PREVIEW_LOST = "The sandbox was lost twice while it made the preview of this call, so the call was not run: {why}"
LOST_TOO_OFTEN = "its sandbox was lost {times} times; the last time {why}"
MEMORY_USED = "its memory of {mib} MiB is used up"
FILES_TOO_LARGE = "its files are {used} bytes, more than the {most} it may have"
FROM_SANDBOX = "[as the sandbox shows it]"


class SandboxLost(Exception):
    """The tool server died or stopped answering. The outcome of the calls in flight is unknown."""

    def __init__(self, why: str, *, out_of_memory: bool = False) -> None:
        super().__init__(why)
        self.out_of_memory = out_of_memory


class CallNotRun(SandboxLost):
    """The tool server was lost before it accepted the call."""


class ToolServerSandbox:
    """A sandbox of one kind. `make_proxy` creates the proxy to a run's allowed hosts. Without a proxy, runs reach
    none."""

    grace = CANCEL_ASK_SECONDS + TERM_SECONDS + REAP_SECONDS

    def __init__(
        self,
        builder: SandboxBuilder,
        *,
        resource_limits: ResourceLimits | None = None,
        make_proxy: Callable[[Path, Hosts, Emit], RunProxy] | None = None,
    ) -> None:
        self.builder, self.resource_limits, self.make_proxy = builder, resource_limits or ResourceLimits(), make_proxy
        self.name = builder.name
        self.protections = (*builder.protections, *([] if make_proxy is None else ["proxy"]))
        self.started = RunStarted(self.name, self.protections)

    def open(self, job: Job, emit: Emit) -> ToolServerSession:
        return ToolServerSession(self, job, emit)


class ToolServerSession:
    """The sandbox of one run. The first call starts it. A lost sandbox is restarted, at most three times.

    Raises Failed, before any model call, if the workspace is shared and the run's user cannot read it."""

    setup = None
    has_copy = False
    needs_workspace = False

    def __init__(self, sandbox: ToolServerSandbox, job: Job, emit: Emit) -> None:
        assert isinstance(job.folders, RunFolders)
        self._sandbox, self._job, self._emit, self._own = sandbox, job, emit, job.folders
        job.folders.spill_for_sandbox()
        self._lock = asyncio.Lock()
        self._server: ToolServerConnection | None = None
        self._losses: list[SandboxLost] = []
        self._preparing: asyncio.Task[PreparedSandbox] | None = None
        self._fatal: Stop | None = None
        self._user: tuple[int, int] | None = None
        if self._own.is_shared and os.geteuid() == 0 and self._tools:  # else the run is the user that we are
            self._check_workspace()

    def runs_tool(self, name: str) -> bool:
        return name in self._tools

    @cached_property
    def _tools(self) -> tuple[str, ...]:
        """Return the tools that run in the sandbox. Editing tools run there only if the workspace is the run's own."""
        plan, edits = self._job.plan, is_below(os.path.realpath(self._own.path), (os.path.realpath(self._own.own),))
        return tuple(
            name for name in plan.tools if name in LOCAL and name not in plan.host and (edits or name not in EDITING)
        )

    def _check_workspace(self) -> None:
        """Raise Failed if the run's user cannot read the workspace. Folders of our own state are readable by the
        group."""
        folders: RunFolders | None = self._own
        path = os.path.realpath(self._own.path)
        while folders is not None:
            if is_below(path, (os.path.realpath(folders.own),)):
                return
            folders = folders.parent
        if not is_public(path):
            raise Failed(CLOSED_WORKSPACE.format(path=path))

    async def make_workspace(self) -> None:
        """Do nothing: a workspace that is not a copy is created with its folder."""

    async def preview(self, tool: LocalTool, call: Call, folders: Folders) -> str:
        """Return the diff from the sandbox, marked as such. Previews of other tools use only the arguments."""
        if tool.spec.name not in EDITING:
            return tool.preview(call, folders)
        _check_size(call)
        for attempt in (1, 2):
            server = await self._connect()
            try:
                shown = await server.preview(tool.spec.name, call)
                break
            except SandboxLost as lost:
                if attempt == 2:
                    raise ToolError(PREVIEW_LOST.format(why=lost)) from None
        if shown.failed:
            raise ToolError(shown.text[:INLINE_BYTES])
        return f"{FROM_SANDBOX}\n{shown.text[:PREVIEW_CHARACTERS]}"  # a genuine preview is never longer

    async def execute(self, tool: LocalTool, call: Call, execution: Execution) -> Outcome:
        """Run a call in the sandbox.

        If the sandbox is lost before it accepts the call, the call goes to a new sandbox. If it is lost later, a
        repeatable call runs once more. For any other call, the model learns that the outcome is unknown."""
        _check_size(call)
        attempts = 2 if tool.spec.repeatable else 1
        while attempts:
            server = await self._connect()
            try:
                is_timed = tool.time_limit(call) is not None
                result = await server.execute(tool.spec.name, call, execution, is_timed=is_timed)
            except SandboxLost as lost:
                attempts -= not isinstance(lost, CallNotRun)
            else:
                if result.file:
                    await asyncio.to_thread(mask_outputs, server.box.outputs, only=result.file)
                return self._make_outcome(tool, result, server)
        return Outcome(LOST_SANDBOX_TEXT, success=False, code=UNKNOWN_AFTER_CRASH, sandbox=server.take_protections())

    async def close(self) -> None:
        """End the sandbox. Raises an error that ends the run if it occurred while no call was running."""
        server, self._server = self._server, None
        if server is not None:
            error = server.error
            await server.stop()
            await asyncio.to_thread(mask_outputs, server.box.outputs)
            if self._fatal is None and isinstance(error, Stop):
                raise error

    async def _connect(self) -> ToolServerConnection:
        """Return the connection to the running tool server, starting it if there is none."""
        async with self._lock:
            if self._server is not None:
                error = self._server.error
                if error is None:
                    return self._server
                server, self._server = self._server, None
                if isinstance(error, Stop):
                    self._fatal = error
                elif not server.was_stopped:
                    self._losses.append(error)
                await server.stop()  # last, because it may be cancelled
            if self._fatal is not None:
                raise self._fatal
            if (times := len(self._losses)) > RESTARTS:
                why = self._losses[-1]
                if why.out_of_memory:
                    raise Limited(MEMORY_USED.format(mib=self._sandbox.resource_limits.memory // MIB))
                raise Failed(LOST_TOO_OFTEN.format(times=times, why=why))
            try:
                self._server = await self._start()
            except (RetinueError, OSError) as error:
                self._losses.append(SandboxLost(str(error)))
                raise ToolError(NOT_STARTED.format(why=error)) from None
            return self._server

    async def _start(self) -> ToolServerConnection:
        builder, proxy = self._sandbox.builder, None
        box = make_box(self._job, self._own, self._sandbox.resource_limits, user=self._user)
        for path in box.foreign_objects:
            if not builder.is_exposed(path):
                raise Failed(FOREIGN_OBJECTS.format(path=path))
        async with AsyncExitStack() as undo:
            if self._sandbox.make_proxy is not None:
                proxy = self._sandbox.make_proxy(Path(box.outputs).parent, self._job.plan.network, self._emit)
                undo.push_async_callback(proxy.close)
                await proxy.open()
                box = replace(box, proxy=str(proxy.path))
            frame = self._make_start_frame(box)  # before the start: it reads a folder, which may fail
            prepared = await self._prepare(box)
            process = builder.process(prepared, Path(self._own.own, "full_logs", "tool_server.log"))
            process.start()
            connection = ToolServerConnection(process, box, proxy, self._sandbox.protections)
            undo.push_async_callback(connection.stop)
            if prepared.user is not None:
                self._own.give_outputs(prepared.user)
                if self._user is None:
                    for path in find_closed_paths(box):
                        self._emit(Warned(CLOSED.format(path=path), code="closed_path"))
                self._user = prepared.user
            await connection.greet(frame)
            undo.pop_all()
        return connection

    async def _prepare(self, box: Box) -> PreparedSandbox:
        """Prepare the sandbox in a thread, because changing the owner of a large workspace takes a while. If the caller
        is cancelled, the thread goes on, and the next start waits for it: two would change the owner at once."""
        if self._preparing is not None:
            await asyncio.wait({self._preparing})
        self._preparing = start_task(asyncio.to_thread(self._sandbox.builder.prepare, box))
        try:
            return await asyncio.shield(self._preparing)
        except asyncio.CancelledError:
            self._preparing.add_done_callback(_discard)
            raise

    def _make_start_frame(self, box: Box) -> frames.Start:
        return frames.Start(
            version=frames.VERSION,
            path=self._job.ref.path,
            # The workspace's setup command needs the shell.
            tools=self._tools if "shell" in self._tools else (*self._tools, "shell"),
            workspace=box.workspace,
            search_roots=tuple(os.path.realpath(path) for path in self._own.search_roots),
            roots=(box.workspace, *box.readable, box.outputs, box.host_outputs),
            outputs=box.outputs,
            resource_limits=box.resource_limits,
            limit_memory=not self._sandbox.builder.counts_memory,
            spilled=len(os.listdir(box.outputs)),  # noqa: PTH208
            proxy=PROXY if box.proxy else "",
            program_tools=self._job.plan.program_tools if CODE_MODE in self._tools else (),
            hidden_paths=tuple(self._own.hidden_paths),
            pinned=box.pinned,
        )

    def _make_outcome(self, tool: LocalTool, result: frames.ResultFrame, server: ToolServerConnection) -> Outcome:
        text = clean_cut(result.text)
        if not result.success and tool.spec.name in COMMANDS and (note := self._find_hint(text, server)):
            text = f"{text}\n{note}"
        file = find_output(server.box.outputs, result.file) if result.file else ""
        return Outcome(text, result.success, file=file, sandbox=server.take_protections())

    def _find_hint(self, text: str, server: ToolServerConnection) -> str:
        """Return hints for a command that failed because of limits of its sandbox, or ""."""
        unreached = "" if FULL_NETWORK in self._sandbox.builder.protections else find_offline_hint(text)
        if server.proxy is not None:
            unreached = server.proxy.take_refusals()
        return "\n".join(filter(None, (self._sandbox.builder.find_hint(text), unreached, server.find_memory_hint())))


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


def _discard(opened: asyncio.Future[PreparedSandbox]) -> None:
    """Discard a prepared sandbox after its caller was cancelled."""
    if not opened.cancelled() and opened.exception() is None:
        opened.result().discard()


def _check_size(call: Call) -> None:
    try:
        size = len(msgspec.json.encode(call.args, enc_hook=str))
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        size = len(repr(call.args))
    if size > frames.ARGUMENT_BYTES:
        raise ToolError(TOO_LARGE.format(name=call.name))


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ProtocolError(what)
