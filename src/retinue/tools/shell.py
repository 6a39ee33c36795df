"""The shell tool: one command, its merged output, its exit code, and nothing left running."""

from __future__ import annotations

import shutil

from retinue.concurrency import run_until_first
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Execution, Outcome
from retinue.processes.group import ProcessGroup
from retinue.tools.command_process import CommandTool


class Shell(CommandTool):
    """The `shell` tool, which runs a command line in the workspace."""

    text_argument, seconds_argument = "command", "timeout"
    default_seconds = 120.0
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
                    "default": default_seconds,
                    "maximum": CommandTool.max_seconds,
                },
            },
            "required": ["command"],
        },
        display_name="Shell",
    )

    async def __call__(self, call: Call, execution: Execution) -> Outcome:
        command, seconds = self.read_arguments(call)

        async def follow(group: ProcessGroup) -> str:
            first = await run_until_first([group.wait_for_exit(), execution.wait_for_expiry()])
            return "" if first == 0 else f"[timed out after {seconds:g}s]"

        argv = (shutil.which("bash") or "/bin/sh", "-c", command)
        return await self.run_command(argv, call, execution, follow, notes=[])
