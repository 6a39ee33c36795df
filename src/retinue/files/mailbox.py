"""A folder shared with an untrusted party: one file per message, renamed into place once it is complete.

All operations use the folder's descriptor, follow no link and open only regular files. Anything else that the other
side puts there is refused. Knows nothing about the content of messages.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Collection
from contextlib import suppress
from itertools import islice
from pathlib import Path

from retinue.core.errors import ConfigError
from retinue.files.atomic import NEW_FLAGS, open_replacement
from retinue.files.content import read_up_to, write_all
from retinue.files.failpoints import reach_failpoint
from retinue.files.opening import RefusedFile, check_regular, open_regular_file, stat_entry

LEFTOVER_SECONDS = 3600.0
MAX_NAMES = 20_000


class UnreadableMessage(Exception):
    """An entry with a message's name that is not a valid message. The exception's text gives the reason."""


class Mailbox:
    """One open folder. `side` is the prefix of temporary files written here. `close` closes the descriptor."""

    def __init__(self, folder: Path, side: str) -> None:
        self.folder = folder
        self._prefix = f".{side}-"
        try:
            self.fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot open the outbox {folder}: {error.strerror or error}") from None
        self.owner = os.fstat(self.fd).st_uid

    def close(self) -> None:
        os.close(self.fd)

    def list_names(self) -> list[str]:
        """Return the sorted names in the folder, at most `MAX_NAMES` of them as protection against a flood."""
        with os.scandir(self.fd) as entries:
            return sorted(entry.name for entry in islice(entries, MAX_NAMES))

    def modified_at(self) -> int:
        """Return the time of the last added or removed name, in nanoseconds. Two changes may share one timestamp."""
        return os.fstat(self.fd).st_mtime_ns

    def has_entry(self, name: str) -> bool:
        """Return True if an entry of any type has this name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def read_message(self, name: str, *, limit: int, owners: Collection[int] = ()) -> tuple[bytes, int]:
        """Return a whole message and the uid of its owner.

        Raises UnreadableMessage for anything but a regular file of at most `limit` bytes, and FileNotFoundError if
        there is no entry."""
        fd = self.open_message(name, owners=owners)
        try:
            data = read_up_to(fd, limit)
            status = os.fstat(fd)
            if status.st_size != len(data):
                raise UnreadableMessage("grows while it is read")
            return data, status.st_uid
        except RefusedFile:
            raise UnreadableMessage(f"is larger than {limit} bytes") from None
        finally:
            os.close(fd)

    def open_message(self, name: str, *, owners: Collection[int] = ()) -> int:
        """Open a regular file without hard links. Its type is checked before opening too, because opening a device may
        act."""
        try:
            check_regular(os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mode)
            return open_regular_file(name, dir_fd=self.fd, owners=owners, one_name=True)
        except FileNotFoundError:
            raise
        except RefusedFile as error:
            raise UnreadableMessage(error.text) from None
        except OSError as error:
            raise UnreadableMessage(f"cannot be opened: {error.strerror or error}") from None

    def put_message(self, name: str, data: bytes, *, reader: int | None = None, failpoint: str = "") -> None:
        """Write a message atomically, replacing any entry of that name, and wait until it is on disk.

        `reader` is the uid that may read the message. `failpoint` is reached before the rename."""

        def clear_place() -> None:
            reach_failpoint(failpoint)
            status = stat_entry(name, self.fd)
            if status is not None and stat.S_ISDIR(status.st_mode):  # no file can be renamed over a folder
                os.rename(name, f".odd-{secrets.token_hex(8)}", src_dir_fd=self.fd, dst_dir_fd=self.fd)

        with open_replacement(
            name,
            dir_fd=self.fd,
            mode=_message_mode(reader),
            sync=True,
            prefix=self._prefix,
            before_rename=clear_place,
        ) as fd:
            _give_to(fd, reader)
            write_all(fd, data)

    def create_stream(self, name: str, *, reader: int | None = None) -> int:
        """Create an empty file to append to, replacing any entry of that name. Returns its descriptor.

        The descriptor stays valid if the other side renames the file."""
        self.remove_entry(name)
        fd = os.open(name, NEW_FLAGS | os.O_APPEND, 0o600, dir_fd=self.fd)
        _give_to(fd, reader)
        os.fchmod(fd, _message_mode(reader))
        return fd

    def create_mark(self, name: str) -> bool:
        """Create an empty file. Returns False if the name is taken."""
        try:
            os.close(os.open(name, NEW_FLAGS, 0o644, dir_fd=self.fd))
        except FileExistsError:
            return False
        return True

    def remove_entry(self, name: str) -> bool:
        """Remove a file or an empty folder. Of two callers that try at once, one succeeds.

        Returns False if the entry is already gone or cannot be removed."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except (IsADirectoryError, PermissionError):
            with suppress(OSError):
                os.rmdir(name, dir_fd=self.fd)
                return True
            return False
        except OSError:
            return False
        return True

    def remove_leftovers(self) -> None:
        """Remove temporary files that a killed writer of our side left, and old temporary files of the other side."""
        for name in self.list_names():
            if name.startswith(self._prefix) or (name.startswith(".") and self.entry_age(name) > LEFTOVER_SECONDS):
                self.remove_entry(name)

    def entry_age(self, name: str) -> float:
        """Return the seconds since the last write to an entry, or 0 if there is no entry."""
        status = stat_entry(name, self.fd)
        return 0.0 if status is None else time.time() - status.st_mtime


def _give_to(fd: int, reader: int | None) -> None:
    """Make `reader` the owner of a file if we are root. Otherwise the mode lets every user read the file."""
    if reader is not None and os.geteuid() == 0:
        os.fchown(fd, reader, -1)


def _message_mode(reader: int | None) -> int:
    return 0o600 if reader is None or os.geteuid() in (reader, 0) else 0o644
