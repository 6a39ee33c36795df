"""Tools that run in a run's sandbox, as the loop calls them, and the host side of each call: its timeout, and the tool
calls of its program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import msgspec

from retinue.agent.tool_calls import run_caller_call
from retinue.concurrency import Deadline, SystemClock
from retinue.core.approvals import PROGRAM_ENDED
from retinue.core.limits import INLINE_BYTES
from retinue.core.messages import Call, ToolSpec
from retinue.core.plans import HostTool, Plan
from retinue.core.ports import Folders, Link, LocalTool, Outcome, ProgramCallResult, RunSession, SandboxSession, Tool
from retinue.core.rules import CODE_MODE
from retinue.sandbox.in_process import IN_PROCESS
from retinue.tools.code_mode import ExecutePython
from retinue.tools.functions import HostedTool
from retinue.tools.live_output import LiveOutput
from retinue.tools.subagents import SpawnSubagents

PROGRAM_TOOL_BYTES = 2 * 1024 * 1024
MAX_PROGRAM_CALLS = 1000
MAX_ARGUMENT_DEPTH = 64
MAX_RESULT_BYTES = 2 * 1024 * 1024
UNKNOWN_TOOL = "There is no tool '{name}' that a program of this run can call."
TOO_MANY_CALLS = f"A program can make {MAX_PROGRAM_CALLS} calls, and this one has made them."
TOO_DEEP = f"Arguments can be nested {MAX_ARGUMENT_DEPTH} levels deep."
TOO_LARGE = f"The result of {{name}} is {{size}} bytes; a program can be given {MAX_RESULT_BYTES}."
NO_JSON = "The result of {name} is not JSON: {error}"


class SandboxedTool:
    """A file, shell or code tool. `session` executes its calls: in this process by default, else in the sandbox of a
    run."""

    def __init__(self, tool: LocalTool, session: SandboxSession = IN_PROCESS) -> None:
        self.tool = tool
        self.spec: ToolSpec = tool.spec
        self._session = session

    async def preview(self, call: Call, folders: Folders) -> str:
        return await self._session.preview(self.tool, call, folders)

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        execution = HostExecution(self.tool, call, folders, link)
        try:
            return await self._session.execute(self.tool, call, execution)
        finally:
            execution.close()


def offer_tools_to_programs(
    tools: dict[str, Tool], host: Mapping[str, HostTool], *, named: bool
) -> tuple[ToolSpec, ...]:
    """Let the programs of code mode call the MCP tools of the run. Changes `tools` in place, and returns the tools
    that programs can call.

    A run without MCP tools loses code mode, unless its profile names the tool (`named`). Programs can call the first
    tools whose specs fit into one frame together; the run can still call the others itself."""
    code_mode = tools.get(CODE_MODE)
    if not isinstance(code_mode, SandboxedTool) or not isinstance(code_mode.tool, ExecutePython):
        return ()
    served = [tool.spec for name, tool in tools.items() if tool.spec.server and name in host]
    sizes = accumulate(len(msgspec.json.encode(spec)) for spec in served)
    fitting = tuple(spec for spec, size in zip(served, sizes, strict=True) if size <= PROGRAM_TOOL_BYTES)
    if fitting or named:
        tools[CODE_MODE] = SandboxedTool(ExecutePython(fitting))
    else:
        del tools[CODE_MODE]
    return fitting


def bind_tool(tool: Tool, plan: Plan, session: RunSession) -> Tool:
    """Return `tool` bound to the session of its run: sandboxed tools execute in the session, and host tools that use
    files wait until the copied workspace is made.

    Tools are bound per call, because most runs call few of their tools and many call none."""
    name = tool.spec.name
    if isinstance(tool, SandboxedTool):
        return SandboxedTool(tool.tool, session) if session.runs_tool(name) else tool
    if not session.has_copy:
        return tool
    if isinstance(tool, SpawnSubagents):
        return PreparedTool(tool, session, is_needed=tool.names_paths)
    is_function = name in plan.host and name != "web_fetch" and not tool.spec.server
    return PreparedTool(tool, session) if is_function or name == "apply_subagent" else tool


class PreparedTool:
    """A tool of the host whose calls wait until the run's workspace is made. With `is_needed`, only the calls for which
    it returns True wait."""

    def __init__(self, tool: Tool, session: RunSession, *, is_needed: Callable[[Call], bool] | None = None) -> None:
        self.spec: ToolSpec = tool.spec
        self._tool, self._session, self._is_needed = tool, session, is_needed

    async def preview(self, call: Call, folders: Folders) -> str:
        return await self._tool.preview(call, folders)

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        if self._is_needed is None or self._is_needed(call):
            await self._session.make_workspace()
        return await self._tool(call, folders, link)


class HostExecution:
    """The host side of one call of a local tool: its timeout, its live output, and the tool calls of its program.

    Each tool call of a program is a call of the run, with an id of ours and the same life as any other. A program can
    name only the MCP tools it was given; everything else it sends is data. The session that runs the program awaits
    these calls, and cancels the open ones when the program has ended."""

    def __init__(self, tool: LocalTool, call: Call, folders: Folders, link: Link) -> None:
        self.folders = folders
        self.path = link.ref.path
        self._link = link
        self._seconds = tool.time_limit(call)
        self._expired = asyncio.Event()
        self._deadline: Deadline | None = None
        self._waits_for_people = tool.spec.name == CODE_MODE
        self._forget_questions: Callable[[], None] | None = None
        self._call_id = call.id
        offered = tool.program_tools if isinstance(tool, ExecutePython) else ()
        self._program_tools = {spec.name: spec for spec in offered}
        self._program_calls = 0
        self._output = LiveOutput(lambda text, _: link.local_calls.show_output(call.id, text), masks=True)

    async def wait_for_expiry(self) -> None:
        if self._deadline is None and self._seconds is not None:
            self._deadline = deadline = Deadline(self._seconds, SystemClock(), self._expired.set)
            if self._waits_for_people:
                self._forget_questions = self._link.local_calls.on_question(
                    lambda waits: deadline.pause() if waits else deadline.resume()
                )
        await self._expired.wait()

    async def call_tool(self, name: str, args: dict[str, Any]) -> ProgramCallResult:
        spec = self._program_tools.get(name)
        if spec is None:
            return ProgramCallResult(error=UNKNOWN_TOOL.format(name=name[:200]))
        if self._program_calls >= MAX_PROGRAM_CALLS:
            return ProgramCallResult(error=TOO_MANY_CALLS)
        if _is_deep(args):
            return ProgramCallResult(error=TOO_DEEP)
        self._program_calls += 1
        call_id = self._link.local_calls.claim_call_id(f"{self._call_id}.{self._program_calls}")
        call = Call(call_id, name, args, within=self._call_id)
        written = msgspec.structs.replace(spec, host=True)
        tool, link = HostedTool(spec), self._link
        done = await run_caller_call(call, tool, self.folders, link, written, given_up=PROGRAM_ENDED)
        made = _read_value(name, done.outcome)
        return msgspec.structs.replace(made, note=f"{name}: {done.changed}") if done.changed else made

    def show_output(self, data: bytes, *, is_cut: bool = False) -> None:
        self._output.feed(data, is_cut=is_cut)

    def close(self) -> None:
        self._output.close()
        if self._forget_questions is not None:
            self._forget_questions()
        if self._deadline is not None:
            self._deadline.stop()


def _is_deep(args: Any) -> bool:
    """Return True if `args` is nested deeper than `MAX_ARGUMENT_DEPTH`, too deep to copy and write."""
    level = [args]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True


def _read_value(name: str, outcome: Outcome) -> ProgramCallResult:
    """Return the result of a call as a program gets it: the structured content of the tool if there is any, else its
    text."""
    if not outcome.success:
        return ProgramCallResult(error=outcome.text[:INLINE_BYTES])
    try:
        value = msgspec.json.encode(outcome.text if outcome.data is None else outcome.data, enc_hook=str)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: also for a lone surrogate
        return ProgramCallResult(error=NO_JSON.format(name=name, error=error))
    if len(value) > MAX_RESULT_BYTES:
        return ProgramCallResult(error=TOO_LARGE.format(name=name, size=len(value)))
    return ProgramCallResult(msgspec.Raw(value))
