"""The lock beside a log file: it says which process writes the file, and from which batch on.

The lock is the kernel's and ends with its process, so a process that died seems to write nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import NamedTuple

from retinue.core.errors import LogError, LogHeld
from retinue.files.locks import open_own_file, take_file_lock
from retinue.files.opening import open_regular_file
from retinue.processes.group import is_alive

PATIENCE_SECONDS, STEP_SECONDS = 1.0, 0.05
CHILD_SECONDS, CHILD_STEP_SECONDS = 0.5, 0.01


class Holder(NamedTuple):
    """The process that writes a log file, and the first batch it writes. Both are 0 until it has signed the lock."""

    pid: int
    first_batch: int


def try_lock(file: Path) -> int | None:
    """Take the lock of a log file and return its descriptor, which holds it until closed; None if another has it."""
    try:
        lock = open_own_file(file.with_suffix(".lock"))
    except OSError as error:
        raise LogError(f"cannot write the log {file}: {error.strerror or error}") from None
    if not take_file_lock(lock):
        os.close(lock)
        return None
    return lock


async def wait_for_lock(file: Path) -> int:
    """Take the lock of a log file or raise LogHeld. Readers hold it for a moment, so it is tried for a while."""
    for _ in range(round(PATIENCE_SECONDS / STEP_SECONDS)):
        lock = try_lock(file)
        if lock is not None:
            return lock
        await asyncio.sleep(STEP_SECONDS)
    holder = read_holder(file)
    pid = 0 if holder is None else holder.pid
    raise LogHeld(f"{file} is being written by process {pid}", pid=pid)


def sign_lock(lock: int, first_batch: int) -> None:
    """Write into a lock we hold from which batch on we write: earlier ones are of processes now gone."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d %d\n" % (os.getpid(), first_batch), 0)


def read_holder(file: Path) -> Holder | None:
    """Return the process that holds the lock of a log file, if one does.

    Looking takes a free lock for a moment: a process that wants it just then takes another file. If the process that
    signed it is gone, a child of it may have the lock still, for as long as it takes to become another program; a
    process of another container only seems to be gone, and is named after a while."""
    try:
        lock = open_regular_file(file.with_suffix(".lock"))
    except OSError:
        return None
    pause = threading.Event()
    try:
        for _ in range(round(CHILD_SECONDS / CHILD_STEP_SECONDS)):
            if take_file_lock(lock, shared=True):
                return None
            holder = _read_signature(lock)
            if not holder.pid or is_alive(holder.pid):
                break
            pause.wait(CHILD_STEP_SECONDS)
        return holder
    finally:
        os.close(lock)


def _read_signature(lock: int) -> Holder:
    words = os.pread(lock, 64, 0).split()
    signed = len(words) > 1 and b"".join(words[:2]).isdigit()
    return Holder(int(words[0]), int(words[1])) if signed else Holder(0, 0)
