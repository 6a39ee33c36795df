"""Address files, `control/PID-HASH.json`, in which a process publishes the address of its control server to other
processes of the user. The hash is that of its id in the log: in containers that share the folder, several processes may
have the same pid.

A process locks its file while its control server listens. If a file can be locked, the process that wrote it has died.
Process numbers prove nothing, because they are reused. Files of other users are not read.
"""

from __future__ import annotations

import os
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import msgspec

from retinue.core.errors import RetinueError
from retinue.files.atomic import open_replacement
from retinue.files.content import read_up_to, write_all
from retinue.files.locks import take_file_lock
from retinue.files.opening import open_folder, open_regular_file
from retinue.files.private import make_private_folder
from retinue.protocol.control import VERSION, Address

FOLDER = "control"  # in the state folder
MAX_BYTES = 4096
OPEN_TO_OTHERS = 0o077


class AddressFile:
    """The address file of this process. Raises RetinueError if the file cannot be written."""

    def __init__(self, state: Path, address: Address) -> None:
        folder = state / FOLDER
        self.path = folder / _name_file(address)
        try:
            make_private_folder(folder).chmod(0o700)
            with open_replacement(self.path) as fd:
                take_file_lock(fd)
                write_all(fd, msgspec.json.encode(address))
                self._fd = os.dup(fd)  # the duplicate keeps the lock
        except OSError as error:
            raise RetinueError(f"cannot write {self.path}: {error.strerror or error}") from None

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        os.close(self._fd)


def find_address(state: Path, writer: str) -> Address | None:
    """Return the address of the control server of a process, by its id in the log, or None if it has none."""
    return next((address for address in find_addresses(state) if address.writer == writer), None)


def find_addresses(state: Path) -> list[Address]:
    """Return the addresses of all control servers. Removes the files of dead processes."""
    return survey_addresses(state, remove=True)[0]


def survey_addresses(state: Path, *, remove: bool = False) -> tuple[list[Address], list[Path]]:
    """Return the addresses of all control servers, and the files of dead processes, which `remove` removes."""
    live, stale = [], []
    for path in _list_files(state):
        with suppress(OSError, msgspec.MsgspecError):
            fd = open_regular_file(path, owners=(os.geteuid(),))
            try:
                status = os.fstat(fd)
                if take_file_lock(fd, shared=True):
                    stale.append(path)
                    if remove and path.stat().st_ino == status.st_ino:  # not the file of another server since then
                        path.unlink()
                elif not status.st_mode & OPEN_TO_OTHERS:  # else another user could lock it and pose as the server
                    address = msgspec.json.decode(read_up_to(fd, MAX_BYTES), type=Address)
                    if address.version == VERSION and path.name == _name_file(address):
                        live.append(address)
            finally:
                os.close(fd)
    return live, stale


def list_files_of_others(state: Path) -> list[tuple[Path, int]]:
    """Return the address file and the user id of each live control server of another user, as far as this user can see
    them: root does.

    Reads no content. A server is live if a process holds the lock of its file, which must be private and have the owner
    of the folder."""
    found: list[tuple[Path, int]] = []
    with suppress(OSError):
        folder = open_folder(state / FOLDER)
        try:
            owner = os.fstat(folder).st_uid
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries) if owner != os.geteuid() else []
            for name in names:
                if name.endswith(".json") and _is_held(name, folder, owner):
                    found.append((state / FOLDER / name, owner))
        finally:
            os.close(folder)
    return found


def _is_held(name: str, folder: int, owner: int) -> bool:
    """Return True if this is a private file of `owner`, and a process holds its lock."""
    try:
        fd = open_regular_file(name, dir_fd=folder, owners=(owner,), forbidden_mode=OPEN_TO_OTHERS)
    except OSError:
        return False
    try:
        return not take_file_lock(fd, shared=True)
    finally:
        os.close(fd)


def _name_file(address: Address) -> str:
    return f"{address.pid}-{blake2b(address.writer.encode(), digest_size=8).hexdigest()}.json"


def _list_files(state: Path) -> list[Path]:
    try:
        return sorted(entry for entry in (state / FOLDER).iterdir() if entry.suffix == ".json")
    except OSError:
        return []
