"""The services of the members of a team and of runs that work in rounds: finding the team, and handing files over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import msgspec

from retinue.core.errors import RetinueError
from retinue.core.events import Warned
from retinue.core.ports import HandedFiles, RunningTeam
from retinue.supervisor.child_services import find_below
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree
from retinue.workspaces.recording import NO_SNAPSHOT, publish_so_far
from retinue.workspaces.run_files import read_files
from retinue.workspaces.workspace import is_empty_folder


class TeamServices(msgspec.Struct, eq=False, gc=False):
    """The place of a run in a team. Implements TeamPlace."""

    run: Run

    def lead_team(self, team: RunningTeam) -> None:
        self.run.find_team().set_result(team)

    async def join_team(self) -> RunningTeam:
        assert self.run.parent is not None
        return await asyncio.shield(self.run.parent.find_team())

    async def wait_for_others(self, awaited: Awaitable[None]) -> None:
        await self.run.without_stall_timer(self.run.slot.wait_without_slot(awaited))


class FileServices(msgspec.Struct, eq=False, gc=False):
    """The files that a run hands to other runs and gets from them. Implements FileExchange."""

    tree: Tree
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
            self.tree.write(self.run, Warned(warning, code="workspace"))
        return folder

    async def read_handed_files(self, run: int, names: Sequence[str], limit: int) -> HandedFiles:
        [wanted] = find_below(self.tree, self.run, [run])
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
