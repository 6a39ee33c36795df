"""Ownership of a state folder: proof that this user made the `.retinue` folder at this place.

The state belongs to the user if the folder and its subfolders have the user as owner, no other user may write them,
none is a link, and `owner.json` carries a signature by the user's key for this place. The place is the path, or the
inode if the folder was moved. A folder that came with a clone or an archive, was copied, or was made by another user
is refused before anything in it is read. `adopt_state_folder` takes over such a folder at the user's request.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path

import msgspec

from retinue.core.errors import ConfigError, RetinueError
from retinue.files.atomic import is_temporary_name, replace_file
from retinue.files.content import read_small_file
from retinue.files.opening import AnyPath
from retinue.files.private import make_private_folder
from retinue.files.state_folder import STATE_FOLDERS
from retinue.files.user_key import has_signature, sign_data

OWNER_FILE = "owner.json"
PURPOSE = "state folder"
MAX_BYTES = 16 * 1024
OTHERS_MAY_WRITE = 0o022
_HARMLESS = frozenset({".gitignore"})

LINK = "{path} is a link, but must be a real folder: remove it"
NO_FOLDER = "{path} is not a folder: remove it"
FOREIGN = (
    "{path} has no signature of yours for this place, so nothing in it is used: it came with a clone or an archive, "
    "was copied, or lost its owner.json, for example to `git clean`. Move it away, or, if it is yours, take it over "
    "with `retinue trust --state`"
)
OTHER_USER = (
    "{path} belongs to {owner}, and you are {user}, so nothing in it is used: run this as {owner}, or take it over "
    "with `{sudo}chown -R {user} {path}` and then `retinue trust --state`"
)
WRITABLE = (
    "other users may write {path}, so nothing in it is used: `chmod -R go-w {path}`, then `retinue trust --state`"
)
UNREADABLE = "{path} cannot be read: {why}; check the owner and mode of it and of the folders above"
UNWRITABLE = (
    "{state} cannot be made: {why}; runs keep their log there, so make {folder} writable for you, or work elsewhere"
)


class _Owner(msgspec.Struct, frozen=True):
    """The signed place of a state folder. `path` is in hexadecimal because file names need not be valid text."""

    path: str
    inode: int
    signature: str

    @property
    def data(self) -> bytes:
        return msgspec.json.encode([self.path, self.inode])


def is_state_listing(names: Collection[str]) -> bool:
    """Return True if `names` are the entries of a state folder, regardless of the folder's name."""
    return OWNER_FILE in names and any(name in names for name in STATE_FOLDERS)


def claim_state_folder(state: Path) -> None:
    """Create and sign the state folder if it is missing. Raises ConfigError if it exists and is not the user's."""
    if verify_state_folder(state):
        return
    try:
        make_private_folder(state)
    except RetinueError as error:
        why = getattr(error.__context__, "strerror", None) or str(error)
        raise ConfigError(UNWRITABLE.format(state=state, folder=state.parent, why=why)) from None
    _sign_state(state)


def verify_state_folder(state: Path) -> bool:
    """Return True if a state folder exists here. Raises ConfigError if it exists and is not the user's."""
    if not _check_folders(state):
        return False
    # In this order: a process that creates the folder signs it before it puts anything else in.
    is_empty, owner = _is_empty(state), _read_owner(state)
    if owner is None and is_empty:
        return False
    if owner is None or not _is_here(owner, state):
        raise ConfigError(FOREIGN.format(path=state))
    return True


def adopt_state_folder(state: Path) -> None:
    """Sign a state folder as the user's, no matter who made it. Its owner, modes and links are still checked."""
    if not _check_folders(state):
        raise ConfigError(f"there is no {state}")
    _sign_state(state)


def is_adoptable(state: Path) -> bool:
    """Return True if the state folder lacks only a signature. Raises ConfigError for any other fault."""
    if not _check_folders(state):
        return False
    is_empty, owner = _is_empty(state), _read_owner(state)
    return not (is_empty if owner is None else _is_here(owner, state))


def name_user(uid: int) -> str:
    """Return the name of a user, or "user <uid>" if the user has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _check_folders(state: Path) -> bool:
    """Check the state folder and its subfolders. Returns False if there is no state folder."""
    if not _check_folder(state):
        return False
    for name in STATE_FOLDERS:
        _check_folder(state / name)
    return True


def _check_folder(folder: Path) -> bool:
    """Return True if the folder exists. Raises ConfigError if the path exists and is not a folder of the user's own."""
    try:
        status = os.lstat(folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(UNREADABLE.format(path=folder, why=error.strerror or error)) from None
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(LINK.format(path=folder))
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(NO_FOLDER.format(path=folder))
    if status.st_uid != os.geteuid():
        owner, user, sudo = name_user(status.st_uid), name_user(os.geteuid()), "sudo " if os.geteuid() else ""
        raise ConfigError(OTHER_USER.format(path=folder, owner=owner, user=user, sudo=sudo))
    if status.st_mode & OTHERS_MAY_WRITE:
        raise ConfigError(WRITABLE.format(path=folder))
    return True


def _read_owner(state: Path) -> _Owner | None:
    """Return the content of `owner.json`, or None if it is missing, invalid, or writable by another user."""
    try:
        data = read_small_file(state / OWNER_FILE, MAX_BYTES, owners=(os.geteuid(),), forbidden_mode=OTHERS_MAY_WRITE)
        return msgspec.json.decode(data, type=_Owner)
    except (OSError, msgspec.MsgspecError):
        return None


def _is_here(owner: _Owner, state: Path) -> bool:
    """Return True if the user signed `owner` for this place: this path, or the same folder before a move."""
    if not has_signature(PURPOSE, owner.data, owner.signature):
        return False
    return owner.path == _encode_path(state) or owner.inode == state.stat().st_ino


def _is_empty(state: Path) -> bool:
    """Return True if the folder holds no state.

    An invalid owner file counts as state. The temporary file of an owner file that is being written, or whose writer
    died, does not."""
    try:
        names = {entry.name for entry in state.iterdir()}
        return all(name in _HARMLESS or is_temporary_name(name) for name in names)
    except OSError as error:
        raise ConfigError(UNREADABLE.format(path=state, why=error.strerror or error)) from None


def _sign_state(state: Path) -> None:
    owner = _Owner(path=_encode_path(state), inode=state.stat().st_ino, signature="")
    signed = msgspec.structs.replace(owner, signature=sign_data(PURPOSE, owner.data))
    try:
        replace_file(state / OWNER_FILE, msgspec.json.encode(signed))
    except OSError as error:
        raise ConfigError(f"cannot write {state / OWNER_FILE}: {error.strerror or error}") from None


def _encode_path(path: AnyPath) -> str:
    return os.fsencode(os.path.realpath(path)).hex()
