"""The owner check of a project: settings and agents of another user are refused, wherever the project is.

The project folder is searched upward from the current folder, so it may lie in a folder that others can write, such as
/tmp. Files that another user owns or can write could run commands as the caller. The same holds for root in a user's
folder. The user can accept an owner for a folder (`retinue trust --owner`); the answer is stored next to those for
settings (`trust.py`).
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path

from retinue.config.trust import read_accepted_owner
from retinue.core.errors import ConfigError
from retinue.files.state_owner import name_user

OTHER_USER = (
    "{path} belongs to {owner}, and you are {user}: what another user wrote could run commands as you. Run this as "
    "{owner}, or in a project of your own (`retinue init FOLDER`); if you trust {owner}, accept it with `retinue trust "
    "--owner` in {folder}"
)
WRITABLE = "{who} may write {path}, so it could run their commands as you: `chmod {mode} {path}`"


def check_owner(path: Path, *, project: Path, modes: bool = True) -> None:
    """Raise ConfigError if another user owns the path or its link target, or (with `modes`) if others may write it. A
    path that does not exist passes."""
    for status in _read_statuses(path):
        if status.st_uid != os.geteuid() and status.st_uid != read_accepted_owner(project):
            raise ConfigError(
                OTHER_USER.format(
                    path=path, owner=name_user(status.st_uid), user=name_user(os.geteuid()), folder=project
                )
            )
        if stat.S_ISLNK(status.st_mode) or not modes:
            continue
        if status.st_mode & stat.S_IWOTH:
            raise ConfigError(WRITABLE.format(who="every user of this machine", path=path, mode="o-w"))
        if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid, status.st_uid):
            raise ConfigError(WRITABLE.format(who="other users of its group", path=path, mode="g-w"))


def check_owners_between(project: Path, path: Path) -> None:
    """Check the path and every folder between the project and the path."""
    steps = path.relative_to(project).parts
    for at in range(1, len(steps) + 1):
        check_owner(project.joinpath(*steps[:at]), project=project)


def find_other_owners(paths: list[Path]) -> set[int]:
    """Return the users other than the caller who own one of the paths."""
    return {status.st_uid for path in paths for status in _read_statuses(path)} - {os.geteuid()}


def _read_statuses(path: Path) -> list[os.stat_result]:
    """Return the status of a path and, for a link, of its target."""
    found = []
    for follow in (False, True):
        try:
            found.append(path.stat(follow_symlinks=follow))
        except OSError:
            break
    return found


def _is_private_group(group: int, owner: int) -> bool:
    """Return True if only the owner is in the group, as on systems where each user has a group of the same name."""
    try:
        found = grp.getgrgid(group)
    except KeyError:
        return False
    name = name_user(owner)
    return found.gr_name == name and set(found.gr_mem) <= {name}
