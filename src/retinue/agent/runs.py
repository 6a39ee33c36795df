"""One run from start to ending: open its sandbox, set up its workspace, run its loop or function, close its sandbox.

A conversation is a run that answers message after message, and waits in between. Each message gets the turns of the
ordinary loop, and the turn limit counts from that message on. An interrupt by the user, a refusal or failure of the
model, or the turn limit ends the answer, not the run. A spent budget, the deadline and a cancel end the run like any
other. Waiting, interrupting and ending are up to the supervisor.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Any

import msgspec

from retinue.agent.local_tools import SandboxedTool
from retinue.agent.loop import LoopState, run_turns
from retinue.agent.rounds import run_rounds
from retinue.agent.team import run_member, run_team
from retinue.agent.tool_calls import run_tool_call
from retinue.core.errors import ModelError, RetinueError, TurnsSpent
from retinue.core.events import RunWaiting
from retinue.core.messages import (
    INTERRUPTED_TURN,
    USERS_OWN,
    Call,
    ToolSpec,
)
from retinue.core.plans import SETUP, Job, Sandbox
from retinue.core.ports import Link, RunSession, Setup
from retinue.core.results import Ending, ending_texts
from retinue.tools.answer import make_output, to_plain
from retinue.tools.functions import as_text
from retinue.tools.shell import Shell
from retinue.workspaces.handed_files import put_files

LAST_CHARACTERS = 300
SETUP_SPEC = ToolSpec(SETUP, "", {}, tier=USERS_OWN, display_name=SETUP, host=True)


def run_job(job: Job, link: Link) -> Awaitable[Ending]:
    """Run a job whose loop is ours to its ending. Its tools execute in the sandbox of its plan."""
    if job.plan.run_job is not None:
        return job.plan.run_job(job, link)
    if job.plan.team is not None:  # needs no sandbox: its members have sandboxes, files and setup of their own
        return run_team(job, link)
    sandbox: Sandbox = job.plan.runtime  # type: ignore[assignment] # remote runs are driven through their adapters
    session = sandbox.open(job, link.emit)
    if session is not None:
        return _run_in_session(session, job, link)
    return _run_with_files(job, link) if job.task.files else run_agent(job, link)


async def _run_with_files(job: Job, link: Link) -> Ending:
    """Copy the files of the task into the workspace, then run the job."""
    is_resumed = job.past is not None
    await asyncio.to_thread(put_files, job.folders, job.task.files, is_resumed=is_resumed)
    return await run_agent(job, link)


async def _run_in_session(session: RunSession, job: Job, link: Link) -> Ending:
    try:
        job = msgspec.structs.replace(job, session=session)
        if session.setup is not None:
            await _run_setup(session.setup, session, job, link)
        if session.needs_workspace or job.plan.profile.call is not None or job.task.files:
            await session.make_workspace()
        return await (_run_with_files(job, link) if job.task.files else run_agent(job, link))
    finally:
        await session.close()


def run_agent(job: Job, link: Link) -> Awaitable[Ending]:
    """Run the agent of the profile: a callable, a member of a team, or a model with tools. The task of a model is one
    message, a conversation or a number of rounds."""
    if job.plan.profile.call is not None:
        return _run_callable(job)
    if job.plan.is_member:
        return run_member(job, link)
    if job.plan.rounds is not None:
        return run_rounds(job, link)
    return run_conversation(job, link) if job.task.conversation else run_turns(LoopState(job), job, link)


async def _run_callable(job: Job) -> Ending:
    """Call the Python function of the profile with the task's text. The return value is the answer, checked against
    the output type of the profile."""
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
    """Run the user's `workspace_setup` command. Raises RetinueError if it fails: a run must not begin in a workspace
    that is not ready.

    No person is asked, because the command comes from the user's own file. `host` in `SETUP_SPEC` says that the model
    does not know of this call."""
    call = Call(SETUP, SETUP, {"command": setup.command, "timeout": setup.seconds})
    done = await run_tool_call(call, SandboxedTool(Shell(), session), job.folders, link, SETUP_SPEC)
    if not done.outcome.success:
        last = " ".join(done.outcome.text[-LAST_CHARACTERS:].split())
        raise RetinueError(f"workspace_setup failed, so the run did not begin: `{setup.command}`: {last}")


async def run_conversation(job: Job, link: Link) -> Ending:
    """Answer the first message, or resume where an earlier process stopped. Then answer every message that arrives,
    until the conversation is ended. The ending is `done`, with the newest answer."""
    state = LoopState(job)
    waits = job.past is not None and job.past.waits
    waiting = RunWaiting() if waits else await _answer_message(state, job, link)
    while await link.conversation.wait_for_message(waiting):
        state.begin_message()
        waiting = await _answer_message(state, job, link)
    return Ending("done", state.answer)


async def _answer_message(state: LoopState, job: Job, link: Link) -> RunWaiting:
    """Run the turns of one message, and return how they went. Leave the thread in a form readable for a model."""
    try:
        ending = await link.conversation.run_interruptible(run_turns(state, job, link))
    except TurnsSpent as error:
        return RunWaiting("limited", f"{error}; your next message gets as many again")
    except ModelError as error:
        state.complete_broken_turn(link)
        return RunWaiting("failed", str(error))
    if ending is None:
        state.complete_broken_turn(link, INTERRUPTED_TURN)
        return RunWaiting("interrupted")
    if ending.status == "refused":
        return RunWaiting("refused", ending.text or ending_texts("refused", name=link.ref.agent, primary=True)[0])
    return RunWaiting()
