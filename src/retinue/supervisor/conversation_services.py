"""The services of a conversation: turns that the user can interrupt, and the wait for the next message."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from retinue.concurrency import start_task
from retinue.core.approvals import Deny, describe_denial
from retinue.core.events import INTERRUPTED, RunWaiting, ToolCall
from retinue.core.messages import Call
from retinue.core.ports import BrokenTurn, Outcome
from retinue.supervisor.approvals import TURN_INTERRUPTED
from retinue.supervisor.child_services import join_all
from retinue.supervisor.run import Run
from retinue.supervisor.run_events import copy_args, write_lost_result, write_message
from retinue.supervisor.tree import Tree

T = TypeVar("T")
INTERRUPTED_CALL = (
    "The user interrupted this call before it had a result, so nobody knows whether it took effect. "
    "Look at how things are before you make it again."
)
NOT_RUN_CALL = "The user interrupted the turn before this call: it was not run."


class ConversationServices(msgspec.Struct, eq=False, gc=False):
    """The services of one conversation. Implements ConversationTurns. `spoken` holds the pieces of text of the model
    call in flight."""

    tree: Tree
    run: Run
    spoken: list[str] | None

    async def run_interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        run, task = self.run, start_task(work)
        run.attach_message(task)
        try:
            if run.leaving:
                run.interrupt_turn()
            return await task
        except asyncio.CancelledError:
            if not run.is_interrupted or run.is_stopping:
                raise
            await join_all([child for child in run.children if child.stopping is not None])
            return None
        finally:
            run.attach_message(None)

    def break_off_turn(self, calls: Sequence[Call]) -> BrokenTurn:
        spoken = "".join(self.spoken or ())
        if self.spoken is not None:
            self.spoken.clear()
        if spoken.strip():
            write_message(self.tree, self.run, spoken, is_final=True)
        return BrokenTurn(spoken if spoken.strip() else "", {call.id: self._break_off_call(call) for call in calls})

    def _break_off_call(self, call: Call) -> Outcome:
        tree, run = self.tree, self.run
        has_begun = any(call.id == begun.call_id for begun in run.view.calls)
        if not has_begun:
            tree.write(run, ToolCall(call.id, call.name, copy_args(call.args), tier="none"))
        text = INTERRUPTED_CALL if has_begun else NOT_RUN_CALL
        if call.id in (run.withheld_calls or ()):
            text = describe_denial(Deny(TURN_INTERRUPTED))
        return write_lost_result(tree, run, call.id, call.name, text, code=INTERRUPTED)

    async def wait_for_message(self, waiting: RunWaiting) -> bool:
        if not self.run.view.waits:  # else an earlier process wrote it
            self.tree.write(self.run, waiting)
        if not self.run.inbox:
            await self.run.wait_for_message()
        return not self.run.leaving
