"""The services of the members of a team and of runs that work in rounds: finding the team, and handing files over."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence

import msgspec

from retinue.core.errors import RetinueError
from retinue.core.events import Warned
from retinue.core.ports import HandedFiles, RunningTeam
from retinue.files.content import read_small_file
from retinue.files.opening import RefusedFile, open_folder
from retinue.supervisor.child_services import find_below
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree
from retinue.workspaces.recording import NO_SNAPSHOT, publish_so_far
from retinue.workspaces.run_folders import RunFolders
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
            handed = await asyncio.to_thread(read_own_files, each.folders, names, limit)
            if names[0] in handed.found:
                break
        return handed

    def fit_event_text(self, text: str) -> tuple[str, str]:
        return self.run.folders.fit_event_text(text)


def read_own_files(folders: RunFolders, names: Sequence[str], limit: int) -> HandedFiles:
    """Read files from the workspace of a run. A shared workspace is refused: none of its files is known to be the
    run's own."""
    found: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    if folders.is_shared:
        return HandedFiles(refused=dict.fromkeys(names, "is not read from a shared workspace"))
    try:
        folder = open_folder(folders.path)
    except OSError:
        return HandedFiles()
    try:
        for name in names:
            try:
                found[name] = read_small_file(name, limit, dir_fd=folder)
            except FileNotFoundError:
                continue
            except RefusedFile as error:
                refused[name] = error.text
            except OSError as error:
                refused[name] = f"cannot be read: {error.strerror}"
    finally:
        os.close(folder)
    return HandedFiles(found, refused)
