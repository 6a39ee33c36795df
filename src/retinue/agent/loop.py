"""The agent loop: ask the model, run the tools it calls, and repeat until the model answers.

The loop knows the link and the tools. It does not know where tools run, who watches, or what the run may spend.
Anything that ends the loop early is an exception; the supervisor turns it into the run's one ending. A conversation
runs the same turns for each of its messages (`agent/runs.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence

import msgspec

from retinue.agent.local_tools import bind_tool
from retinue.agent.tool_calls import HookedTool, RefusedTool, run_tool_call
from retinue.concurrency import TaskOwner
from retinue.core.errors import TurnsSpent
from retinue.core.events import Inbox, TurnEnded, TurnStarted
from retinue.core.messages import (
    NOTICE,
    REMINDER,
    AssistantTurn,
    Call,
    Reply,
    ToolTurn,
    Turn,
    UserTurn,
    find_last_text,
    join_replies,
)
from retinue.core.plans import Job
from retinue.core.ports import Link, Outcome, Tool
from retinue.core.profiles import SPAWN_TOOLS
from retinue.core.results import FINAL_ANSWER, Ending
from retinue.protocol.subagent_tools import list_spellings
from retinue.tools.arguments import find_unknown_argument

REMINDER_TEXT = "You have not given your answer yet: call the final_answer tool with it."
NO_ANSWER = "{who} '{name}' ended without calling final_answer"
EXCLUDED = "One reply cannot call {names} together, so none of them ran. Call only one."
UNKNOWN_TOOL = "Unknown tool '{name}'. Available tools: {tools}"


class LoopState:
    """The thread of a run and the number of its newest turn.

    - `outcomes`: outcomes of the newest turn's calls, by call id.
    - `uncounted`: the number of first turns that do not count towards the turn limit.
    - `past`: the history left by an earlier process or by a continued run. None after the first turn."""

    __slots__ = ("outcomes", "past", "thread", "turn", "uncounted")

    def __init__(self, job: Job) -> None:
        self.thread: list[Turn] = list(job.thread)
        self.past = past = job.past
        self.turn = 0 if past is None else past.turn if past.reply is not None or past.waits else past.turn - 1
        self.uncounted = 0 if past is None else past.uncounted
        self.outcomes: dict[str, Outcome] = {}

    @property
    def answer(self) -> str:
        """The answer of the run so far."""
        return join_replies(self.thread) or self.last_text

    @property
    def last_text(self) -> str:
        """The newest text of the model."""
        return find_last_text(self.thread)

    def begin_message(self) -> None:
        """Count the turns towards the limit from here on, for the next message of a conversation."""
        self.uncounted = self.turn

    def remind(self, text: str, source: str, link: Link) -> None:
        """Add a message to the thread that asks the model to continue, and write it to the log."""
        self.thread.append(UserTurn(text, source))
        link.emit(Inbox(text, source=source))

    def add_results(self, calls: Sequence[Call]) -> Ending | None:
        """Add the results of the calls of a reply to the thread. Return the first run ending among the outcomes."""
        ending = None
        for call in calls:
            outcome = self.outcomes[call.id]
            self.thread.append(ToolTurn(call.id, call.name, outcome.text, outcome.success))
            ending = ending or outcome.ending
        return ending

    def complete_broken_turn(self, link: Link, note: str = "") -> None:
        """Complete a turn that was broken off: the text so far becomes the model's reply, and every call gets a result.
        Add the `note` for the model after them."""
        reply = self.thread[-1]
        calls = reply.calls if isinstance(reply, AssistantTurn) else ()
        broken = link.conversation.break_off_turn([call for call in calls if call.id not in self.outcomes])
        self.outcomes |= broken.outcomes
        self.add_results(calls)
        if broken.spoken:
            self.thread.append(AssistantTurn(broken.spoken))
        if note:
            self.thread.append(UserTurn(note, NOTICE))


async def run_turns(state: LoopState, job: Job, link: Link) -> Ending:
    """Run turns until the model has an answer, and return the answer as an ending.

    If `state.past` has the reply of a half-finished turn, finish that turn first, without asking the model again."""
    while True:
        past, state.past = state.past, None
        if past is not None and past.reply is not None:
            reply, state.outcomes, is_written = past.reply, dict(past.outcomes), past.ended
        else:
            reply, is_written = await _ask_model(state, job, link), False
            if reply.calls:
                reply, state.outcomes = _resolve_names(reply, job.plan.tools), {}
                if len(reply.calls) > 1:
                    reply = _refuse_excluded(reply, job.plan.tools)
        if reply.refused:
            return Ending("refused", reply.text)
        calls, ending = reply.calls, None
        state.thread.append(AssistantTurn(reply.text, calls, reply.thoughts, reply.natives))
        if calls:
            if len(calls) == 1 and not state.outcomes:
                [call] = calls
                finished = await run_tool_call(call, _choose_tool(call, job), job.folders, link)
                state.outcomes[call.id] = finished.shown
            else:
                await _run_together(calls, state.outcomes, job, link)
            ending = state.add_results(calls)
        if not is_written:
            link.emit(TurnEnded(state.turn))
        if not calls and not await link.children_done():
            ending = _end_or_remind(state, job, link)
        if ending is not None:
            return ending


def _ask_model(state: LoopState, job: Job, link: Link) -> Awaitable[Reply]:
    """Start a turn: add the new messages to the thread, and ask the model for its reply. Raises TurnsSpent at the
    limit."""
    turn, most = state.turn + 1, job.max_turns
    if most is not None and turn - state.uncounted > most:
        raise TurnsSpent("limit of 1 turn reached" if most == 1 else f"limit of {most} turns reached")
    state.turn = turn
    if messages := link.inbox():
        state.thread += messages
    link.emit(TurnStarted(turn))
    return link.complete(turn, job.system, state.thread, job.plan.specs)


def _resolve_names(reply: Reply, tools: Mapping[str, Tool]) -> Reply:
    """Return the reply with our own names of the subagent tools, where a call uses another spelling."""
    for call in reply.calls:  # fast path: nearly always, all names are known
        if call.name not in tools:
            break
    else:
        return reply
    return msgspec.structs.replace(reply, calls=tuple(_resolve_name(call, tools) for call in reply.calls))


def _resolve_name(call: Call, tools: Mapping[str, Tool]) -> Call:
    for name in list_spellings(call.name):
        if name in tools and name in SPAWN_TOOLS:
            return call if name == call.name else msgspec.structs.replace(call, name=name)
    return call


def _refuse_excluded(reply: Reply, tools: Mapping[str, Tool]) -> Reply:
    """Return the reply with its calls of exclusive tools refused, if there are several of them."""
    names = [call.name for call in reply.calls if call.name in tools and tools[call.name].spec.exclusive]
    if len(names) < 2:
        return reply
    problem = EXCLUDED.format(names=" and ".join(names))
    calls = [msgspec.structs.replace(call, problem=problem) if call.name in names else call for call in reply.calls]
    return msgspec.structs.replace(reply, calls=tuple(calls))


def _end_or_remind(state: LoopState, job: Job, link: Link) -> Ending | None:
    """Return the ending of a run whose model calls no more tools, or None if the run continues. If `final_answer` is
    among its tools and was not called, the run is reminded once, then fails."""
    if FINAL_ANSWER not in job.plan.tools:
        return Ending("done", state.answer)
    sources = [turn.source for turn in state.thread if isinstance(turn, UserTurn)]
    newest = next((source for source in reversed(sources) if source in ("task", REMINDER)), "task")
    if newest == REMINDER:  # already reminded, since the newest task
        text = NO_ANSWER.format(who="Subagent" if link.ref.run else "Run", name=link.ref.agent)
        return Ending("failed", text, error=text)
    state.remind(REMINDER_TEXT, REMINDER, link)
    return None


async def _run_together(calls: Sequence[Call], outcomes: dict[str, Outcome], job: Job, link: Link) -> None:
    """Run the calls of one reply at the same time. Add each outcome to `outcomes` as soon as possible."""
    link.write_calls([(call, _choose_tool(call, job).spec) for call in calls if call.id not in outcomes])
    owner = TaskOwner()
    tasks = [owner.start(_recall_or_run(call, outcomes, job, link)) for call in calls]
    try:
        await asyncio.gather(*tasks)
    except BaseException as error:
        owner.cancel()
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling() > 1:  # cancelled twice before it could react
            owner.cancel()
        await _wait_for_cleanup(tasks, was_told=isinstance(error, asyncio.CancelledError))
        raise


async def _recall_or_run(call: Call, outcomes: dict[str, Outcome], job: Job, link: Link) -> None:
    """Run a call, unless an earlier process has run it and `outcomes` has the outcome."""
    known = outcomes.get(call.id)
    if known is None:
        finished = await run_tool_call(call, _choose_tool(call, job), job.folders, link)
        outcomes[call.id] = finished.shown
        return
    tool = job.plan.tools.get(call.name)
    if known.success and tool is not None and (call.name == FINAL_ANSWER or tool.spec.exclusive):
        outcomes[call.id] = await tool(call, job.folders, link)  # the log keeps the text, not the ending


def _choose_tool(call: Call, job: Job) -> Tool:
    """Return the tool that runs a call, bound to the session and the hooks of the run. A call that cannot run, for
    example of an unknown tool or with unreadable arguments, gets a tool that refuses it."""
    tool = job.plan.tools.get(call.name)
    if tool is None:
        missing = "" if job.plan.explain_missing is None else job.plan.explain_missing(call.name)
        available = ", ".join(job.plan.tools) or "none"
        return RefusedTool(call, missing or UNKNOWN_TOOL.format(name=call.name, tools=available))
    problem = call.problem or find_unknown_argument(call, tool.spec)
    if problem:
        return RefusedTool(call, problem)
    if job.session is not None:
        tool = bind_tool(tool, job.plan, job.session)
    hooks = job.plan.profile.hooks
    return tool if hooks is None else HookedTool(tool, hooks)


async def _wait_for_cleanup(tasks: list[asyncio.Task[None]], *, was_told: bool) -> None:
    """Wait until all cancelled `tasks` have ended.

    A second cancel of the run means "hurry" and is passed on to the tasks. `was_told` says that the run itself was
    cancelled before. If a call ended the run instead, the first cancel to arrive here is not passed on."""
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            for task in pending if was_told else ():
                task.cancel()
            was_told = True
    for task in tasks:
        task.cancelled() or task.exception()
