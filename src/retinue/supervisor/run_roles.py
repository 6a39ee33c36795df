"""The roles of a run's Link that are more than methods of the Run: its commands to the runs below it, its conversation
and its files.

`RunServices` makes a role when it is used. A role has no state of its own: it acts on the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from retinue.concurrency import start_task
from retinue.core.approvals import Deny, describe_denial
from retinue.core.control import ResumeOverrides, RunHandle
from retinue.core.errors import ConfigError, RetinueError, ToolError
from retinue.core.events import INTERRUPTED, RunWaiting, ToolCall, Warned
from retinue.core.messages import ASKER, Call
from retinue.core.ports import (
    BrokenTurn,
    HandedFiles,
    Outcome,
    Prices,
    Receipt,
    RunSummary,
    SpawnedRun,
    SpawnOrder,
)
from retinue.core.results import Result
from retinue.log.reading import wait_until_read
from retinue.log.runs import describe_view
from retinue.supervisor.approvals import TURN_INTERRUPTED, Approvals
from retinue.supervisor.run_events import copy_args, write_lost_result, write_message
from retinue.supervisor.run_logs import RunLogs
from retinue.supervisor.run_messages import check_message, send_message
from retinue.supervisor.tree import Run
from retinue.workspaces.handed_files import read_files
from retinue.workspaces.recording import NO_SNAPSHOT, publish_so_far
from retinue.workspaces.workspace import is_empty_folder

T = TypeVar("T")
INTERRUPTED_CALL = (
    "The user interrupted this call before it had a result, so nobody knows whether it took effect. "
    "Look at how things are before you make it again."
)
NOT_RUN_CALL = "The user interrupted the turn before this call: it was not run."
SpawnChildren = Callable[[Run, Sequence[SpawnOrder]], list[SpawnedRun]]
ContinueRun = Callable[[str, int, str, ResumeOverrides], Awaitable[RunHandle[Any]]]


class SharedServices(msgspec.Struct, frozen=True, eq=False):
    """The parts of the supervisor that the services of its runs use."""

    approvals: Approvals
    prices: Prices
    run_logs: RunLogs
    spawn_children: SpawnChildren
    continue_run: ContinueRun


# The runs below


class ChildServices(msgspec.Struct, eq=False, gc=False):
    """The runs below a run: spawns, lists and commands them, and waits for them. Implements ChildRuns and
    ChildCommands."""

    run: Run
    shared: SharedServices

    async def spawn_runs(self, orders: Sequence[SpawnOrder]) -> list[SpawnedRun]:
        children = self.shared.spawn_children(self.run, orders)
        if orders[0].files and orders[0].background:
            await self.shared.run_logs.wait_until_created(self.run.tree.id, [child.run for child in children])
        return children

    async def wait_for(
        self, runs: Sequence[int], *, any: bool = False, seconds: float | None = None
    ) -> list[Result[Any]]:
        children = find_below(self.run, runs)
        if any:
            children = await self._wait_for_any(children, seconds)
        elif children and children[0].queues:
            await self.run.slot.wait_without_slot(join_all(children))
            await self.run.without_stall_timer(self.shared.run_logs.wait_until_written(self.run.tree.id, runs))
        else:
            await join_all(children)
        return [child.result() for child in children]

    async def _wait_for_any(self, wanted: Sequence[Run], seconds: float | None) -> list[Run]:
        if not any(each.finished for each in wanted):
            await self.run.slot.wait_without_slot(_join_any(wanted, seconds))
        ended, run_logs, tree = [each for each in wanted if each.finished], self.shared.run_logs, self.run.tree.id
        kept = [each.ref.run for each in ended if run_logs.is_kept(tree, each.ref.run)]
        if kept:
            await self.run.without_stall_timer(run_logs.wait_until_written(tree, kept))
        return ended

    def list_runs(self) -> list[RunSummary]:
        below = sorted(self.run.view.walk(), key=lambda view: view.number)
        return [describe_view(view, self.run.tree.id) for view in below if view is not self.run.view]

    def cancel_run(self, run: int) -> bool:
        [wanted] = find_below(self.run, [run])
        return wanted.stop("cancelled")

    async def send_message(self, run: int, text: str, *, seconds: float) -> Receipt:
        [wanted] = find_below(self.run, [run])
        try:
            message = check_message(text)
        except ConfigError as error:
            raise ToolError(str(error)) from None
        receipt, tree = await send_message(wanted, message, source=ASKER), wanted.tree
        return await wait_until_read(tree.log, tree.id, run, receipt, seconds=seconds)

    async def continue_run(self, run: int, text: str, *, seconds: float | None, call_id: str) -> int:
        [old] = find_below(self.run, [run])
        self.run.check_wanted()
        waits = call_id if old.parent is self.run else ""  # else its own parent is told of the ending
        overrides = ResumeOverrides(seconds=seconds, files=True, call_id=waits)
        try:
            continued = await self.shared.continue_run(old.tree.id, run, text, overrides)
        except RetinueError as error:
            raise ToolError(str(error)) from None
        return continued.number


def find_below(run: Run, numbers: Sequence[int]) -> list[Run]:
    """Return the runs below `run` with these numbers. Raises ToolError for any other number."""
    found = []
    for number in numbers:
        below = run.tree.find_run(number)
        if below is None or not below.is_below(run):
            raise ToolError(f"There is no agent:{number} below this run.")
        found.append(below)
    return found


async def join_all(runs: Sequence[Run]) -> None:
    """Wait until all runs have ended."""
    for run in runs:
        if not run.finished:
            await run.join()


async def _join_any(runs: Sequence[Run], seconds: float | None) -> None:
    """Wait until one of the runs has ended, for at most `seconds`."""
    joined = [run.join() for run in runs]
    try:
        await asyncio.wait(joined, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in joined:
            each.cancel()


# Conversations and files


class ConversationServices(msgspec.Struct, eq=False, gc=False):
    """The services of one conversation. Implements ConversationTurns. `deltas` belong to the model call in flight."""

    run: Run
    deltas: ReplyDeltas | None

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
        spoken = "" if self.deltas is None else self.deltas.take_text()
        if spoken.strip():
            write_message(self.run, spoken, is_final=True)
        return BrokenTurn(spoken if spoken.strip() else "", {call.id: self._break_off_call(call) for call in calls})

    def _break_off_call(self, call: Call) -> Outcome:
        run = self.run
        has_begun = any(call.id == begun.call_id for begun in run.view.calls)
        if not has_begun:
            run.write(ToolCall(call.id, call.name, copy_args(call.args), tier="none"))
        text = INTERRUPTED_CALL if has_begun else NOT_RUN_CALL
        if call.id in (run.withheld_calls or ()):
            text = describe_denial(Deny(TURN_INTERRUPTED))
        return write_lost_result(run, call.id, call.name, text, code=INTERRUPTED)

    async def wait_for_message(self, waiting: RunWaiting) -> bool:
        if not self.run.view.waits:  # else an earlier process wrote it
            self.run.write(waiting)
        if not self.run.inbox:
            await self.run.wait_for_message()
        return not self.run.leaving


class FileServices(msgspec.Struct, eq=False, gc=False):
    """The files that a run hands to other runs and gets from them. Implements FileExchange."""

    run: Run

    async def publish_workspace(self, name: str) -> str:
        folders = self.run.folders
        if not folders.snapshots or is_empty_folder(folders.path):
            return ""
        try:
            warning, folder = await asyncio.to_thread(publish_so_far, folders, name, self.run.ref.run)
        except (RetinueError, OSError) as error:  # a full disk costs the copy, not the answer
            warning, folder = NO_SNAPSHOT.format(why=f"could not be copied: {error}"), ""
        if warning:
            self.run.write(Warned(warning, code="workspace"))
        return folder

    async def read_handed_files(self, run: int, names: Sequence[str], limit: int) -> HandedFiles:
        [wanted] = find_below(self.run, [run])
        team, handed = wanted.view.team, HandedFiles()
        given: Sequence[Run] = [wanted]
        if wanted.plan.team is not None or team is not None:
            decided = None if team is None else team.decided
            given = [each for each in wanted.children if decided is None or each.ref.run == decided.member_run]
        for each in given:  # of an undecided team, the first member that has the first file
            handed = await asyncio.to_thread(read_files, each.folders, names, limit)
            if names[0] in handed.found:
                break
        return handed

    def fit_event_text(self, text: str) -> tuple[str, str]:
        return self.run.folders.fit_event_text(text)


class ReplyDeltas(msgspec.Struct, eq=False, gc=False):
    """The callback for the deltas of one model call. It shows each delta with its offset in the reply, and keeps the
    pieces of text."""

    run: Run
    turn: int
    offset: int = 0
    _texts: list[str] | None = None

    def __call__(self, kind: str, text: str) -> None:
        if kind == "retry":
            self.offset, self._texts = 0, None
            if not self.run.ending:
                self.run.write(Warned(text, code="retry"))
            return
        self.run.show_delta(kind, text, self.turn, self.offset)
        if kind == "text":
            self.offset += len(text)
            if self._texts is None:
                self._texts = []
            self._texts.append(text)

    def take_text(self) -> str:
        """Return the text so far, and forget it."""
        texts, self._texts = self._texts, None
        return "".join(texts or ())
