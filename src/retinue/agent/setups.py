"""The user's `workspace_setup` command, run where the run lives and shown like a call of its shell."""

from __future__ import annotations

import time

from retinue.core.errors import RetinueError
from retinue.core.events import ToolCall, ToolResult
from retinue.core.messages import Call
from retinue.core.plans import SETUP, Job, Setup
from retinue.core.ports import Link
from retinue.tools.shell import Shell

NAME = SETUP
LAST_CHARACTERS = 300


async def run_setup(setup: Setup, job: Job, link: Link) -> None:
    """Raises when it fails: a run must not begin in a workspace that is not ready. Nobody is asked, for it stands in
    the user's own file; `host` says that the model knows nothing of it."""
    args = {"command": setup.command}
    link.emit(ToolCall(NAME, NAME, args, display_name=NAME, timeout_seconds=setup.seconds, host=True))
    started = time.monotonic()
    call = Call(NAME, NAME, {**args, "timeout": setup.seconds})
    outcome = await Shell()(call, job.folders, link)
    took = round((time.monotonic() - started) * 1000)
    link.emit(ToolResult(NAME, NAME, outcome.text, outcome.success, took, outcome.file))
    if not outcome.success:
        last = " ".join(outcome.text[-LAST_CHARACTERS:].split())
        raise RetinueError(f"workspace_setup failed, so the run did not begin: `{setup.command}`: {last}")
