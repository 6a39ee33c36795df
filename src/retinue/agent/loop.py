"""The loop: ask the model, run the tools it wants, and again, until it has an answer.

Knows the link and the tools, nothing else: not where it runs, not who watches, not what it may spend. Whatever
ends it early arrives as an exception; the supervisor turns that into the run's one ending.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from retinue.core.approvals import Deny, denial, edited
from retinue.core.errors import Limited, Stop, ToolError
from retinue.core.events import Inbox, TurnEnded, TurnStarted
from retinue.core.limits import INLINE_BYTES
from retinue.core.messages import AssistantTurn, Call, Reply, ToolSpec, ToolTurn, Turn, UserTurn, last_text
from retinue.core.plans import Job, Past
from retinue.core.ports import Folders, Link, Outcome, Tool
from retinue.core.results import Ending
from retinue.tools import answer
from retinue.tools.truncate import cut

ANSWER = answer.NAME
REMINDER = "You have not given your answer yet: call the final_answer tool with it."
NONE: Mapping[str, Outcome] = {}
NO_ANSWER = "{who} '{name}' ended without calling final_answer"


async def run_loop(job: Job, link: Link) -> Ending:
    """One run from its first turn, or from where it stopped, to its ending."""
    thread: list[Turn] = list(job.thread)
    turn = 0
    ending: Ending | None = None
    if job.past is not None:
        turn, ending = await _go_on(job.past, thread, job, link)
    specs, most = job.plan.specs, job.max_turns
    while ending is None:
        turn += 1
        if most is not None and turn > most:
            raise Limited(f"limit of {most} turns reached")
        thread += link.inbox()
        link.emit(TurnStarted(turn))
        reply = await link.complete(turn, job.system, thread, specs)
        if reply.refused:
            return Ending("refused", reply.text)
        thread.append(AssistantTurn(reply.text, reply.calls, reply.thoughts, reply.natives))
        given: Outcome | None = None
        if reply.calls:
            if len(reply.calls) == 1:
                outcomes: Sequence[Outcome] = (await _run_call(reply.calls[0], job, link),)
            else:
                outcomes = await _run_calls(reply, job, link)
            for call, outcome in zip(reply.calls, outcomes, strict=True):
                thread.append(ToolTurn(call.id, call.name, outcome.text, outcome.success))
                if call.name == answer.NAME and outcome.success and given is None:
                    given = outcome
        link.emit(TurnEnded(turn))
        if given is not None:
            return _answered(given)
        if not reply.calls and not await link.children_done():
            ending = _nothing_more(thread, job, link)
    return ending


def _answered(outcome: Outcome) -> Ending:
    return Ending("done", msgspec.json.encode(outcome.data).decode(), structured=outcome.data)


def _nothing_more(thread: list[Turn], job: Job, link: Link) -> Ending | None:
    """The ending of a run that wants nothing any more; None for one that is reminded, once, that an answer is due."""
    if answer.NAME not in job.plan.by_name:
        return Ending("done", last_text(thread) or "")
    words = [turn for turn in thread if isinstance(turn, UserTurn)]
    while words and words[-1].source != "task" and words[-1].text != REMINDER:
        words.pop()
    if words and words[-1].text == REMINDER:  # since its newest task
        text = NO_ANSWER.format(who="Subagent" if link.ref.run else "Run", name=link.ref.agent)
        return Ending("failed", text, error=text)
    thread.append(UserTurn(REMINDER, "notice"))
    link.emit(Inbox(REMINDER))
    return None


async def _go_on(past: Past, thread: list[Turn], job: Job, link: Link) -> tuple[int, Ending | None]:
    """Ends the turn in which the run stopped; the last turn that is over, or the ending."""
    reply = past.reply
    if reply is None:
        return past.turn - 1, None
    thread.append(AssistantTurn(reply.text, reply.calls, reply.thoughts, reply.natives))
    outcomes = await _run_calls(reply, job, link, past.outcomes)
    for call, outcome in zip(reply.calls, outcomes, strict=True):
        thread.append(ToolTurn(call.id, call.name, outcome.text, outcome.success))
    if not past.ended:
        link.emit(TurnEnded(past.turn))
    for call, outcome in zip(reply.calls, outcomes, strict=True):
        if call.name == answer.NAME and outcome.success:
            checked = await job.plan.by_name[answer.NAME](call, job.folders, link)  # the log has only its words
            return past.turn, _answered(checked)
    if reply.calls or await link.children_done():
        return past.turn, None
    return past.turn, _nothing_more(thread, job, link)


async def _run_calls(reply: Reply, job: Job, link: Link, known: Mapping[str, Outcome] = NONE) -> Sequence[Outcome]:
    """All calls of one reply at once, but for those with a known outcome; all outcomes, in the order of the calls."""
    tasks = [asyncio.create_task(_run_call(call, job, link)) for call in reply.calls if call.id not in known]
    try:
        made = await asyncio.gather(*tasks)
    except BaseException as error:
        for task in tasks:
            task.cancel()
        await _cleaned_up(tasks, told=isinstance(error, asyncio.CancelledError))
        raise
    if not known:
        return made
    new = iter(made)
    return [known[call.id] if call.id in known else next(new) for call in reply.calls]


async def _cleaned_up(tasks: list[asyncio.Task[Outcome]], *, told: bool) -> None:
    """Until all have ended that were told to stop. They are told again, which means hurry, only when the run is told
    a second time: a first time may find it cleaning up after a call that ended it."""
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            for task in pending if told else ():
                task.cancel()
            told = True
    for task in tasks:
        task.cancelled() or task.exception()


async def _run_call(call: Call, job: Job, link: Link) -> Outcome:
    """One call: written, allowed, run, written. A tool that fails gives the model words; the run goes on."""
    started = time.monotonic()
    tool = job.plan.by_name.get(call.name)
    try:
        if tool is None:
            raise ToolError(f"Unknown tool '{call.name}'. Available tools: {', '.join(job.plan.by_name) or 'none'}")
        if call.problem:
            raise ToolError(call.problem)
        preview = tool.preview(call, job.folders)
    except ToolError as error:  # it cannot work, so nobody is asked
        spec = ToolSpec(call.name, "", {}, tier="none")
        await link.begin(call, spec, "")
        outcome = Outcome(str(error), success=False)
    else:
        decision = await link.begin(call, tool.spec, preview)
        if isinstance(decision, Deny):
            outcome = Outcome(denial(decision), success=False)
        else:
            try:
                if decision.args is None:
                    outcome = await tool(call, job.folders, link)
                else:
                    outcome = await _run_edited(tool, call, decision.args, job, link)
            except ToolError as error:
                outcome = Outcome(str(error), success=False)
            except Stop:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary to tools: a bug there must not end the run
                outcome = Outcome(f"{call.name} failed: {type(error).__name__}: {error}", success=False)
    if len(outcome.text) * 4 > INLINE_BYTES:
        outcome = inline(outcome, call, job.folders)
    link.finish(call, outcome, round((time.monotonic() - started) * 1000))
    return outcome


async def _run_edited(tool: Tool, call: Call, args: dict[str, Any], job: Job, link: Link) -> Outcome:
    """The call with the arguments a person gave it, of which the model is told."""
    try:
        outcome = await tool(Call(call.id, call.name, args), job.folders, link)
    except ToolError as error:
        outcome = Outcome(str(error), success=False)
    return msgspec.structs.replace(outcome, text=f"{edited(args)}\n{outcome.text}")


def inline(outcome: Outcome, call: Call, folders: Folders) -> Outcome:
    """The outcome with as much of its text as goes to the model, the whole of it in a file."""
    if outcome.file:
        return outcome
    text, file = cut(outcome.text, spill=lambda: folders.spill(f"{call.name}.txt"))
    return msgspec.structs.replace(outcome, text=text, file=str(file or ""))
