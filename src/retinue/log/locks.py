"""The lock beside a log file: who writes it, and from which row on."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from retinue.core.errors import LogError

PATIENCE, STEP = 1.0, 0.05


class HeldElsewhere(LogError):
    """Another process writes this file."""


def take(file: Path) -> int | None:
    """The lock that makes a log file ours until it is closed; None when another process holds it."""
    try:
        lock = os.open(file.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LogError(f"cannot write the log {file}: {error.strerror or error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def take_held(file: Path) -> int:
    """The lock of just this file. Somebody who only looks holds it for a moment, so it is tried for a while."""
    pause = threading.Event()
    for _ in range(round(PATIENCE / STEP)):
        lock = take(file)
        if lock is not None:
            return lock
        pause.wait(STEP)
    raise HeldElsewhere(f"{file} is being written by process {(holder(file) or (0, 0))[0]}")


def sign(lock: int, first_row: int) -> None:
    """Says in a lock we hold from which row on we write: rows before that are of processes now gone."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d %d\n" % (os.getpid(), first_row), 0)


def first_row_of_holder(file: Path) -> int | None:
    """From which row on the process that holds this log file writes it; None when nobody holds it."""
    found = holder(file)
    return None if found is None else found[1]


def holder(file: Path) -> tuple[int, int] | None:
    """The process that holds this log file and the row it writes from; zeros while it has not yet signed.

    Looking takes the lock for a moment, if it is free: a process that wants it just then takes another file."""
    try:
        lock = os.open(file.with_suffix(".lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        words = os.pread(lock, 64, 0).split()
        return (int(words[0]), int(words[1])) if len(words) > 1 and b"".join(words[:2]).isdigit() else (0, 0)
    finally:
        os.close(lock)
    return None
