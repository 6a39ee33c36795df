"""The shell tool: one command, its merged output, its exit code, and nothing left running."""

from __future__ import annotations

import os
import shutil

from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES, TERM_SECONDS
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
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
    """Runs a command line in the workspace. `grace` is how long a command may take to end after SIGTERM; with
    `walled` a sandbox ends it with us."""

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

    def __init__(self, *, grace: float = TERM_SECONDS, walled: bool = False) -> None:
        self._grace = grace
        self._walled = walled

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        command, seconds = _read_arguments(call)
        ends = Ends(INLINE_BYTES - NOTE_BYTES, spill=lambda: folders.spill(f"{call.name}.txt"))
        env = build_environment(os.environ, run=link.ref.path)
        argv = (shutil.which("bash") or "/bin/sh", "-c", command)
        group, output = start_command(argv, cwd=folders.workspace, env=env, tool=call.name, guard=not self._walled)
        in_time, held, grace = False, False, self._grace
        with OutputPipe(output, ends) as pipe:
            try:
                in_time = await group.wait_for_exit(seconds)
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
