"""The process of a tool server, from its start to the last of what it started. Its one owner sees that nothing is left.

Everything inside a sandbox is below its first process, the init of its own pid namespace: when that is killed, the
kernel kills all the rest, also what has double-forked or left its session, before it is reaped.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from retinue.concurrency import TaskOwner, finish_despite_cancel
from retinue.core.errors import RetinueError
from retinue.core.limits import CANCEL_ASK_SECONDS, TERM_SECONDS
from retinue.files.private import make_private_folder, write_private_file
from retinue.processes.group import start_group
from retinue.sandbox.box import PreparedSandbox

CHUNK = 64 * 1024
SAID_BYTES = 1024 * 1024
TAIL_BYTES = 4096
REAP_SECONDS = 10.0
INFO_SECONDS = 2.0
POLL_SECONDS = 0.01
OUT_OF_MEMORY = "out of memory"


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
        self._exited = asyncio.Event()
        self.reading, self.writing, self._stderr = -1, -1, -1
        self.why = ""  # how it ended, for a person; known when it was stopped

    def start(self) -> None:
        """Start it. Raises OSError; then nothing was started. It closes the prepared descriptors either way."""
        prepared = self._prepared
        stdin, self.writing = os.pipe()
        self.reading, stdout = os.pipe()
        self._stderr, stderr = os.pipe()
        try:
            self._process = start_group(
                prepared.argv,
                env=dict(prepared.env),
                cwd=prepared.cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=prepared.fds,
            ).process
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
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        os.set_blocking(self._stderr, False)
        self._loop.add_reader(self._stderr, self._read_stderr)

    @property
    def stderr_tail(self) -> str:
        """The last of what it said on stderr, in one line of plain characters."""
        text = " ".join(self._tail.decode("utf-8", "replace").split())[-500:]
        return "".join(character if character.isprintable() else "?" for character in text)

    def _describe_end(self) -> str:
        code = self._process.returncode
        if self._prepared.group is not None and self._prepared.group.count_memory_kills():
            return OUT_OF_MEMORY
        if code is None:
            return "its process closed the link"
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if number:
            with suppress(ValueError):
                return f"its process was ended by {signal.Signals(number).name}"
        return f"its process ended with code {code}"

    async def wait_until_gone(self) -> None:
        """Wait until it is gone with all it started, and reaped."""
        await self._exited.wait()

    async def stop(self, ask: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """End it: ask, which is over when it has stopped its work, then SIGTERM, then SIGKILL of everything inside;
        without `ask` at once. Always finishes; when cancelled meanwhile, in a hurry."""
        await finish_despite_cancel(self._stop(ask), hurry=self._kill, patient=False)

    async def _stop(self, ask: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        if ask is not None and not self._exited.is_set():
            tasks = TaskOwner()
            asking = tasks.start(ask())
            if not await self._is_gone_within(CANCEL_ASK_SECONDS, asking):
                for pid in self._list_processes():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGTERM)
                await self._is_gone_within(TERM_SECONDS, asking)
            tasks.cancel()
        if not self._exited.is_set():
            await self._wait_for_info()
            self._kill()
            await self._is_gone_within(REAP_SECONDS)
        await self._release_resources()

    def _kill(self) -> None:
        if self._exited.is_set():
            return
        for pid in (self._first_process, self._process.pid if self._first_process is None else None):
            if pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    async def _is_gone_within(self, seconds: float, *others: asyncio.Task[None]) -> bool:
        """Tell whether it is gone, or one of the others done, before the time is over."""
        async with TaskOwner() as owner:
            gone = owner.start(self._exited.wait())
            done, _ = await asyncio.wait({gone, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

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

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._exited.set()

    async def _wait_for_info(self) -> None:
        """Wait until a sandbox that is half built has written its first process: it is not killed before."""
        deadline = time.monotonic() + INFO_SECONDS
        while self._info is not None and self._first_process is None and not self._exited.is_set():
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(POLL_SECONDS)

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
        try:
            data = os.read(self._stderr, CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = -1
            return
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        room, self._said_bytes = SAID_BYTES - self._said_bytes, self._said_bytes + len(data)
        if room > 0:
            with suppress(OSError, RetinueError):
                make_private_folder(self._log.parent)
                write_private_file(self._log, data[:room], append=True)

    async def _release_resources(self) -> None:
        """Close our descriptors and remove the control group."""
        self._close_info()
        if self._stderr >= 0:
            self._read_stderr()
        if self._stderr >= 0:
            self._loop.remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = -1
        group, deadline = self._prepared.group, time.monotonic() + REAP_SECONDS
        self.why = self.why or self._describe_end()
        # The kernel tells nobody when the last is gone.
        while group is not None and not group.remove() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
