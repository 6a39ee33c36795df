"""A command as a group of processes: started with one pipe for all it says, waited for, ended together.

A command gets a session of its own, so that it and its children can be ended together. The first process is reaped
only after its group was signalled: until then the group's number cannot belong to anyone else. What leaves the group
by setsid is not found here; holding that in is a wall's work. Used by tools that run commands and programs.

Where no wall ends with us, a guard outlives us: a small process that ends the group when we were killed ourselves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from retinue.core.errors import ToolError
from retinue.core.network import PROXY_VARIABLE
from retinue.core.ports import Outcome
from retinue.tools.truncate import Ends

DRAIN_SECONDS = 0.5
REAP_SECONDS = 2.0
POLL_SECONDS = 0.02
CHUNK = 64 * 1024
PASSED = frozenset({"PATH", "HOME", "LANG", "TERM", "TMPDIR", "USER", "SHELL", "VIRTUAL_ENV"})
PROXIED = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
DIRECT = {"NO_PROXY": "localhost,127.0.0.1,::1", "no_proxy": "localhost,127.0.0.1,::1", "NODE_USE_ENV_PROXY": "1"}
ENDED = "[ended what was left in the background]"
# Reads until we are gone, however that came, and ends what then does not go by itself.
GUARD = 'read _; sleep "$1"; kill -s TERM -- "-$0"; sleep "$2"; kill -s KILL -- "-$0"'
_PROC = Path("/proc")


def environment(given: Mapping[str, str], *, run: str) -> dict[str, str]:
    """What a command sees of our environment: an allowlist, so that no key is in it, which run it is for, and behind a
    wall the proxy to the hosts that may be reached."""
    passed = {name: value for name, value in given.items() if name in PASSED or name.startswith("LC_")}
    proxy = given.get(PROXY_VARIABLE)
    proxied = {} if proxy is None else {**dict.fromkeys(PROXIED, proxy), **DIRECT}
    return {"PATH": os.defpath, **passed, **proxied, "RETINUE_RUN": run}


class Pipe:
    """Reads a command's output as it comes, a chunk per turn of the loop, into `ends`; closes both."""

    def __init__(self, fd: int, ends: Ends) -> None:
        self._fd, self._ends = fd, ends
        self._over = asyncio.Event()
        os.set_blocking(fd, False)

    def __enter__(self) -> Pipe:
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._ends.drop()

    async def drained(self) -> bool:
        """Waits a little for the end of the output; False when somebody still holds the pipe open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._over.wait()
        return self._over.is_set()

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        if chunk:
            self._ends.feed(chunk)
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        self._over.set()


def guard_of(pid: int, *, leave: float, grace: float) -> subprocess.Popen[bytes]:
    """A process that outlives us for as long as it takes to end that group: `leave` seconds to go by itself, and then
    `grace` after SIGTERM. Whoever ends the group themselves ends it first."""
    return subprocess.Popen(
        ["/bin/sh", "-c", GUARD, str(pid), str(leave), str(grace)],
        env={"PATH": os.defpath},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


class Command(subprocess.Popen[bytes]):
    """The first process of a group, and who ends the group should we be killed."""

    guard: subprocess.Popen[bytes] | None = None

    def guarded(self) -> None:
        self.guard = guard_of(self.pid, leave=0, grace=1)

    def unguarded(self) -> None:
        if self.guard is not None:
            self.guard.kill()
            self.guard.communicate()
            self.guard = None


def start(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: dict[str, str],
    tool: str,
    guard: bool,
    what: str = "command",
    keep: Sequence[int] = (),
) -> tuple[Command, int]:
    """The running command, and the end of the pipe its output comes from. It inherits the descriptors in `keep`;
    `guard` says that nobody else ends it when we are killed."""
    reading, writing = os.pipe()
    proc = None
    try:
        proc = Command(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
            pass_fds=keep,
        )
        if guard:
            proc.guarded()
    except (OSError, ValueError) as error:  # no such folder, too long a command, a NUL or half a character in it
        os.close(reading)
        if proc is not None:
            signal_all(proc, signal.SIGKILL)
            proc.wait(REAP_SECONDS)
        raise ToolError(f"{tool}: cannot start the {what}: {error}") from error
    finally:
        os.close(writing)
    return proc, reading


async def exited(proc: subprocess.Popen[bytes], seconds: float | None = None) -> bool:
    """Waits for the first process itself to exit, where possible without reaping it; False when the time is over."""
    try:
        fd = os.pidfd_open(proc.pid)
    except (AttributeError, OSError):
        return await within(seconds, lambda: proc.poll() is not None)
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


async def end(proc: Command, grace: float) -> None:
    """Ends the whole group and reaps its first process, also when the caller is cancelled meanwhile; told a second
    time, in a hurry. Takes no longer than `grace` and `REAP_SECONDS`."""
    await _surely(_end(proc, grace), hurry=lambda: signal_all(proc, signal.SIGKILL))


async def _end(proc: Command, grace: float) -> None:
    try:
        if grace > 0:
            signal_all(proc, signal.SIGTERM)
            if await within(grace, lambda: is_gone(proc)):
                return
        signal_all(proc, signal.SIGKILL)
        await within(REAP_SECONDS, lambda: is_gone(proc))
    finally:
        if not is_gone(proc):  # the loop itself is being torn down: at once, and without it
            signal_all(proc, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                proc.wait(REAP_SECONDS)
        proc.unguarded()


async def _surely(work: Coroutine[Any, Any, None], *, hurry: Callable[[], object]) -> None:
    """Finishes work that has a deadline of its own. The first time it is told to stop may have been what brought us
    here."""
    task, cancelled = asyncio.ensure_future(work), False
    caller = asyncio.current_task()
    told = caller is not None and caller.cancelling() > 0
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
            if told:
                hurry()
            told = True
    if cancelled:
        raise asyncio.CancelledError


async def within(seconds: float | None, test: Callable[[], bool]) -> bool:
    """Waits so long for something to be true; whether it is."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while not test():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


def signal_all(proc: subprocess.Popen[bytes], number: int) -> bool:
    """Signals the whole group; False when there is none any more."""
    try:
        os.killpg(proc.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody is there who is not ours to end (sudo)
        return True
    return True


def is_gone(proc: subprocess.Popen[bytes]) -> bool:
    """Whether nobody of the group lives."""
    return proc.poll() is not None and not (signal_all(proc, 0) and has_living(proc.pid))


def has_living(group: int) -> bool:
    """Tells the living from the dead of a group: in a container there may be nobody to reap orphans soon, or ever."""
    if not _PROC.joinpath("self/stat").exists():
        return True
    for path in _PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_bytes().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state not in b"ZX":
                return True
    return False


def code(returncode: int) -> int:
    """As shells count: killed by signal 9 is 137."""
    return returncode if returncode >= 0 else 128 - returncode


def outcome(proc: subprocess.Popen[bytes], said: tuple[str, str], notes: list[str], *, late: str) -> Outcome:
    """What a command that is over said (with the file that has all of it), and below it how it ended: `late` says that
    its time was up."""
    text, file = said
    if late:
        notes = [*notes, late]
    elif proc.returncode:
        notes = [*notes, f"[exit code {code(proc.returncode)}]"]
    if text and notes and not text.endswith("\n"):
        text += "\n"
    return Outcome(text + "\n".join(notes), success=not late and proc.returncode == 0, file=file)
