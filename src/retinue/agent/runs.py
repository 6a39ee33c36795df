"""One run from start to ending: its sandbox is opened, its workspace set up, its loop or function run, and its sandbox
closed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import msgspec

from retinue.agent.conversation import run_conversation
from retinue.agent.local_tools import SandboxedTool
from retinue.agent.loop import run_loop
from retinue.agent.rounds import run_rounds
from retinue.agent.team import run_member, run_team
from retinue.agent.tool_calls import run_tool_call
from retinue.core.errors import RetinueError
from retinue.core.limits import EVENT_BYTES
from retinue.core.messages import USERS_OWN, Call, ToolSpec
from retinue.core.plans import SETUP, Job, Sandbox
from retinue.core.ports import Link, RunSession, Setup
from retinue.core.results import Ending
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.tools.answer import make_output, to_plain
from retinue.tools.functions import as_text
from retinue.tools.shell import Shell

LAST_CHARACTERS = 300
SETUP_SPEC = ToolSpec(SETUP, "", {}, tier=USERS_OWN, display_name=SETUP, host=True)


def run_job(job: Job, link: Link) -> Awaitable[Ending]:
    """Run a job whose loop is ours to its ending; its tools execute in the sandbox of its plan."""
    if job.plan.run_job is not None:
        return job.plan.run_job(job, link)
    sandbox = cast("Sandbox", job.plan.runtime)  # remote runs are driven through their adapters
    session = sandbox.open(job, link)
    if session is None:
        return run_agent(job, link) if not job.task.files else _run_with_files(job, link)
    return _run_in_session(session, job, link)


async def _run_with_files(job: Job, link: Link) -> Ending:
    await asyncio.to_thread(_copy_files, job)
    return await run_agent(job, link)


async def _run_in_session(session: RunSession, job: Job, link: Link) -> Ending:
    try:
        job = msgspec.structs.replace(job, session=session, folders=session.folders)
        link.use_folders(session.folders)
        if session.setup is not None:
            await _run_setup(session.setup, session, job, link)
        if job.plan.profile.call is not None or job.task.files:
            await session.make_workspace()
        if job.task.files:
            await asyncio.to_thread(_copy_files, job)
        return await run_agent(job, link)
    finally:
        await session.close()


def _copy_files(job: Job) -> None:
    """Copy the files of the task into the workspace, unless an earlier process has. A link of that name is replaced,
    not followed."""
    for file in map(Path, job.task.files):
        target = job.folders.workspace / file.name
        if job.past is not None and target.exists():
            continue
        try:
            replace_file(target, read_small_file(file, EVENT_BYTES))
        except OSError as error:
            raise RetinueError(f"the file {file.name} of the task could not be copied: {error}") from None


def run_agent(job: Job, link: Link) -> Awaitable[Ending]:
    """Run what the profile is: a model with tools, whose task is one message, a conversation or a number of rounds, a
    callable, a team or a member of one."""
    if job.plan.profile.call is not None:
        return _run_callable(job)
    if job.plan.team is not None:
        return run_team(job, link)
    if job.plan.is_member:
        return run_member(job, link)
    if job.plan.rounds is not None:
        return run_rounds(job, link)
    return run_conversation(job, link) if job.task.conversation else run_loop(job, link)


async def _run_callable(job: Job) -> Ending:
    """Call a function of any framework with the task's text; what it returns is the answer, checked against the output
    type of the profile."""
    call = job.plan.profile.call
    assert call is not None and job.context is not None
    value: Any = call(job.task.text, job.context)
    if inspect.isawaitable(value):
        value = await value
    if job.plan.profile.output is None:
        return Ending("done", as_text(value))
    output = make_output(job.plan.profile.output)
    checked = output.check(to_plain(value))
    return Ending("done", msgspec.json.encode(checked).decode(), structured=checked)


async def _run_setup(setup: Setup, session: RunSession, job: Job, link: Link) -> None:
    """Run the user's `workspace_setup` command. Raises when it fails: a run must not begin in a workspace that is not
    ready. Nobody is asked, for it stands in the user's own file; `host` says that the model knows nothing of it."""
    call = Call(SETUP, SETUP, {"command": setup.command, "timeout": setup.seconds})
    done = await run_tool_call(call, SandboxedTool(Shell(), session), job.folders, link, SETUP_SPEC)
    if not done.outcome.success:
        last = " ".join(done.outcome.text[-LAST_CHARACTERS:].split())
        raise RetinueError(f"workspace_setup failed, so the run did not begin: `{setup.command}`: {last}")
