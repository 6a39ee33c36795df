"""The journal of an apply: which files it swaps in which folder, so that an interrupted one can be undone.

A journal is acted on only if this user's key signed it for this staging folder, if it is about the folder that the
caller names, and if every path in it is one that an apply may write.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from retinue.core.errors import ConfigError, RetinueError
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.files.reserved import is_reserved_name
from retinue.files.user_key import has_signature, sign_data

JOURNAL = "journal.json"
MAX_BYTES = 256 * 1024 * 1024
PURPOSE = "apply journal"
UNPROVEN = "{staging} tells of an interrupted apply that you did not begin here, so it is not undone: move it away"


class Journal(msgspec.Struct, frozen=True):
    """An apply to the folder `root`: the paths of all files in the order of the changes, those among them that are
    removed, and the new folders."""

    root: str
    paths: tuple[str, ...]
    removed: frozenset[str]
    folders: tuple[str, ...]


class _Stored(msgspec.Struct, frozen=True):
    """A journal on disk. Paths are hexadecimal bytes, for names are no text."""

    root: str
    paths: tuple[str, ...]
    removed: tuple[str, ...]
    folders: tuple[str, ...]
    signature: str = ""

    def decode(self) -> Journal:
        return Journal(
            root=_from_hex(self.root),
            paths=tuple(map(_from_hex, self.paths)),
            removed=frozenset(map(_from_hex, self.removed)),
            folders=tuple(map(_from_hex, self.folders)),
        )


def write_journal(staging: Path, journal: Journal) -> None:
    """Sign the journal and put it on disk. Where no key can be kept it stays unsigned, and no later process acts on
    it."""
    stored = _Stored(
        root=_to_hex(journal.root),
        paths=tuple(map(_to_hex, journal.paths)),
        removed=tuple(sorted(map(_to_hex, journal.removed))),
        folders=tuple(map(_to_hex, journal.folders)),
    )
    with suppress(ConfigError):
        stored = msgspec.structs.replace(stored, signature=sign_data(PURPOSE, _list_signed(staging, stored)))
    replace_file(staging / JOURNAL, msgspec.json.encode(stored), sync=True)


def read_journal(staging: Path, *, root: str) -> Journal | None:
    """Return the journal of a staging folder; None if there is none. Raises RetinueError for one that is not ours."""
    try:
        data = read_small_file(staging / JOURNAL, MAX_BYTES, owners=(os.geteuid(),))
        stored = msgspec.json.decode(data, type=_Stored)
        journal = stored.decode()
        is_ours = (
            has_signature(PURPOSE, _list_signed(staging, stored), stored.signature)
            and journal.root == root
            and journal.removed <= set(journal.paths)
            and all(map(_is_allowed, (*journal.paths, *journal.folders)))
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError):
        is_ours = False
    if not is_ours:
        raise RetinueError(UNPROVEN.format(staging=staging))
    return journal


def _list_signed(staging: Path, stored: _Stored) -> bytes:
    """Return the bytes that the signature is for: the journal in this staging folder."""
    place = _to_hex(os.path.realpath(staging))
    return msgspec.json.encode([place, stored.root, stored.paths, stored.removed, stored.folders])


def _to_hex(path: str) -> str:
    return os.fsencode(path).hex()


def _from_hex(path: str) -> str:
    return os.fsdecode(bytes.fromhex(path))


def _is_allowed(path: str) -> bool:
    """Tell whether an apply may write the path: below the folder, and neither git's nor ours."""
    return not any(part in ("", ".", "..") or "\0" in part or is_reserved_name(part) for part in path.split("/"))
