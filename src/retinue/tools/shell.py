"""The shell tool: one command, its merged output, its exit code, and nothing left running.

A command gets a session of its own, so that it and its children can be ended together. The shell process is reaped
only after its group was signalled: until then the group's number cannot belong to anyone else. What leaves the group
by setsid is not found here; holding that in is a wall's work.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES, TERM_SECONDS
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
from retinue.tools import guard
from retinue.tools.cut import Ends

DEFAULT_SECONDS = 120.0
MAX_SECONDS = 3600.0
DRAIN_SECONDS = 0.5
REAP_SECONDS = 2.0
POLL_SECONDS = 0.02
CHUNK = 64 * 1024
NOTE_BYTES = 256
PASSED = frozenset({"PATH", "HOME", "LANG", "TERM", "TMPDIR", "USER", "SHELL", "VIRTUAL_ENV"})
_PROC = Path("/proc")


class Shell:
    """Runs a command line in the workspace. `grace` is how long a command may take to end after SIGTERM."""

    spec = ToolSpec(
        name="shell",
        description="Run a shell command in the workspace and give its output (stdout and stderr together). It has no "
        "input, and what it leaves in the background is ended.",
        schema={
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "timeout": {
                    "type": "number",
                    "description": "seconds",
                    "default": DEFAULT_SECONDS,
                    "maximum": MAX_SECONDS,
                },
            },
            "required": ["command"],
        },
        display_name="Shell",
    )

    def __init__(self, *, grace: float = TERM_SECONDS) -> None:
        self._grace = grace

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        command, seconds = _asked(call)
        ends = Ends(INLINE_BYTES - NOTE_BYTES, spill=lambda: folders.spill(f"{call.name}.txt"))
        proc, output = _start(command, folders.workspace, environment(os.environ, run=link.ref.path), call.name)
        in_time, held, grace = False, False, self._grace
        with _Pipe(output, ends) as pipe:
            try:
                in_time = await _exited(proc, seconds)
                if in_time:
                    held = not await pipe.drained()
                    grace = 0.0
            finally:
                await _surely(_end(proc, grace), hurry=lambda: _signal(proc, signal.SIGKILL))
            await pipe.drained()
            text, file = ends.close()
        notes = ["[ended what was left in the background]"] if held else []
        if not in_time:
            notes.append(f"[timed out after {seconds:g}s]")
        elif proc.returncode:
            notes.append(f"[exit code {_code(proc.returncode)}]")
        if text and notes and not text.endswith("\n"):
            text += "\n"
        return Outcome(text + "\n".join(notes), success=in_time and proc.returncode == 0, file=file)

    def preview(self, call: Call, folders: Folders) -> str:
        return guard.visible(_asked(call)[0])


def environment(given: Mapping[str, str], *, run: str) -> dict[str, str]:
    """What a command sees of our environment: an allowlist, so that no key is in it, and which run it is for."""
    passed = {name: value for name, value in given.items() if name in PASSED or name.startswith("LC_")}
    return {"PATH": os.defpath, **passed, "RETINUE_RUN": run}


class _Pipe:
    """Reads a command's output as it comes, a chunk per turn of the loop, into `ends`; closes both."""

    def __init__(self, fd: int, ends: Ends) -> None:
        self._fd, self._ends = fd, ends
        self._over = asyncio.Event()
        os.set_blocking(fd, False)

    def __enter__(self) -> _Pipe:
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


def _asked(call: Call) -> tuple[str, float]:
    command, seconds = guard.take(call, "command", str), guard.take(call, "timeout", float, DEFAULT_SECONDS)
    if not command.strip():
        raise ToolError(f"{call.name}: 'command' is empty")
    if not seconds > 0:  # written so that NaN is refused too
        raise ToolError(f"{call.name}: 'timeout' must be more than 0, got {seconds}")
    return command, min(seconds, MAX_SECONDS)


def _start(command: str, cwd: Path, env: dict[str, str], tool: str) -> tuple[subprocess.Popen[bytes], int]:
    """The running shell, and the end of the pipe its output comes from."""
    shell = shutil.which("bash") or "/bin/sh"
    reading, writing = os.pipe()
    try:
        proc = subprocess.Popen(
            [shell, "-c", command],
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # no such folder, too long a command, a NUL or half a character in it
        os.close(reading)
        raise ToolError(f"{tool}: cannot start the command: {error}") from error
    finally:
        os.close(writing)
    return proc, reading


async def _exited(proc: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for the shell itself to exit, where possible without reaping it; False when the time is over."""
    try:
        fd = os.pidfd_open(proc.pid)
    except (AttributeError, OSError):
        return await _within(seconds, lambda: proc.poll() is not None)
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


async def _end(proc: subprocess.Popen[bytes], grace: float) -> None:
    """Ends the whole group and reaps the shell; takes no longer than `grace` and `REAP_SECONDS`."""
    try:
        if grace > 0:
            _signal(proc, signal.SIGTERM)
            if await _within(grace, lambda: _is_gone(proc)):
                return
        _signal(proc, signal.SIGKILL)
        await _within(REAP_SECONDS, lambda: _is_gone(proc))
    finally:
        if not _is_gone(proc):  # the loop itself is being torn down: at once, and without it
            _signal(proc, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                proc.wait(REAP_SECONDS)


async def _surely(work: Coroutine[Any, Any, None], *, hurry: Callable[[], object]) -> None:
    """Finishes work that has a deadline of its own, also when the caller is cancelled meanwhile; told a second time,
    in a hurry. The first time may have been what brought us here."""
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


async def _within(seconds: float, test: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not test():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


def _signal(proc: subprocess.Popen[bytes], number: int) -> bool:
    """Signals the whole group; False when there is none any more."""
    try:
        os.killpg(proc.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody is there who is not ours to end (sudo)
        return True
    return True


def _is_gone(proc: subprocess.Popen[bytes]) -> bool:
    return proc.poll() is not None and not (_signal(proc, 0) and has_living(proc.pid))


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


def _code(returncode: int) -> int:
    """As shells count: killed by signal 9 is 137."""
    return returncode if returncode >= 0 else 128 - returncode
