"""The shell tool: one command, its merged output, its exit code, and nothing left running."""

from __future__ import annotations

import os
import shutil

from retinue.concurrency import run_until_first
from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES, TERM_SECONDS
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Execution, Folders, Outcome
from retinue.tools.arguments import read_argument, reveal_text
from retinue.tools.command_process import (
    BACKGROUND_ENDED,
    OutputPipe,
    build_environment,
    make_outcome,
    start_command,
)
from retinue.tools.truncate import Ends

DEFAULT_SECONDS = 120.0
MAX_SECONDS = 3600.0
NOTE_BYTES = 256


class Shell:
    """Runs a command line in the workspace. `grace` is how long a command may take to end after SIGTERM; `sandboxed`
    says that it ends with its sandbox anyhow."""

    spec = ToolSpec(
        name="shell",
        description="Run a shell command in the workspace and give its output (stdout and stderr together). It has no "
        "input, and what it leaves in the background is ended.",
        schema={
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "timeout": {
                    "type": "number",
                    "description": "seconds",
                    "default": DEFAULT_SECONDS,
                    "maximum": MAX_SECONDS,
                },
            },
            "required": ["command"],
        },
        display_name="Shell",
    )

    def __init__(self, *, grace: float = TERM_SECONDS, sandboxed: bool = False) -> None:
        self._grace = grace
        self._sandboxed = sandboxed

    def time_limit(self, call: Call) -> float | None:
        return _read_arguments(call)[1]

    async def __call__(self, call: Call, execution: Execution) -> Outcome:
        command, seconds = _read_arguments(call)
        folders = execution.folders
        ends = Ends(INLINE_BYTES - NOTE_BYTES, spill=lambda: folders.spill(f"{call.name}.txt"))
        env = build_environment(os.environ, run=execution.path)
        argv = (shutil.which("bash") or "/bin/sh", "-c", command)
        group, output = start_command(argv, cwd=folders.workspace, env=env, tool=call.name, guard=not self._sandboxed)
        in_time, held, grace = False, False, self._grace
        with OutputPipe(output, ends, execution.show_output) as pipe:
            try:
                in_time = await run_until_first([group.wait_for_exit(), execution.wait_for_expiry()]) == 0
                if in_time:
                    held = not await pipe.wait_for_end()
                    grace = 0.0
            finally:
                await group.end(term=grace)
            await pipe.wait_for_end()
            said = ends.close()
        notes = [BACKGROUND_ENDED] if held else []
        return make_outcome(group, said, notes, late="" if in_time else f"[timed out after {seconds:g}s]")

    def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(_read_arguments(call)[0])


def _read_arguments(call: Call) -> tuple[str, float]:
    command, seconds = read_argument(call, "command", str), read_argument(call, "timeout", float, DEFAULT_SECONDS)
    if not command.strip():
        raise ToolError(f"{call.name}: 'command' is empty")
    if not seconds > 0:  # written so that NaN is refused too
        raise ToolError(f"{call.name}: 'timeout' must be more than 0, got {seconds}")
    return command, min(seconds, MAX_SECONDS)
