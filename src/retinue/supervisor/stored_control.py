"""Control of trees without a live process: reads the log and applies changes. Cannot start or steer runs, and asks no
questions.

`StoredTrees` is the part of it that the supervisor shares: for every tree that does not run in its process, and for the
copied workspaces of all its runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from retinue.concurrency import finish_despite_cancel
from retinue.core.approvals import Answered, Approval, QuestionChange
from retinue.core.changes import ApplyPlan, ChangedLines, Changes, RunCopy
from retinue.core.control import (
    INTERRUPTED,
    NOT_AT_WORK,
    ClientHandle,
    Control,
    RunHandle,
    TreeInfo,
)
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader, Receipt, RunSummary
from retinue.core.results import ChangedFile, Result
from retinue.log import lookup
from retinue.log.listing import summarize_trees
from retinue.log.runs import Runs, RunView, describe_view
from retinue.workspaces.copies import (
    CopiedWorkspace,
    TargetFolder,
    explain_missing_copy,
    find_copy,
    is_unmade,
    list_copies,
    summarize_copies,
)

NO_PROCESS = "no process is running this tree, and {what} needs one"
NOT_ENDED = "{who} has not ended yet: wait for it, or `retinue cancel {who}`"
Phase = Literal["ended", "waiting", "at_work"]  # "waiting" is a conversation between two turns, whose files are at rest


class StoredTrees:
    """The commands of Control that read the trees in a log and apply changes. `state` is the folder with the workspaces
    of their runs, and changes are applied to `project`. Trees that this process itself writes, as `writer`, do not
    count as live: a subclass that has their runs overrides the reading methods and `_find_phase_here`."""

    def __init__(self, log: LogReader, state: str, *, project: str, writer: str = "") -> None:
        self._log = log
        self.writer = writer
        self._folder = state
        self._target = TargetFolder(project, state=state)

    # Reading

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        result = await self.result(tree, run)
        if result is None:
            raise ConfigError(INTERRUPTED.format(tree=tree, run=run))
        return result

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        view = await self._find_view(tree, run)
        return None if view.ended is None else view.result(tree)

    async def describe_run(self, tree: str, run: int = 0) -> RunSummary:
        return describe_view(await self._find_view(tree, run), tree)

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        if live:
            return []
        found = []
        for each in await summarize_trees(self._log, await self._log.list_trees()):
            writer = each.stored.writer
            is_at_work = not each.ended and writer != self.writer
            found.append(describe_tree(each.runs, writer=writer if is_at_work else None))
        return found

    async def find_run(self, name: str) -> RunRef:
        return await lookup.find_run(self._log, name)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield the stored events. No more events will come."""
        for event in await self._read(tree):
            if event.seq > after:
                yield event

    async def _find_view(self, tree: str, run: int) -> RunView:
        [view] = await self._find_views(tree, [run])
        return view

    async def _find_views(self, tree: str, runs: Sequence[int]) -> list[RunView]:
        known = Runs.of(tree, await self._read(tree)).runs
        for run in runs:
            if run not in known:
                raise NotFound(f"{tree} has no run {run}")
        return [known[run] for run in runs]

    async def _read(self, tree: str) -> Sequence[Event]:
        events = await self._log.read(tree)
        if not events:
            raise NotFound(f"there is no tree '{tree}' in the log")
        return events

    # Changes

    async def list_copies(self, tree: str, run: int | None = None) -> list[RunCopy]:
        if run is None:
            return await asyncio.to_thread(summarize_copies, self._folder, tree)
        view = (await self._find_view(tree, run)).find_presented()
        copy = await asyncio.to_thread(find_copy, self._folder, tree, view.number)
        if copy is not None:
            return [await asyncio.to_thread(copy.summarize)]
        if view.number == 0:  # stands for the copies below, unless it is a team: other members' work is not wanted
            found = await asyncio.to_thread(list_copies, self._folder, tree)
            below = [each for each in found if each.workspace.source == each.workspace.project]
            if below:
                return [await asyncio.to_thread(each.summarize) for each in below]
        if not is_unmade(view.spawned):
            raise ConfigError(explain_missing_copy(f"{tree}/{view.number}", view.spawned))
        return []

    async def changes(self, tree: str, run: int = 0) -> Changes:
        copy = await self._find_copy(tree, run)
        if copy.live:
            raise ConfigError(NOT_ENDED.format(who=copy.name))
        return await asyncio.to_thread(copy.describe, self._target.path)

    async def diff(self, tree: str, run: int = 0, *, stat_columns: int | None = None) -> str:
        copy = await self._find_copy(tree, run)
        how = "-p" if stat_columns is None else f"--stat={stat_columns}"
        shown = await asyncio.to_thread(copy.diff, how, "-M")
        return shown.decode("utf-8", "backslashreplace")

    async def count_changed_lines(self, tree: str, run: int = 0) -> list[ChangedLines]:
        return await asyncio.to_thread((await self._find_copy(tree, run)).count_changed_lines)

    async def plan_apply(self, tree: str, runs: Sequence[int]) -> ApplyPlan:
        copies = await self._find_applicable(tree, runs)
        return await asyncio.to_thread(self._target.plan_apply, tree, copies)

    async def apply_planned(self, tree: str, runs: Sequence[int], *, digest: str) -> None:
        copies = await self._find_applicable(tree, runs)
        await finish_despite_cancel(asyncio.to_thread(self._target.apply_planned, copies, digest=digest))

    async def undo_interrupted_apply(self) -> bool:
        return await finish_despite_cancel(asyncio.to_thread(self._target.undo_interrupted_apply))

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        [copy] = await self._find_applicable(tree, [run])
        return await finish_despite_cancel(asyncio.to_thread(self._target.apply, copy))

    async def _find_applicable(self, tree: str, runs: Sequence[int]) -> list[CopiedWorkspace]:
        """Return the copied workspaces of runs whose files are at rest. Raises ConfigError for a run at work."""
        if not runs:
            raise ConfigError("there is no run to apply the changes of")
        views = await self._find_views(tree, list(dict.fromkeys(runs)))
        return [await self._open_copy(tree, view, at_rest=True) for view in views]

    async def _find_copy(self, tree: str, run: int) -> CopiedWorkspace:
        return await self._open_copy(tree, await self._find_view(tree, run))

    async def _open_copy(self, tree: str, view: RunView, *, at_rest: bool = False) -> CopiedWorkspace:
        presented = view.find_presented()
        phase = await self._find_phase(tree, view)
        if phase == "ended" and presented is not view:
            phase = await self._find_phase(tree, presented)
        if at_rest and phase == "at_work":
            raise ConfigError(NOT_ENDED.format(who=f"{tree}/{view.number}"))
        copy = find_copy(self._folder, tree, presented.number, live=phase != "ended")
        if copy is None:
            raise RetinueError(explain_missing_copy(presented.path, presented.spawned))
        return copy

    async def _find_phase(self, tree: str, view: RunView) -> Phase:
        """Return the phase of a run. A run that another process has is at work until it ends: only that process knows
        whether its files are at rest. A run whose process is gone counts as ended."""
        here = self._find_phase_here(tree, view.number)
        if here is not None:
            return here
        if view.ended is not None:
            return "ended"
        writer = (await self._log.read_status(tree)).writer
        return "ended" if writer is None or writer == self.writer else "at_work"

    def _find_phase_here(self, tree: str, run: int) -> Phase | None:
        """Return the phase of a run that this process has, or None."""
        return None


class StoredControl(StoredTrees):
    """Control of the trees in a log. Refuses the commands that need a process, whatever their arguments."""

    async def prepare(self, *_: Any, **__: Any) -> None:
        """Do nothing: no run is started here."""

    async def spawn(self, *_: Any, **__: Any) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="a new run"))

    async def open_client(self, *_: Any) -> ClientHandle:
        raise ConfigError(NO_PROCESS.format(what="a client"))

    async def resume(self, *_: Any, **__: Any) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="resuming a tree"))

    async def continue_run(self, *_: Any, **__: Any) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="continuing a run"))

    async def change_model(self, *_: Any, **__: Any) -> str:
        raise ConfigError(NO_PROCESS.format(what="another model"))

    def serve_caller(self, *_: Any) -> AbstractContextManager[None]:
        raise ConfigError(NO_PROCESS.format(what="serving a caller"))

    async def send(self, *_: Any, **__: Any) -> Receipt:
        return NOT_AT_WORK

    async def cancel(self, *_: Any, **__: Any) -> bool:
        return False

    async def interrupt_turn(self, *_: Any, **__: Any) -> bool:
        return False

    async def end_conversation(self, *_: Any, **__: Any) -> bool:
        return False

    async def kill(self, *_: Any, **__: Any) -> None:
        """Do nothing: no run is at work here."""

    async def pending(self, *_: Any, **__: Any) -> list[Approval]:
        return []

    async def watch_questions(self, *_: Any, **__: Any) -> AsyncGenerator[QuestionChange]:
        for question in await self.pending():
            yield question

    async def answer(self, *_: Any, **__: Any) -> Answered:
        return "unknown"

    @asynccontextmanager
    async def attend(self, *_: Any, **__: Any) -> AsyncIterator[None]:
        yield  # nothing asks here

    async def wait_until_idle(self, *_: Any, **__: Any) -> None:
        raise ConfigError(NO_PROCESS.format(what="waiting for an idle tree"))

    async def close(self) -> None:
        """Do nothing: the log belongs to whoever opened it."""


if TYPE_CHECKING:
    _stored: type[Control] = StoredControl  # mypy checks that every command is there


def describe_tree(view: Runs, *, writer: str | None = None, root: int = 0) -> TreeInfo:
    rows = [describe_view(each, view.tree) for each in view.runs.values()]
    return TreeInfo(tree=view.tree, live=writer is not None, runs=rows, writer=writer, root=root)
