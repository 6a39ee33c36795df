"""The services of a run for the runs below it: spawning, waiting and commands. They hold no state of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError, RetinueError, ToolError
from retinue.core.messages import ASKER
from retinue.core.ports import Receipt, RunSummary, SpawnedRun, SpawnOrder
from retinue.core.results import Result
from retinue.log.reading import wait_until_read
from retinue.log.runs import describe_view
from retinue.supervisor.run import Run
from retinue.supervisor.shared_services import SharedServices
from retinue.supervisor.tree import Tree, check_message


class ChildServices(msgspec.Struct, eq=False, gc=False):
    """Spawning, waiting for and listing runs below a run. Implements ChildRuns."""

    tree: Tree
    run: Run
    shared: SharedServices

    async def spawn_runs(self, orders: Sequence[SpawnOrder]) -> list[SpawnedRun]:
        tickets = self.shared.spawn_children(self.tree, self.run, orders)
        if orders[0].files and orders[0].background:
            await self.shared.files.wait_until_created(self.tree.id, [ticket.run for ticket in tickets])
        return tickets

    async def wait_for(
        self, runs: Sequence[int], *, any: bool = False, seconds: float | None = None
    ) -> list[Result[Any]]:
        children = find_below(self.tree, self.run, runs)
        if any:
            children = await self._wait_for_any(children, seconds)
        elif children and children[0].queues:
            await self.run.slot.wait_without_slot(join_all(children))
            await self.run.without_stall_timer(self.shared.files.written(self.tree.id, runs))
        else:
            await join_all(children)
        return [child.result() for child in children]

    async def _wait_for_any(self, wanted: Sequence[Run], seconds: float | None) -> list[Run]:
        if not any(each.finished for each in wanted):
            await self.run.slot.wait_without_slot(_join_any(wanted, seconds))
        ended, files = [each for each in wanted if each.finished], self.shared.files
        kept = [each.ref.run for each in ended if files.keeps(self.tree.id, each.ref.run)]
        if kept:
            await self.run.without_stall_timer(files.written(self.tree.id, kept))
        return ended

    def list_runs(self) -> list[RunSummary]:
        below = sorted(self.run.view.walk(), key=lambda view: view.number)
        return [describe_view(view, self.tree.id) for view in below if view is not self.run.view]


class ChildCommandServices(msgspec.Struct, eq=False, gc=False):
    """The commands of a run to the runs below it. Implements ChildCommands."""

    tree: Tree
    run: Run
    shared: SharedServices

    def cancel_run(self, run: int) -> bool:
        [wanted] = find_below(self.tree, self.run, [run])
        return wanted.stop("cancelled")

    async def send_message(self, run: int, text: str, *, seconds: float) -> Receipt:
        find_below(self.tree, self.run, [run])
        try:
            message = check_message(text)
        except ConfigError as error:
            raise ToolError(str(error)) from None
        receipt = await self.tree.send_message(run, message, source=ASKER)
        return await wait_until_read(self.tree.log, self.tree.id, run, receipt, seconds=seconds)

    async def continue_run(self, run: int, text: str, *, seconds: float | None, call_id: str) -> int:
        [old] = find_below(self.tree, self.run, [run])
        self.run.check_wanted()
        waits = call_id if old.parent is self.run else ""  # else its own parent is told of the ending
        overrides = ResumeOverrides(seconds=seconds, files=True, call_id=waits)
        try:
            continued = await self.shared.continue_run(self.tree.id, run, text, overrides)
        except RetinueError as error:
            raise ToolError(str(error)) from None
        return continued.number


def find_below(tree: Tree, run: Run, numbers: Sequence[int]) -> list[Run]:
    """Return the runs below `run` with these numbers. Raises ToolError for any other number."""
    found = []
    for number in numbers:
        below = tree.find_run(number)
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
