"""A program as a group of processes: started in its own session, signalled and ended together.

The first process is reaped only after its group was signalled: until then the group's number cannot belong to anybody
else. A process that leaves the group by setsid is not found here; holding that in is a sandbox's work.

A guard is a small process that outlives us for as long as it takes to end the group, should we be killed. A program in
a sandbox that ends with us needs none.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from retinue.concurrency import finish_despite_cancel

TERM_SECONDS = 5.0
REAP_SECONDS = 2.0
POLL_SECONDS = 0.02
# Reads until we are gone, however that came, and ends what then does not go by itself.
_GUARD = 'read _; sleep "$1"; kill -s TERM -- "-$0"; sleep "$2"; kill -s KILL -- "-$0"'
_PROC = Path("/proc")
Stream = int | IO[bytes] | None


class Guard(NamedTuple):
    """The times of a guard: `leave` seconds for the group to go by itself, then `term` seconds after SIGTERM."""

    leave: float = 0.0
    term: float = 1.0


class ProcessGroup:
    """A running program and what it started; made by `start_group`, ended by `end` or `kill`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The number of the first process and of the group."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code of the first process; None until it was ended or `poll` saw it exit."""
        return self.process.returncode

    def start_guard(self, times: Guard) -> None:
        """Start the process that ends this group if we are killed."""
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self.pid), str(times.leave), str(times.term)],
            env={"PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def signal(self, number: int) -> bool:
        """Send a signal to everybody in the group; return False if there is nobody any more."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:  # somebody is there who is not ours to end (sudo)
            return True
        return True

    def is_gone(self) -> bool:
        """Tell whether nobody of the group lives. Reaps the first process, so it comes after a signal or an exit."""
        return self.process.poll() is not None and not (self.signal(0) and has_living_member(self.pid))

    async def wait_for_exit(self, seconds: float | None = None) -> bool:
        """Wait for the first process to exit, where possible without reaping it; return False if the time is up."""
        try:
            fd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return await wait_until(lambda: self.process.poll() is not None, seconds)
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(fd, over.set)
        try:
            async with asyncio.timeout(seconds):
                await over.wait()
        except TimeoutError:
            return over.is_set()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return True

    async def end(self, *, leave: float = 0.0, term: float = TERM_SECONDS) -> None:
        """End the whole group and reap its first process, also when the caller is cancelled meanwhile.

        Waits `leave` seconds for the first process to exit by itself, sends SIGTERM, waits `term` seconds, sends
        SIGKILL. A second cancellation sends SIGKILL at once. With no `term` there is no SIGTERM either."""
        await finish_despite_cancel(self._end(leave, term), hurry=lambda: self.signal(signal.SIGKILL))

    async def _end(self, leave: float, term: float) -> None:
        try:
            if leave > 0:
                await self.wait_for_exit(leave)
            if term > 0 and self.signal(signal.SIGTERM) and await wait_until(self.is_gone, term):
                return
            self.signal(signal.SIGKILL)
            await wait_until(self.is_gone, REAP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End the group at once, without an event loop: SIGKILL if anybody lives, reap, end the guard."""
        if not self.is_gone():
            self.signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(REAP_SECONDS)
        if self._guard is not None:
            self._guard.kill()
            self._guard.communicate()
            self._guard = None


def start_group(  # noqa: PLR0913 - each by name
    argv: Sequence[str],
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    pass_fds: Sequence[int] = (),
    guard: Guard | None = None,
    bufsize: int = -1,
) -> ProcessGroup:
    """Start a program in a session of its own. Raises OSError or ValueError; then nothing runs."""
    group = ProcessGroup(
        subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            start_new_session=True,
            bufsize=bufsize,
        )
    )
    if guard is not None:
        try:
            group.start_guard(guard)
        except OSError:
            group.signal(signal.SIGKILL)
            group.kill()
            raise
    return group


def run_program(
    argv: Sequence[str], *, cwd: str | None, env: Mapping[str, str], seconds: float
) -> subprocess.CompletedProcess[bytes]:
    """Run a program without input to its end and return its output; blocks. After `seconds` its whole group is killed
    and `subprocess.TimeoutExpired` raised."""
    group = start_group(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with group.process:  # closes the pipes
        try:
            stdout, stderr = group.process.communicate(timeout=seconds)
        finally:
            if group.process.returncode is None:
                group.signal(signal.SIGKILL)
                group.kill()
    return subprocess.CompletedProcess(list(argv), group.process.returncode, stdout, stderr)


async def wait_until(test: Callable[[], bool], seconds: float | None) -> bool:
    """Wait for a test to hold; return False if the time is up first."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while not test():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


def has_living_member(group: int) -> bool:
    """Tell whether a process group has a member that is not a zombie: in a container nobody may reap orphans."""
    if not _PROC.joinpath("self/stat").exists():
        return True
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state not in b"ZX":
                return True
    return False


def exit_code(returncode: int) -> int:
    """Return an exit code as shells count it: killed by signal 9 is 137."""
    return returncode if returncode >= 0 else 128 - returncode
