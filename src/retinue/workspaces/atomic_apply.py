"""Applying planned changes to a folder, all of them or none, even if the power fails in between.

New files are written to a staging folder first. Then a journal is written, and hard links swap each new file in while
the old file is kept. So no file is ever missing, and a concurrent change to a file is noticed. The apply is complete
once the journal is removed. An error before that rolls everything back. The next process rolls back a journal that a
dead process left.

A journal is used only if this user's key signed it for this staging folder, if it names the folder given by the
caller, and if an apply may write every path in it.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from retinue.core.errors import ConfigError, RetinueError
from retinue.files.atomic import NEW_FLAGS, replace_file, sync_folder
from retinue.files.content import read_small_file
from retinue.files.locks import open_own_file, take_file_lock
from retinue.files.opening import open_parent
from retinue.files.private import make_private_folder
from retinue.files.state_folder import APPLY_FOLDER, RUNS_FOLDER
from retinue.files.trees import remove_tree
from retinue.files.user_key import has_signature, sign_data
from retinue.workspaces.capture import read_current
from retinue.workspaces.merge import Change, is_allowed_path
from retinue.workspaces.store import ContentNames, Store
from retinue.workspaces.walk import EXECUTABLE_MODE, LINK_MODE, display_path

JOURNAL = "journal.json"
MAX_JOURNAL_BYTES = 256 * 1024 * 1024
PURPOSE = "apply journal"
CHANGED = "{path} was changed while it was being replaced; everything is as it was before"
BUSY = "another process is applying changes to this folder just now"
UNPROVEN = "{staging} records an interrupted apply that you did not start here, so it is not undone: move it away"


class Journal(msgspec.Struct, frozen=True):
    """The plan of an apply to the folder `root`.

    `paths` lists all files in the order of the changes, `removed` the files among them to remove, `folders` the new
    folders. On disk the journal is signed, in the JSON of Python, which keeps file names that are not valid text."""

    root: str
    paths: tuple[str, ...]
    removed: tuple[str, ...]
    folders: tuple[str, ...]
    signature: str = ""


def find_staging_folder(target: str, state: str) -> str:
    """Return the folder in which an apply to `target` stages its files, on the same file system.

    For the workspace of a run in the folder `state`, it is in the run's folder, which no run can write. For a project
    it is in the project's state folder, also if the runs themselves are elsewhere."""
    is_workspace = Path(target).is_relative_to(f"{state}/{RUNS_FOLDER}")
    return f"{Path(target).parent}/{APPLY_FOLDER}" if is_workspace else f"{target}/.retinue/{APPLY_FOLDER}"


def apply_changes(root: str, changes: Sequence[Change], store: Store, *, aside: str) -> None:
    """Apply the changes to `root`, all or none. `aside` is a folder of ours on the same file system."""
    with _hold_lock(aside):
        _recover_stagings(aside, root)
        staging = make_private_folder(f"{aside}/{secrets.token_hex(8)}")
        try:
            _stage_files(staging, root, changes, store)
            journal = Journal(
                root,
                paths=tuple(change.path for change in changes),
                removed=tuple(change.path for change in changes if change.new is None),
                folders=tuple(_list_missing_folders(root, changes)),
            )
            write_journal(staging, journal)
            _swap_files(staging, root, changes)
            (staging / JOURNAL).unlink()
        except OSError as error:
            _roll_back(staging, root)
            path = display_path(str(error.filename or root))
            raise RetinueError(f"nothing was changed: {path}: {error.strerror or error}") from error
        except BaseException:
            _roll_back(staging, root)
            raise
        with suppress(OSError):  # a power failure would only undo the whole apply
            sync_folder(staging)
        remove_tree(staging)


def recover_folder(aside: str, root: str) -> bool:
    """Roll back the applies to `root` that a dead process left. Returns True if there were any.

    Raises RetinueError for a journal that this user did not write here."""
    if not Path(aside).is_dir():
        return False
    with _hold_lock(aside):
        return _recover_stagings(aside, root)


def find_unfinished_files(aside: str, root: str) -> list[str]:
    """Return the files in `root` that `recover_folder` would restore. Changes nothing."""
    if not Path(aside).is_dir():
        return []
    with _hold_lock(aside):
        journals = [read_journal(staging, root=root) for staging in _list_stagings(aside)]
    return sorted({path for journal in journals if journal is not None for path in journal.paths})


def _recover_stagings(aside: str, root: str) -> bool:
    found = _list_stagings(aside)
    for staging in found:
        _roll_back(staging, root)
    return bool(found)


def _list_stagings(aside: str) -> list[Path]:
    return [entry for entry in sorted(Path(aside).iterdir()) if entry.is_dir() and not entry.is_symlink()]


@contextmanager
def _hold_lock(aside: str) -> Iterator[None]:
    for folder in (Path(aside).parent, Path(aside)):
        if folder.is_symlink():
            raise RetinueError(f"{folder} is a link: remove it")
    made = not Path(aside).parent.exists()
    make_private_folder(aside)
    lock = open_own_file(f"{aside}/lock")
    try:
        if not take_file_lock(lock):
            raise RetinueError(BUSY)
        yield
    finally:
        os.close(lock)
        if made:  # remove the state folder again if this apply created it; rmdir fails if files had to stay in it
            with suppress(OSError):
                Path(aside, "lock").unlink()
                Path(aside).rmdir()
                Path(aside).parent.rmdir()


def _stage_files(staging: Path, root: str, changes: Sequence[Change], store: Store) -> None:
    owner = Path(root).stat()
    for number, change in enumerate(changes):
        if change.new is None:
            continue
        place = staging / f"new-{number}"
        if change.new.mode == LINK_MODE:
            place.symlink_to(os.fsdecode(store.read_content(change.new.oid)))
        else:
            fd = os.open(place, NEW_FLAGS, 0o777 if change.new.mode == EXECUTABLE_MODE else 0o666)
            try:
                store.write_content(change.new.oid, fd)
                os.fsync(fd)
            finally:
                os.close(fd)
        if os.geteuid() == 0:  # files written by root must belong to the folder's owner: a sandboxed run, or the user
            os.chown(place, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _list_missing_folders(root: str, changes: Sequence[Change]) -> Iterator[str]:
    """Yield the folders to create, parents first."""
    found: dict[str, None] = {}
    for change in changes:
        steps = change.path.split("/")[:-1] if change.new is not None else []
        for at in range(1, len(steps) + 1):
            folder = "/".join(steps[:at])
            if not os.path.lexists(f"{root}/{folder}"):
                found[folder] = None
    yield from found


def _swap_files(staging: Path, root: str, changes: Sequence[Change]) -> None:
    """Swap the new files in. Removals come first, so that a folder can replace a file and vice versa."""
    for number, change in enumerate(changes):
        if change.new is None:
            _remove_file(staging, number, root, change)
    for number, change in enumerate(changes):
        if change.new is not None:
            _place_file(staging, number, root, change)
    for number, change in enumerate(changes):
        if change.old is not None:
            _verify_old(staging / f"old-{number}", change)


def _remove_file(staging: Path, number: int, root: str, change: Change) -> None:
    with open_parent(root, change.path) as (folder, name):
        os.rename(name, staging / f"old-{number}", src_dir_fd=folder)
    _verify_old(staging / f"old-{number}", change)
    steps = change.path.split("/")[:-1]
    while steps:
        with open_parent(root, "/".join(steps)) as (folder, name):
            try:
                os.rmdir(name, dir_fd=folder)
            except OSError:  # the folder is not empty
                return
        steps.pop()


def _place_file(staging: Path, number: int, root: str, change: Change) -> None:
    new, old = staging / f"new-{number}", staging / f"old-{number}"
    with open_parent(root, change.path, create=True, inherit_owner=True) as (folder, name):
        if change.old is None:
            os.link(new, name, dst_dir_fd=folder, follow_symlinks=False)  # fails if the name is taken by now
            return
        os.link(name, old, src_dir_fd=folder, follow_symlinks=False)
        _verify_old(old, change)
        second = staging / f"second-{number}"
        os.link(new, second, follow_symlinks=False)
        if not old.is_symlink() and not new.is_symlink():
            _keep_mode(new, old)
        os.rename(second, name, dst_dir_fd=folder)


def _keep_mode(new: Path, old: Path) -> None:
    """Give the new file the permissions of the file it replaces, except for the executable bits."""
    mode, runs = stat.S_IMODE(old.stat().st_mode) & 0o777, new.stat().st_mode & 0o100
    new.chmod(mode & ~0o111 if not runs else mode | ((mode & 0o444) >> 2))


def _verify_old(kept: Path, change: Change) -> None:
    if read_current(str(kept.parent), kept.name, ContentNames()) != change.old:
        raise RetinueError(CHANGED.format(path=display_path(change.path)))


def _roll_back(staging: Path, root: str) -> None:
    """Restore the folder from the journal. Without a journal, no change was made yet, or all were."""
    journal = read_journal(staging, root=root)
    if journal is None:
        remove_tree(staging)
        return
    removed = frozenset(journal.removed)
    for number, path in reversed(list(enumerate(journal.paths))):
        if path not in removed:
            _undo_place(staging, number, root, path)
    for folder in reversed(journal.folders):
        with suppress(OSError), open_parent(root, folder) as (above, name):
            os.rmdir(name, dir_fd=above)
    for number, path in enumerate(journal.paths):
        if path in removed:
            _undo_remove(staging, number, root, path)
    remove_tree(staging)


def _undo_place(staging: Path, number: int, root: str, path: str) -> None:
    new, old = staging / f"new-{number}", staging / f"old-{number}"
    with suppress(FileNotFoundError, NotADirectoryError), open_parent(root, path) as (folder, name):
        here = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not os.path.samestat(here, os.lstat(new)):
            return  # the new file was not placed yet, or another file has replaced it since
        if os.path.lexists(old):
            os.rename(old, name, dst_dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def _undo_remove(staging: Path, number: int, root: str, path: str) -> None:
    old = staging / f"old-{number}"
    if not os.path.lexists(old):
        return
    with open_parent(root, path, create=True, inherit_owner=True) as (folder, name), suppress(FileExistsError):
        os.link(old, name, dst_dir_fd=folder, follow_symlinks=False)


# The journal


def write_journal(staging: Path, journal: Journal) -> None:
    """Sign the journal and write it to disk.

    Without a usable key, the journal stays unsigned and no later process acts on it."""
    with suppress(ConfigError):
        signature = sign_data(PURPOSE, _encode_signed_content(staging, journal))
        journal = msgspec.structs.replace(journal, signature=signature)
    replace_file(staging / JOURNAL, json.dumps(msgspec.structs.asdict(journal)).encode(), sync=True)


def read_journal(staging: Path, *, root: str) -> Journal | None:
    """Return the journal of a staging folder, or None. Raises RetinueError for a journal that is not the user's."""
    try:
        data = read_small_file(staging / JOURNAL, MAX_JOURNAL_BYTES, owners=(os.geteuid(),))
        journal = msgspec.convert(json.loads(data), Journal)
        is_ours = (
            has_signature(PURPOSE, _encode_signed_content(staging, journal), journal.signature)
            and journal.root == root
            and set(journal.removed) <= set(journal.paths)
            and all(map(is_allowed_path, (*journal.paths, *journal.folders)))
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        is_ours = False
    if not is_ours:
        raise RetinueError(UNPROVEN.format(staging=staging))
    return journal


def _encode_signed_content(staging: Path, journal: Journal) -> bytes:
    """Return the bytes to sign: the journal together with the path of its staging folder."""
    return json.dumps(
        [os.path.realpath(staging), journal.root, journal.paths, journal.removed, journal.folders]
    ).encode()
