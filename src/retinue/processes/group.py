"""A program as a process group: started in its own session, signalled and ended together.

The first process is reaped only after its group was signalled: until then its pid, which is also the group's number,
cannot be reused. A process that leaves the group with setsid is not found here; containing it is the sandbox's job.

A guard is a small helper process that ends the group if our process is killed. A program in a sandbox that dies with
our process needs no guard.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from retinue.concurrency import finish_despite_cancel
from retinue.core.limits import TERM_SECONDS

LAST_WORDS_SECONDS = 2.0  # for the output of a program that reads no more input
REAP_SECONDS = 2.0
POLL_SECONDS = 0.02
# Blocks on stdin until our process is gone for any reason, then ends the group if it does not exit by itself.
_GUARD = 'read _; sleep "$1"; kill -s TERM -- "-$0"; sleep "$2"; kill -s KILL -- "-$0"'
_PROC = Path("/proc")
Stream = int | IO[bytes] | None


class Guard(NamedTuple):
    """The timeouts of a guard: `leave` seconds for the group to exit by itself, then `term` seconds after SIGTERM."""

    leave: float = 0.0
    term: float = 1.0


class ProcessGroup:
    """A running program and all processes it started. `start_group` creates it; `end` or `kill` ends it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.pid = process.pid  # of the first process, and so the number of the group
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def returncode(self) -> int | None:
        """Return the exit code of the first process. None until the process was ended or `poll` saw it exit."""
        return self.process.returncode

    def start_guard(self, times: Guard) -> None:
        """Start the helper process that ends this group if our process is killed."""
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self.pid), str(times.leave), str(times.term)],
            env={"PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def signal(self, number: int) -> bool:
        """Send a signal to every process of the group. Returns False if the group has no process left."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:  # the remaining processes belong to another user (sudo)
            return True
        return True

    def is_gone(self) -> bool:
        """Return True if no process of the group is alive.

        Reaps the first process, so call it only after the group was signalled or the first process exited."""
        return self.process.poll() is not None and not (self.signal(0) and has_living_member(self.pid))

    async def wait_for_exit(self, seconds: float | None = None) -> bool:
        """Wait for the first process to exit, without reaping it where possible. Returns False after `seconds`."""
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
        """End the whole group and reap its first process, even if the caller is cancelled meanwhile.

        Waits `leave` seconds for the first process to exit by itself, sends SIGTERM, waits `term` seconds, sends
        SIGKILL. A second cancellation sends SIGKILL at once. If `term` is 0, no SIGTERM is sent."""
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
        """End the group at once, without an event loop: send SIGKILL if any process is alive, reap, end the guard."""
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
    """Start a program in its own session. If it raises OSError or ValueError, no process is left running."""
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
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float,
    write_input: Callable[[IO[bytes]], object] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program to its end and return its output. Blocks. `write_input` writes its input; without it there is none.

    Kills the whole group and raises `subprocess.TimeoutExpired` if the program takes more than `seconds` to read its
    input, or more than `seconds` after that. An error of `write_input` kills the group too. A program that fails
    before it has read all of its input says why in its own output."""
    stdin = subprocess.DEVNULL if write_input is None else subprocess.PIPE
    group = start_group(argv, cwd=cwd, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    unread: BrokenPipeError | None = None
    with group.process:  # closes the pipes
        try:
            if write_input is not None and group.process.stdin is not None:
                unread = _write_input(group, group.process.stdin, write_input, seconds)
            try:
                stdout, stderr = group.process.communicate(timeout=seconds if unread is None else LAST_WORDS_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise unread or error from None
        finally:
            if group.process.returncode is None:
                group.signal(signal.SIGKILL)
                group.kill()
                if group.process.stdin is not None:
                    with suppress(OSError):  # the rest of the input has no reader
                        group.process.stdin.close()
    if unread is not None and group.process.returncode == 0:
        raise unread
    return subprocess.CompletedProcess(list(argv), group.process.returncode, stdout, stderr)


def _write_input(
    group: ProcessGroup, pipe: IO[bytes], write: Callable[[IO[bytes]], object], seconds: float
) -> BrokenPipeError | None:
    """Write the input of a program. Return an error if the program no longer reads it. Raises TimeoutExpired, and
    kills the group, if the program does not read it all within `seconds`."""
    is_late = threading.Event()

    def end_group() -> None:
        is_late.set()
        group.signal(signal.SIGKILL)  # closes the pipe, so that the write returns

    timer = threading.Timer(seconds, end_group)
    timer.start()
    try:
        write(pipe)
        pipe.flush()
    except BrokenPipeError as error:
        if is_late.is_set():
            raise subprocess.TimeoutExpired(group.process.args, seconds) from None
        return error
    finally:
        timer.cancel()
    return None


async def wait_until(test: Callable[[], bool], seconds: float | None) -> bool:
    """Poll `test` until it returns True. Returns False after `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while not test():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


def is_alive(pid: int) -> bool:
    """Return True if there is a process with this pid, of any user. A zombie counts. No process has a huge pid."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def has_living_member(group: int) -> bool:
    """Return True if a process group has a member that is not a zombie.

    Zombies do not count, because in a container there may be no init process to reap them."""
    if not _PROC.joinpath("self/stat").exists():
        return True
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state not in b"ZX":
                return True
    return False


def exit_code(returncode: int) -> int:
    """Return the exit code that a shell reports: 137 if signal 9 killed the process."""
    return returncode if returncode >= 0 else 128 - returncode
