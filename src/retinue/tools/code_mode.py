"""Code mode: `execute_python_code`, one Python program instead of many tool calls.

The program runs in its run's sandbox, as a group of processes like a shell's command. The MCP tools of its run are
modules it can import; what it calls comes back over a channel of its own and is made by the host, as a call of the run
like any other. A program that does not keep to the channel is ended.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES, TERM_SECONDS
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Execution, Folders, Made, Outcome
from retinue.core.rules import CODE_MODE
from retinue.processes.group import ProcessGroup
from retinue.tools import code_modules
from retinue.tools.arguments import read_argument, reveal_text
from retinue.tools.code_program import FRAME_BYTES, HEAD
from retinue.tools.command_process import (
    BACKGROUND_ENDED,
    OutputPipe,
    build_environment,
    make_outcome,
    start_command,
)
from retinue.tools.truncate import Ends

DEFAULT_SECONDS = 60
MAX_SECONDS = 3600
CODE_BYTES = 256 * 1024
AT_ONCE = 32
KEPT_BYTES = 16 * 1024 * 1024
STOP_SECONDS = 2.0
NOTE_BYTES = 4096
NOTE_CHARACTERS = 200
NOTES = 5
Calls = Callable[[str, dict[str, Any]], Awaitable[Made]]
PROGRAM = str(Path(__file__).with_name("code_program.py"))


class ExecutePython:
    """Runs a program that can call the tools `program_tools`. `grace` is how long it may take to end after SIGTERM;
    `sandboxed` says that it ends with its sandbox anyhow."""

    def __init__(
        self, program_tools: Sequence[ToolSpec] = (), *, grace: float = TERM_SECONDS, sandboxed: bool = False
    ) -> None:
        self.program_tools = tuple(program_tools)
        self._modules = code_modules.build_modules(program_tools)
        self._grace = grace
        self._sandboxed = sandboxed
        self.spec = ToolSpec(
            CODE_MODE,
            code_modules.describe_modules(self._modules),
            {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "the Python program"},
                    "executionTimeout": {
                        "type": "integer",
                        "description": "seconds; waiting for a person's approval does not count",
                        "default": DEFAULT_SECONDS,
                        "minimum": 1,
                        "maximum": MAX_SECONDS,
                    },
                },
                "required": ["code"],
            },
            display_name="Python",
        )

    def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(_read_arguments(call)[0])

    def time_limit(self, call: Call) -> float | None:
        return _read_arguments(call)[1]

    async def __call__(self, call: Call, execution: Execution) -> Outcome:
        code, seconds = _read_arguments(call)
        folders = execution.folders
        sources = {module.name: module.source for module in self._modules}
        ends = Ends(INLINE_BYTES - NOTE_BYTES, spill=lambda: folders.spill(f"{call.name}.txt"))
        running, held, grace = _Running(), False, self._grace
        env = build_environment(os.environ, run=execution.path)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                argv = (sys.executable, "-I", "-X", "utf8", PROGRAM, str(theirs.fileno()))
                group, output = start_command(
                    argv,
                    cwd=folders.workspace,
                    env=env,
                    tool=call.name,
                    guard=not self._sandboxed,
                    what="program",
                    pass_fds=(theirs.fileno(),),
                )
            with OutputPipe(output, ends, execution.show_output) as pipe:
                try:
                    try:
                        start = {"code": code, "modules": sources}
                        in_time = await running.follow(group, ours, start, execution)
                    finally:
                        await running.stop()
                    if in_time:
                        held = not await pipe.wait_for_end()
                        grace = 0.0
                finally:
                    await group.end(term=grace)
                await pipe.wait_for_end()
                said = ends.close()
        notes = running.notes[:NOTES] + ([BACKGROUND_ENDED] if held else [])
        late = "" if in_time else running.problem or f"[timed out after {seconds:g}s]"
        return make_outcome(group, said, notes, late=late)


def _read_arguments(call: Call) -> tuple[str, float]:
    code, seconds = (
        read_argument(call, "code", str),
        read_argument(call, "executionTimeout", float, float(DEFAULT_SECONDS)),
    )
    if not code.strip():
        raise ToolError(f"{call.name}: 'code' is empty")
    if len(code.encode("utf-8", "replace")) > CODE_BYTES:
        raise ToolError(f"{call.name}: 'code' is longer than {CODE_BYTES} bytes")
    if not seconds > 0:  # written so that NaN is refused too
        raise ToolError(f"{call.name}: 'executionTimeout' must be more than 0, got {seconds}")
    return code, min(seconds, float(MAX_SECONDS))


class _ProgramCall(msgspec.Struct, frozen=True):
    """A call as a program asks for it."""

    id: int
    tool: str
    args: dict[str, Any]


_DECODER = msgspec.json.Decoder(_ProgramCall)


class _Running:
    """A program at work: its channel and the calls it waits for. `follow` once, then `stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._tasks = TaskOwner()
        self._room = asyncio.Semaphore(AT_ONCE)
        self.problem = ""
        self.notes: list[str] = []

    async def follow(self, group: ProcessGroup, channel: socket.socket, start: Any, execution: Execution) -> bool:
        """Return True when the program has ended by itself; raise what a call of it raised that ends the run."""
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        writer.write(_encode_frame(start))
        exited = self._tasks.start(group.wait_for_exit())
        self._tasks.start(self._serve(reader, writer, execution.call_tool))
        self._tasks.start(self._expire(execution))
        try:
            await asyncio.wait((exited, self._over), return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                self._over.result()
                return False
            return True
        finally:
            writer.transport.abort()
            exited.cancel()
            await asyncio.wait((exited,))

    async def stop(self) -> None:
        """Cancel the calls that the program still waits for."""
        self._over.cancel()
        await self._tasks.close(STOP_SECONDS)

    async def _expire(self, execution: Execution) -> None:
        await execution.wait_for_expiry()
        self._end()

    def _end(self, problem: str = "") -> None:
        if not self._over.done():
            self.problem = problem
            self._over.set_result(None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, make: Calls) -> None:
        """Serve the program's calls, as many at once as there is room for, until it closes its end."""
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(HEAD), "big")
                if size > FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                asked = _DECODER.decode(await reader.readexactly(size))
                await self._room.acquire()
                self._tasks.start(self._answer(asked, writer, make))
        except (asyncio.IncompleteReadError, OSError):
            return
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._end(f"[ended: it broke the channel to its tools: {error}]")

    async def _answer(self, asked: _ProgramCall, writer: asyncio.StreamWriter, make: Calls) -> None:
        try:
            made = await make(asked.tool, asked.args)
        except Exception as error:  # noqa: BLE001 - what ends the run, or hinders the log, is no matter of the program
            if not self._over.done():
                self._over.set_exception(error)
            return
        finally:
            self._room.release()
        if made.note:
            self.notes.append(made.note[:NOTE_CHARACTERS])
        answer = {"id": asked.id, "value": made.value} if made.error is None else {"id": asked.id, "error": made.error}
        writer.write(_encode_frame(answer))
        if writer.transport.get_write_buffer_size() > KEPT_BYTES:
            self._end("[ended: it does not read the answers of its tools]")


def _encode_frame(value: Any) -> bytes:
    try:
        body = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a character: in a program, or in the words of a tool
        body = msgspec.json.encode(_replace_surrogates(value))
    return len(body).to_bytes(HEAD, "big") + body


def _replace_surrogates(value: dict[str, Any]) -> dict[str, Any]:
    return {k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in value.items()}
