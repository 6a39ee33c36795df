"""The process of a tool server, from its start until all its children have ended. Its owner ensures that none is left.

Every process in a sandbox is below the first one, the init of its pid namespace. If the first process is killed, the
kernel kills all others, including those that double-forked or left the session, before the first one is reaped.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from retinue.concurrency import TaskOwner, finish_despite_cancel
from retinue.core.errors import RetinueError
from retinue.core.limits import CANCEL_ASK_SECONDS, TERM_SECONDS
from retinue.files.content import read_available
from retinue.files.private import make_private_folder, write_private_file
from retinue.processes.group import start_group, wait_until
from retinue.sandbox.cgroups import Group

CHUNK = 64 * 1024
SAID_BYTES = 1024 * 1024
TAIL_BYTES = 4096
REAP_SECONDS = 10.0
INFO_SECONDS = 2.0


@dataclass(frozen=True)
class PreparedSandbox:
    """The command and resources that start the tool server of one run.

    `fds` are closed once the process has started. The pid of the first process inside will be written to the file
    `info`. `user` owns the files that the run may write, unless we are that user. `kill` ends a run whose processes
    are not below the first one, and waits for their end; calling it twice is safe."""

    argv: Sequence[str]
    env: Mapping[str, str]
    fds: Sequence[int] = ()
    info: int | None = None
    group: Group | None = None
    user: tuple[int, int] | None = None
    kill: Callable[[], None] | None = None
    cwd: str | None = None

    def discard(self) -> None:
        """Close the descriptors, and remove the group unless a process is in it."""
        for fd in (*self.fds, *([] if self.info is None else [self.info])):
            os.close(fd)
        if self.group is not None:
            self.group.remove()


class Process:
    """The process of a tool server. `start` starts it.

    `reading` and `writing` are our ends of the pipes, which the owner closes. Its stderr goes to `log` up to a limit.
    The rest is read and dropped, so that the process never blocks."""

    def __init__(self, prepared: PreparedSandbox, log: Path) -> None:
        self._prepared, self._log = prepared, log
        self._loop = asyncio.get_running_loop()
        self._tail = bytearray()
        self._said_bytes = 0
        self._info = prepared.info
        self._first: int | None = None
        self.reading, self.writing, self._stderr = -1, -1, -1
        self.is_out_of_memory = False  # this and `why` are set once the process is stopped
        self.why = ""  # how the process ended, for a person

    def start(self) -> None:
        """Start the process. Closes the prepared descriptors in any case. If it raises an error, nothing was started
        and nothing is left."""
        prepared = self._prepared
        with ExitStack() as passed, ExitStack() as kept:
            for fd in prepared.fds:
                passed.callback(os.close, fd)
            if prepared.group is not None:
                kept.callback(prepared.group.remove)
            kept.callback(self._close_info)
            stdin, self.writing = _open_pipe(passed, kept)
            self.reading, stdout = _open_pipe(kept, passed)
            self._stderr, stderr = _open_pipe(kept, passed)
            self._group = start_group(
                prepared.argv,
                env=dict(prepared.env),
                cwd=prepared.cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=prepared.fds,
            )
            kept.pop_all()
        os.set_blocking(self._stderr, False)
        self._loop.add_reader(self._stderr, self._read_stderr)

    @property
    def stderr_tail(self) -> str:
        """Return the last part of stderr as one line of printable characters."""
        text = " ".join(self._tail.decode("utf-8", "replace").split())[-500:]
        return "".join(character if character.isprintable() else "?" for character in text)

    def count_memory_kills(self) -> int:
        """Return how many processes the kernel has killed inside for lack of memory; 0 if there is no control group."""
        return 0 if self._prepared.group is None else self._prepared.group.count_memory_kills()

    def _has_used_up_memory(self) -> bool:
        return self.count_memory_kills() > 0

    def _describe_end(self) -> str:
        code = self._group.process.poll()
        if self.is_out_of_memory:
            return "out of memory"
        if code is None:
            return "its process closed the link"
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if number:
            with suppress(ValueError):
                return f"its process was ended by {signal.Signals(number).name}"
        return f"its process ended with code {code}"

    @property
    def _has_exited(self) -> bool:
        return self._group.process.poll() is not None

    async def stop(self, answer: asyncio.Future[Any] | None = None) -> None:
        """End the process: wait for `answer`, send SIGTERM, then SIGKILL to everything inside.

        `answer` is the reply that the work has stopped. Without it, sends SIGKILL at once. Always finishes; a
        cancellation sends SIGKILL at once."""
        await finish_despite_cancel(self._stop(answer), hurry=self._kill, patient=False)

    async def _stop(self, answer: asyncio.Future[Any] | None) -> None:
        if answer is not None and not await self._is_gone_within(CANCEL_ASK_SECONDS, answer):
            for pid in self._list_processes():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
            await self._is_gone_within(TERM_SECONDS, answer)
        if not self._has_exited:
            if self._info is not None:  # do not kill a half-built sandbox before its first process is known
                await wait_until(lambda: self._first_process is not None or self._has_exited, INFO_SECONDS)
            self._kill()
            await self._is_gone_within(REAP_SECONDS)
        await self._release_resources()

    def _kill(self) -> None:
        if not self._has_exited:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._group.pid if self._first_process is None else self._first_process, signal.SIGKILL)

    async def _is_gone_within(self, seconds: float, *answers: asyncio.Future[Any]) -> bool:
        """Return True if the process exits, or one of `answers` arrives, within `seconds`."""
        async with TaskOwner() as owner:
            gone = owner.start(self._group.wait_for_exit())
            done, _ = await asyncio.wait({gone, *answers}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return self._has_exited or bool(done)  # `_has_exited` reaps the process

    def _list_processes(self) -> Iterator[int]:
        """Yield every process inside except the first one, which is the ancestor of all."""
        waiting = [] if self._first_process is None else [self._first_process]
        while waiting:
            pid = waiting.pop()
            for listed in Path("/proc", str(pid), "task").glob("*/children"):
                with suppress(OSError):
                    waiting += map(int, listed.read_text().split())
            if pid != self._first_process:
                yield pid

    @property
    def _first_process(self) -> int | None:
        """Return the pid of the first process inside, or None if it is not known yet."""
        if self._first is None and self._info is not None:
            with suppress(msgspec.MsgspecError):
                self._first = msgspec.json.decode(os.pread(self._info, CHUNK, 0), type=dict[str, int])["child-pid"]
        return self._first

    def _close_info(self) -> None:
        if self._info is not None:
            os.close(self._info)
            self._info = None

    def _read_stderr(self) -> None:
        data = read_available(self._stderr, CHUNK)
        if data is None:
            return
        if not data:
            self._close_stderr()
            return
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        room, self._said_bytes = SAID_BYTES - self._said_bytes, self._said_bytes + len(data)
        if room > 0:
            with suppress(OSError, RetinueError):
                make_private_folder(self._log.parent)
                write_private_file(self._log, data[:room], append=True)

    def _close_stderr(self) -> None:
        self._loop.remove_reader(self._stderr)
        os.close(self._stderr)
        self._stderr = -1

    async def _release_resources(self) -> None:
        """Close our descriptors and remove the control group."""
        self._close_info()
        if self._stderr >= 0:
            self._read_stderr()
        if self._stderr >= 0:
            self._close_stderr()
        if not self.why:
            self.is_out_of_memory = self._has_used_up_memory()
            self.why = self._describe_end()
        group = self._prepared.group
        if group is not None:  # poll, because the kernel does not report when the last process is gone
            await wait_until(group.remove, REAP_SECONDS)


def _open_pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    """Return the two ends of a new pipe. `reading` and `writing` close one end each."""
    ends = os.pipe()
    reading.callback(os.close, ends[0])
    writing.callback(os.close, ends[1])
    return ends
