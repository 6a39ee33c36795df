"""The lock file next to a log file, signed with the writing process and its first batch.

The lock is a kernel lock and ends with its process, so a dead process never counts as a writer. A process without a
signature is no writer either: it only opens the file, or removes trees.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from retinue.core.errors import LogError, LogHeld
from retinue.core.ports import name_process
from retinue.files.locks import open_own_file, take_file_lock
from retinue.files.opening import open_regular_file
from retinue.processes.group import is_alive

PATIENCE_SECONDS, STEP_SECONDS = 1.0, 0.05
CHILD_SECONDS, CHILD_STEP_SECONDS = 0.5, 0.01


class Holder(NamedTuple):
    """The process with the lock of a log file: its id in the log, its process id on this machine if there is one, and
    its first batch. The default is a process without batches."""

    writer: str = ""
    pid: int | None = None
    first_batch: int = 2**62  # no batch has this id


def try_lock(file: Path) -> int | None:
    """Take the lock of a log file and return its descriptor, or None if another process holds the lock. The lock lasts
    until the descriptor is closed. Removes the signature of the last holder."""
    with ExitStack() as undo:
        try:
            lock = open_own_file(file.with_suffix(".lock"))
            undo.callback(os.close, lock)
            if not take_file_lock(lock):
                return None
            os.ftruncate(lock, 0)
        except OSError as error:
            raise LogError(f"cannot write the log {file}: {error.strerror or error}") from None
        undo.pop_all()
    return lock


async def wait_for_lock(file: Path) -> int:
    """Take the lock of a log file or raise LogHeld. Retries for PATIENCE_SECONDS, because readers hold the lock for a
    moment."""
    for _ in range(round(PATIENCE_SECONDS / STEP_SECONDS)):
        lock = try_lock(file)
        if lock is not None:
            return lock
        await asyncio.sleep(STEP_SECONDS)
    holder = read_holder(file) or Holder()
    raise LogHeld(f"{file} is being written by {name_process(holder.pid)}", writer=holder.writer)


def sign_lock(lock: int, writer: str, first_batch: int) -> None:
    """Write our id in the log, our pid and our first batch into a lock we hold. Earlier batches belong to dead
    processes."""
    os.pwrite(lock, f"{writer} {os.getpid()} {first_batch}\n".encode(), 0)


def read_holder(file: Path) -> Holder | None:
    """Return the process that holds the lock of a log file, or None.

    The check takes a free lock for a moment; a process that wants the lock just then retries or uses another file. If
    the signer of the lock is gone, its forked child may hold the lock until the child executes another program, so the
    check repeats for CHILD_SECONDS. A process in another container seems to be gone too; it is returned after that
    time, without its pid.
    """
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
            if holder.pid is None or is_alive(holder.pid):
                return holder
            pause.wait(CHILD_STEP_SECONDS)
        return holder._replace(pid=None)
    finally:
        os.close(lock)


def _read_signature(lock: int) -> Holder:
    try:
        writer, pid, first_batch = os.pread(lock, 64, 0).decode().split()
        return Holder(writer, int(pid), int(first_batch))
    except ValueError:
        return Holder()
