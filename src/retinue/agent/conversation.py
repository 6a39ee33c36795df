"""A conversation: a run that answers message after message, and waits in between.

Each message gets the turns of the ordinary loop, with the limit of turns counted from the message on. A turn that the
user interrupts, that the model refuses or fails in, or that has no more turns ends the answer, not the run. A spent
budget, the deadline and a cancel end it as any other run. Knows the loop and the link; waiting, interrupting and ending
are the supervisor's.
"""

from __future__ import annotations

from retinue.agent.loop import LoopState, run_turns
from retinue.core.errors import ModelError, TurnsSpent
from retinue.core.events import RunWaiting
from retinue.core.messages import (
    INTERRUPTED_TURN,
    NOTICE,
    AssistantTurn,
    ToolTurn,
    UserTurn,
    join_replies,
    last_text,
)
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.results import Ending, ending_texts


async def run_conversation(job: Job, link: Link) -> Ending:
    """Answer the first message, or go on where an earlier process stopped, and then every message that comes. Ends
    `done`, with the newest answer, when somebody ends the conversation."""
    state = LoopState(job)
    waits = job.past is not None and job.past.waits
    waiting = RunWaiting() if waits else await _answer_message(state, job, link)
    while await link.wait_for_message(waiting):
        state.uncounted = state.turn
        waiting = await _answer_message(state, job, link)
    return Ending("done", join_replies(state.thread) or last_text(state.thread) or "")


async def _answer_message(state: LoopState, job: Job, link: Link) -> RunWaiting:
    """Run the turns of one message, and return how they went. Leaves the thread as a model can read it."""
    try:
        ending = await link.run_interruptible(run_turns(state, job, link))
    except TurnsSpent as error:
        return RunWaiting("limited", f"{error}; your next message gets as many again")
    except ModelError as error:
        _complete_thread(state, link)
        return RunWaiting("failed", str(error))
    if ending is None:
        _complete_thread(state, link)
        state.thread.append(UserTurn(INTERRUPTED_TURN, NOTICE))
        return RunWaiting("interrupted")
    if ending.status == "refused":
        return RunWaiting("refused", ending.text or ending_texts("refused", name=link.ref.agent, primary=True)[0])
    return RunWaiting()


def _complete_thread(state: LoopState, link: Link) -> None:
    """Complete a turn that was broken off: what the model had said is its reply, and every call has a result."""
    reply = state.thread[-1]
    if not isinstance(reply, AssistantTurn):
        spoken = link.keep_spoken()
        state.thread += [AssistantTurn(spoken)] if spoken else []
        return
    outcomes = state.outcomes | link.break_off_calls([call for call in reply.calls if call.id not in state.outcomes])
    for call in reply.calls:
        outcome = outcomes[call.id]
        state.thread.append(ToolTurn(call.id, call.name, outcome.text, outcome.success))
