"""All logs of a state folder, for reading while their writers may be at work. Writes nothing, never prints.

A file that cannot be read is noted in `problems` and the others are read all the same. Which trees still have somebody
who writes them is asked of the lock beside the file, so a process that died leaves nothing that seems to be running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import apsw
import msgspec

from retinue.core.errors import ConfigError, LogError
from retinue.core.events import Event, RunEnded, RunSpawned, decode
from retinue.log.feed import root_of
from retinue.log.locks import first_row_of_holder, holder
from retinue.log.schema import VERSION, all_lines, beginnings, last_line, one_line, open_reader, tree_lines, trouble

POLL_SECONDS = 0.1
PLACES = ("", "logs", "runs", "control", "outbox", "applying")
_SPAWNED = b'"kind":"run.spawned"'
_USAGE = b'"kind":"usage"'


@dataclass(frozen=True)
class Stored:
    """One tree, the file that holds it, and its first event (its primary's `run.spawned`)."""

    tree: str
    file: Path
    first_row: int
    first: Event

    @property
    def at(self) -> float:
        return self.first.at

    @property
    def reported(self) -> bool:
        """Whether another process shows it: what it did is there, as runs of a tree of that process."""
        return isinstance(self.first.body, RunSpawned) and bool(self.first.body.reported)


def unlinked(state: Path) -> Path:
    """The state folder, if it and what is in it are where they seem to be: a clone may have brought a link along."""
    for name in PLACES:
        if (state / name).is_symlink():
            raise ConfigError(f"{state / name} is a link, and what is kept there would be wherever it leads: remove it")
    return state


class Archive:
    """The logs of one state folder. Each call looks again, so it also sees what has happened since."""

    version = VERSION

    def __init__(self, state: Path) -> None:
        self.folder = state / "logs"
        self.problems: list[str] = []

    def trees(self) -> list[Stored]:
        """Every tree there is, the newest first."""
        self.problems = []
        found: list[Stored] = []
        for file in self.files():
            try:
                found += self._trees_of(file)
            except LogError as error:
                if first_row_of_holder(file) is None:  # else it is being made this moment
                    self.problems.append(str(error))
        return sorted(found, key=lambda stored: (stored.at, stored.tree), reverse=True)

    def lines(self, stored: Stored, *, after: int = 0) -> Iterator[bytes]:
        """The events after that place as they are stored: one JSON object each, unknown fields and all."""
        with _reading(stored.file) as db:
            for _, seq, line in tree_lines(db, stored.tree, row=stored.first_row):
                if seq > after:
                    yield line

    def events(self, stored: Stored, *, after: int = 0) -> Iterator[Event]:
        for line in self.lines(stored, after=after):
            yield event_of(line, stored.file)

    def read(self, tree: str) -> list[Event]:
        """All events of a tree, whatever file it is in; none when there is no such tree."""
        return [event for stored in self.trees() if stored.tree == tree for event in self.events(stored)]

    def usage(self) -> Iterator[Event]:
        """The `usage` events of all trees but those that another process has in its own, each file read once."""
        self.problems = []
        for file in self.files():
            try:
                elsewhere = {stored.tree for stored in self._trees_of(file) if stored.reported}
                with _reading(file) as db:
                    spent = (event_of(line, file) for line in all_lines(db) if _USAGE in line)
                    yield from (event for event in spent if event.tree not in elsewhere)
            except LogError as error:
                self.problems.append(str(error))

    def spawned(self, stored: Stored) -> Iterator[Event]:
        """The `run.spawned` of each of its runs: what is needed to find one by name."""
        for line in self.lines(stored):
            if _SPAWNED in line:
                yield event_of(line, stored.file)

    def is_live(self, stored: Stored) -> bool:
        """Whether the process that writes this tree is there. Files are used again: a held lock alone is not enough."""
        if first_row_of_holder(stored.file) is None:
            return False
        with _reading(stored.file) as db:
            return _is_live(db, stored)

    def process(self, stored: Stored) -> int | None:
        """The number of the process that writes this tree, if one does."""
        found = holder(stored.file)
        return found[0] if found is not None and self.is_live(stored) else None

    async def follow(self, stored: Stored, *, after: int = 0) -> AsyncGenerator[bytes, None]:
        """The lines after that place, then new ones, until the tree has ended or nobody is left who could write it."""
        with _reading(stored.file) as db:
            row, version, ended = stored.first_row, None, False
            while True:
                live = _is_live(db, stored)  # asked before reading: what a dead writer left is then all read
                seen, version = version, db.pragma("data_version")
                if version != seen:
                    ended = _has_ended(db, stored)
                    for at, seq, line in tree_lines(db, stored.tree, row=row):
                        if seq > after:
                            row, after = at, seq
                            yield line
                if ended or not live:
                    return
                await asyncio.sleep(POLL_SECONDS)

    def has_ended(self, stored: Stored) -> bool:
        """Whether its primary has ended, which is the last thing that happens in a tree."""
        with _reading(stored.file) as db:
            return _has_ended(db, stored)

    def files(self) -> list[Path]:
        try:
            return sorted(entry for entry in self.folder.iterdir() if entry.suffix == ".db")
        except FileNotFoundError:
            for path in (self.folder.parent, self.folder):
                if path.is_symlink() and not path.exists():
                    raise LogError(f"cannot read the logs: {path} is a link to nothing ({path.readlink()})") from None
            return []
        except NotADirectoryError:
            path = self.folder if self.folder.parent.is_dir() else self.folder.parent
            raise LogError(f"cannot read the logs: {path} is not a folder") from None
        except OSError as error:
            raise LogError(f"cannot read the logs in {self.folder}: {error.strerror or error}") from None

    def damage(self, file: Path) -> str:
        """What is wrong with a file, by SQLite's own check of all its pages; empty when nothing is."""
        try:
            with _reading(file) as db:
                said = db.pragma("quick_check")
        except LogError as error:
            return str(error)
        return "" if said == "ok" else f"the log {file} is damaged: {one_line(ValueError(said))}"

    def _trees_of(self, file: Path) -> list[Stored]:
        with _reading(file) as db:
            return [Stored(name, file, row, event_of(line, file)) for name, row, line in beginnings(db)]


def event_of(line: bytes, file: Path) -> Event:
    """The event of a stored line."""
    try:
        return decode(line)
    except msgspec.MsgspecError as error:
        raise LogError(f"{file} holds a line that is not an event: {one_line(error)}") from None


def _opened(file: Path) -> apsw.Connection:
    """To read a file SQLite makes another beside it. Where the disk is full or cannot be written, one that nobody
    writes is read as it stands."""
    try:
        return open_reader(file)
    except LogError:
        journal = file.with_name(f"{file.name}-wal")
        if holder(file) is not None or (journal.exists() and journal.stat().st_size):
            raise
        with suppress(LogError):
            return open_reader(file, still=True)
        raise


@contextmanager
def _reading(file: Path) -> Iterator[apsw.Connection]:
    db = _opened(file)
    try:
        yield db
    except apsw.Error as error:
        raise LogError(trouble(f"cannot read the log {file}", error)) from None
    except (AttributeError, TypeError, ValueError) as error:  # what SQLite found is not what was written
        raise LogError(f"cannot read the log {file}: the file is damaged ({one_line(error)})") from None
    finally:
        db.close()


def _is_live(db: apsw.Connection, stored: Stored) -> bool:
    first_row = first_row_of_holder(stored.file)
    last = last_line(db, stored.tree, row=stored.first_row)
    return first_row is not None and last is not None and last[0] >= first_row


def _has_ended(db: apsw.Connection, stored: Stored) -> bool:
    last = last_line(db, stored.tree, row=stored.first_row)
    if last is None:
        return False
    event = event_of(last[1], stored.file)
    if not isinstance(event.body, RunEnded):
        return False
    return event.run == 0 or root_of(line for _, _, line in tree_lines(db, stored.tree, row=stored.first_row))[1]
