"""The process of a tool server, from its start to the last of what it started. Its one owner sees that nothing is left.

Everything inside a sandbox is below its first process, the init of its own pid namespace: when that is killed, the
kernel kills all the rest, also what has double-forked or left its session, before it is reaped.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class PreparedSandbox:
    """The way to start the tool server of one run. The descriptors are closed when it has started; `info` is a file in
    which the pid of its first process inside will stand. `user` owns what the run may write, where that is somebody
    else than we. `kill` ends a run whose processes are not below its first one, and waits for that; it can be called
    again."""

    argv: Sequence[str]
    env: Mapping[str, str]
    fds: Sequence[int] = ()
    info: int | None = None
    group: Group | None = None
    user: tuple[int, int] | None = None
    kill: Callable[[], None] | None = None
    cwd: str | None = None

    def discard(self) -> None:
        """Close the descriptors and remove the group: others have used them, or nobody will."""
        for fd in (*self.fds, *([] if self.info is None else [self.info])):
            os.close(fd)
        if self.group is not None:
            self.group.remove_soon()


class Process:
    """Started by `start`. `reading` and `writing` are our ends of the link, which its owner closes; what it says on
    stderr goes to `log`, up to a bound, and never holds it up."""

    def __init__(self, prepared: PreparedSandbox, log: Path) -> None:
        self._prepared, self._log = prepared, log
        self._loop = asyncio.get_running_loop()
        self._tail = bytearray()
        self._said_bytes = 0
        self._info = prepared.info
        self._first: int | None = None
        self.reading, self.writing, self._stderr = -1, -1, -1
        self.why = ""  # how it ended, for a person; known when it was stopped

    def start(self) -> None:
        """Start it. Raises OSError; then nothing was started. It closes the prepared descriptors either way."""
        prepared = self._prepared
        stdin, self.writing = os.pipe()
        self.reading, stdout = os.pipe()
        self._stderr, stderr = os.pipe()
        try:
            self._group = start_group(
                prepared.argv,
                env=dict(prepared.env),
                cwd=prepared.cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=prepared.fds,
            )
        except OSError:
            for fd in (self.writing, self.reading, self._stderr):
                os.close(fd)
            self._close_info()
            if prepared.group is not None:
                prepared.group.remove()
            raise
        finally:
            for fd in (stdin, stdout, stderr, *prepared.fds):
                os.close(fd)
        os.set_blocking(self._stderr, False)
        self._loop.add_reader(self._stderr, self._read_stderr)

    @property
    def stderr_tail(self) -> str:
        """The last of what it said on stderr, in one line of plain characters."""
        text = " ".join(self._tail.decode("utf-8", "replace").split())[-500:]
        return "".join(character if character.isprintable() else "?" for character in text)

    def count_memory_kills(self) -> int:
        """Count how often the kernel ended something inside for want of memory, where it counts that."""
        return 0 if self._prepared.group is None else self._prepared.group.count_memory_kills()

    def _describe_end(self) -> str:
        code = self._group.process.poll()
        if self.count_memory_kills():
            return OUT_OF_MEMORY
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
        """End it: wait for the answer that says that its work has stopped, then SIGTERM, then SIGKILL to everything
        inside; without an `answer` to wait for at once. Always finishes; when cancelled meanwhile, in a hurry."""
        await finish_despite_cancel(self._stop(answer), hurry=self._kill, patient=False)

    async def _stop(self, answer: asyncio.Future[Any] | None) -> None:
        if answer is not None and not await self._is_gone_within(CANCEL_ASK_SECONDS, answer):
            for pid in self._list_processes():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
            await self._is_gone_within(TERM_SECONDS, answer)
        if not self._has_exited:
            if self._info is not None:  # a sandbox that is half built is not killed before its first process is known
                await wait_until(lambda: self._first_process is not None or self._has_exited, INFO_SECONDS)
            self._kill()
            await self._is_gone_within(REAP_SECONDS)
        await self._release_resources()

    def _kill(self) -> None:
        if not self._has_exited:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._group.pid if self._first_process is None else self._first_process, signal.SIGKILL)

    async def _is_gone_within(self, seconds: float, *answers: asyncio.Future[Any]) -> bool:
        """Tell whether it is gone, or has given the answer, before the time is over."""
        async with TaskOwner() as owner:
            gone = owner.start(self._group.wait_for_exit())
            done, _ = await asyncio.wait({gone, *answers}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return self._has_exited or bool(done)  # looking reaps it

    def _list_processes(self) -> Iterator[int]:
        """Yield every process inside: all are below the first one."""
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
        """The first process inside, once it is known."""
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
        self.why = self.why or self._describe_end()
        group = self._prepared.group
        if group is not None:  # the kernel tells nobody when the last is gone
            await wait_until(group.remove, REAP_SECONDS)
