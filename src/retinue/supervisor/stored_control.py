"""Control of trees without a live process: reads the log and applies changes. Cannot start or steer runs, and asks no
questions.

`Supervisor` uses it for every tree that does not run in its process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retinue.core.approvals import Answered, Approval, Decision, QuestionChange
from retinue.core.caller import Caller
from retinue.core.changes import ApplyPlan, RunCopy
from retinue.core.control import (
    INTERRUPTED,
    NO_OVERRIDES,
    Changes,
    ClientHandle,
    ClientOptions,
    Control,
    ResumeOverrides,
    RunHandle,
    SpawnBelow,
    TreeInfo,
)
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader, Receipt, RunSummary
from retinue.core.profiles import Profile, Task
from retinue.core.results import ChangedFile, Result
from retinue.log import lookup
from retinue.log.listing import summarize_trees
from retinue.log.runs import Runs, RunView, describe_view
from retinue.workspaces.atomic_apply import find_unfinished_files, recover_folder
from retinue.workspaces.copies import (
    CopiedWorkspace,
    carry_out_plan,
    explain_missing_copy,
    find_copy,
    is_unmade,
    list_copies,
    plan_apply,
)

NO_PROCESS = "no process is running this tree, and {what} needs one"


class StoredControl:
    """Control of the trees in a log, and their StoredChanges. `state` is the folder with the workspaces of their runs.
    Trees that this process itself writes, as `writer`, do not count as live."""

    def __init__(self, log: LogReader, state: str, *, writer: str = "") -> None:
        self._log = log
        self.writer = writer
        self._state = state
        self._project = str(Path(state).parent)

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
        return [
            describe_tree(each.runs, writer=None if each.ended or each.writer == self.writer else each.writer)
            for each in await summarize_trees(self._log, await self._log.list_trees())
        ]

    async def find_run(self, name: str) -> RunRef:
        return await lookup.find_run(self._log, name)

    async def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield the stored events. No more events will come."""
        for event in await self._read(tree):
            if event.seq > after:
                yield event

    async def _find_view(self, tree: str, run: int) -> RunView:
        view = Runs.of(tree, await self._read(tree)).runs.get(run)
        if view is None:
            raise NotFound(f"{tree} has no run {run}")
        return view

    async def _read(self, tree: str) -> Sequence[Event]:
        events = await self._log.read(tree)
        if not events:
            raise NotFound(f"there is no tree '{tree}' in the log")
        return events

    # Changes

    async def changes(self, tree: str, run: int = 0) -> Changes:
        return await asyncio.to_thread((await self._find_copy(tree, run)).describe)

    async def diff(self, tree: str, run: int = 0, *, live: bool = False) -> str:
        copy = await self._find_copy(tree, run)
        shown = await asyncio.to_thread(copy.diff, "-p", "-M", live=live)
        return shown.decode("utf-8", "backslashreplace")

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        return await asyncio.to_thread((await self._find_copy(tree, run)).apply_to_source)

    async def apply_so_far(self, tree: str, run: int) -> Sequence[ChangedFile]:
        """Apply the changes that a waiting run has made since the last apply."""
        return await asyncio.to_thread((await self._find_copy(tree, run)).apply_so_far)

    # The role StoredChanges

    async def find_copies(self, tree: str, run: int) -> list[RunCopy]:
        view = (await self._find_view(tree, run)).find_presented()
        run = view.number
        copy = find_copy(self._state, tree, run)
        if copy is not None:
            return [copy.summarize()]
        below = [each for each in list_copies(self._state, tree) if each.workspace.source == each.workspace.project]
        if run == 0 and below:
            return [each.summarize() for each in below]
        if not is_unmade(view.spawned):
            raise ConfigError(explain_missing_copy(f"{tree}/{run}", view.spawned))
        return []

    def find_copy(self, tree: str, run: int) -> RunCopy | None:
        copy = find_copy(self._state, tree, run)
        return None if copy is None else copy.summarize()

    def diff_copy(self, copy: RunCopy, *, stat_columns: int | None = None, live: bool = False) -> str:
        how = "-p" if stat_columns is None else f"--stat={stat_columns}"
        return self._open_copy(copy).diff(how, "-M", live=live).decode("utf-8", "backslashreplace")

    def list_changed_lines(self, copy: RunCopy, *, live: bool = False) -> list[dict[str, Any]]:
        return self._open_copy(copy).list_changed_lines(live=live)

    def explain_nothing_to_apply(self, copy: RunCopy) -> str:
        return self._open_copy(copy).explain_nothing_to_apply()

    def list_unapplied(self, tree: str) -> list[str]:
        return [each.name for each in list_copies(self._state, tree) if each.has_unapplied]

    def recover_project(self) -> bool:
        return recover_folder(f"{self._state}/applying", self._project)

    def find_unfinished_files(self) -> list[str]:
        return find_unfinished_files(f"{self._state}/applying", self._project)

    def plan_apply(self, copies: Sequence[RunCopy]) -> ApplyPlan:
        opened = [self._open_copy(copy) for copy in copies]
        plan = plan_apply(opened, self._project)
        return ApplyPlan(
            diff=plan.diff.decode("utf-8", "backslashreplace"),
            count=len(plan.changes),
            conflicts=plan.describe_conflicts(),
            carry_out=partial(carry_out_plan, plan, opened, aside=f"{self._state}/applying"),
        )

    def _open_copy(self, copy: RunCopy) -> CopiedWorkspace:
        found = find_copy(self._state, copy.tree, copy.run)
        if found is None:
            raise RetinueError(f"the workspace of {copy.name} is gone")
        return found

    async def _find_copy(self, tree: str, run: int) -> CopiedWorkspace:
        view = (await self._find_view(tree, run)).find_presented()
        copy = find_copy(self._state, tree, view.number)
        if copy is None:
            raise RetinueError(explain_missing_copy(view.path, view.spawned))
        return copy

    # Commands that need a process

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        """Do nothing: no run is started here."""

    async def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        below: SpawnBelow | None = None,
        caller: Caller | None = None,
        starts_from: str = "",
    ) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="a new run"))

    async def open_client(self, options: ClientOptions) -> ClientHandle:
        raise ConfigError(NO_PROCESS.format(what="a client"))

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="resuming a tree"))

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        raise ConfigError(NO_PROCESS.format(what="continuing a run"))

    async def change_model(self, tree: str, run: int, model: str) -> str:
        raise ConfigError(NO_PROCESS.format(what="another model"))

    def serve_caller(self, caller: Caller) -> AbstractContextManager[None]:
        raise ConfigError(NO_PROCESS.format(what="serving a caller"))

    async def send(self, tree: str, run: int, text: str, *, source: str = "user", message_id: str = "") -> Receipt:
        return Receipt("too_late", why="no such run is at work here")

    async def cancel(self, tree: str, run: int = 0) -> bool:
        return False

    async def interrupt_turn(self, tree: str, run: int = 0) -> bool:
        return False

    async def end_conversation(self, tree: str, run: int = 0) -> bool:
        return False

    async def kill(self, tree: str) -> None:
        """Do nothing: no run is at work here."""

    async def pending(self, tree: str | None = None) -> list[Approval]:
        return []

    async def watch_questions(self, tree: str | None = None) -> AsyncGenerator[QuestionChange]:
        for question in await self.pending(tree):
            yield question

    async def answer(
        self, approval_id: str, decision: Decision, *, by: str, digest: str = "", surface: str = "", key: str = ""
    ) -> Answered:
        return "unknown"

    @asynccontextmanager
    async def attend(self, tree: str | None = None) -> AsyncIterator[None]:
        yield  # nothing asks here

    async def close(self) -> None:
        """Do nothing: the log belongs to whoever opened it."""


if TYPE_CHECKING:
    _stored: type[Control] = StoredControl  # mypy checks that every command is there


def describe_tree(view: Runs, *, writer: str | None = None, root: int = 0) -> TreeInfo:
    rows = [describe_view(each, view.tree) for each in view.runs.values()]
    return TreeInfo(tree=view.tree, live=writer is not None, runs=rows, writer=writer, root=root)
