"""The files that a run is given in its workspace, and those that it hands to its parent.

Programs in a sandbox may have written there before, so no link is followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from retinue.core.errors import RetinueError
from retinue.core.limits import EVENT_BYTES
from retinue.core.ports import Folders, HandedFiles
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.files.opening import RefusedFile, open_folder, open_parent, stat_entry
from retinue.workspaces.run_folders import RunFolders


def put_files(folders: Folders, files: Sequence[str], *, is_resumed: bool) -> None:
    """Copy files into the workspace of a run. A link with the name of a file is replaced. A resumed run keeps the
    other entries, which an earlier process has copied. Raises RetinueError."""
    for file in map(Path, files):
        try:
            with open_parent(folders.workspace, file.name) as (folder, name):
                found = stat_entry(name, folder)
                if not is_resumed or found is None or stat.S_ISLNK(found.st_mode):
                    replace_file(name, read_small_file(file, EVENT_BYTES), dir_fd=folder)
        except OSError as error:
            raise RetinueError(f"the file {file.name} of the task could not be copied: {error}") from None


def read_files(folders: RunFolders, names: Sequence[str], limit: int) -> HandedFiles:
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
