"""The host's side of sandboxes with a tool server: a sandbox of one kind, and the session of a run.

A sandbox holds no keys and has no network: hosts that the profile allows are reached through a proxy on the host.
Folders shared with the user are read-only inside; `write` and `edit` calls there run on the host, after approval. If
the tool server is lost, the next call restarts it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from retinue.concurrency import start_task
from retinue.core.errors import Failed, Limited, RetinueError, Stop, ToolError
from retinue.core.events import LOST_SANDBOX_TEXT, UNKNOWN_AFTER_CRASH, RunStarted, Warned
from retinue.core.limits import CANCEL_ASK_SECONDS, INLINE_BYTES, MIB, TERM_SECONDS, ResourceLimits
from retinue.core.messages import Call
from retinue.core.network import Hosts
from retinue.core.plans import Job
from retinue.core.ports import Emit, Execution, Folders, LocalTool, Outcome
from retinue.core.rules import CODE_MODE
from retinue.files.trees import is_public
from retinue.protocol import tool_server as frames
from retinue.sandbox.box import (
    Box,
    find_closed_paths,
    find_output,
    is_below,
    make_box,
    mask_outputs,
)
from retinue.sandbox.builder import FULL_NETWORK, PROXY, SandboxBuilder
from retinue.sandbox.hints import find_offline_hint
from retinue.sandbox.process import REAP_SECONDS, PreparedSandbox
from retinue.sandbox.tool_server_connection import CallNotRun, SandboxLost, ToolServerConnection
from retinue.tools.local import COMMANDS, EDITING, LOCAL
from retinue.tools.truncate import clean_cut
from retinue.workspaces.run_folders import RunFolders

if TYPE_CHECKING:
    from retinue.sandbox.network_proxy import RunProxy

RESTARTS = 3
PREVIEW_CHARACTERS = 1024 * 1024
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
NOT_STARTED = "The sandbox could not be started, so this call was not run: {why}"
PREVIEW_LOST = "The sandbox was lost twice while it made the preview of this call, so the call was not run: {why}"
LOST_TOO_OFTEN = "its sandbox was lost {times} times; the last time {why}"
MEMORY_USED = "its memory of {mib} MiB is used up"
FROM_SANDBOX = "[as the sandbox shows it]"


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
