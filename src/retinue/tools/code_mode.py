"""Code mode: `execute_python_code`, one Python program instead of many tool calls.

The program runs in its run's sandbox, as a group of processes like a shell's command. The MCP tools of its run are
modules it can import; what it calls comes back over a channel of its own and is made by the host, as a call of the run
like any other. A program that does not keep to the channel is ended.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Execution, Made, Outcome
from retinue.core.rules import CODE_MODE
from retinue.processes.group import ProcessGroup
from retinue.tools import code_modules
from retinue.tools.code_program import FRAME_BYTES, HEAD
from retinue.tools.command_process import CommandTool

CODE_BYTES = 256 * 1024
AT_ONCE = 32
KEPT_BYTES = 16 * 1024 * 1024
STOP_SECONDS = 2.0
NOTE_CHARACTERS = 200
NOTES = 5
Calls = Callable[[str, dict[str, Any]], Awaitable[Made]]
PROGRAM = str(Path(__file__).with_name("code_program.py"))


class ExecutePython(CommandTool):
    """Runs a program that can call the tools `program_tools`."""

    text_argument, seconds_argument = "code", "executionTimeout"
    default_seconds = 60.0
    what = "program"
    note_bytes = 4096

    def __init__(self, program_tools: Sequence[ToolSpec] = (), *, sandboxed: bool = False) -> None:
        super().__init__(sandboxed=sandboxed)
        self.program_tools = tuple(program_tools)
        self._modules = code_modules.build_modules(program_tools)
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
                        "default": int(self.default_seconds),
                        "minimum": 1,
                        "maximum": int(self.max_seconds),
                    },
                },
                "required": ["code"],
            },
            display_name="Python",
        )

    def read_arguments(self, call: Call) -> tuple[str, float]:
        code, seconds = super().read_arguments(call)
        if len(code.encode("utf-8", "replace")) > CODE_BYTES:
            raise ToolError(f"{call.name}: 'code' is longer than {CODE_BYTES} bytes")
        return code, seconds

    async def __call__(self, call: Call, execution: Execution) -> Outcome:
        code, seconds = self.read_arguments(call)
        start = {"code": code, "modules": {module.name: module.source for module in self._modules}}
        running = _Running()
        ours, theirs = socket.socketpair()

        async def follow(group: ProcessGroup) -> str:
            theirs.close()
            try:
                in_time = await running.follow(group, ours, start, execution)
            finally:
                await running.stop()
            return "" if in_time else running.problem or f"[timed out after {seconds:g}s]"

        with ours, theirs:
            argv = (sys.executable, "-I", "-X", "utf8", PROGRAM, str(theirs.fileno()))
            return await self.run_command(
                argv, call, execution, follow, notes=running.notes, pass_fds=(theirs.fileno(),)
            )


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
        if made.note and len(self.notes) < NOTES:
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
