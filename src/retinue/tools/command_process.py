"""The process of a tool that runs a command or a program: its environment, the pipe of its output, its outcome.

Starting and ending it with all it started is `processes.group`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from retinue.core.errors import ToolError
from retinue.core.network import PROXY_VARIABLE
from retinue.core.ports import Outcome
from retinue.processes.group import Guard, ProcessGroup, exit_code, start_group
from retinue.tools.truncate import Ends

DRAIN_SECONDS = 0.5
CHUNK = 64 * 1024
PASSED_VARIABLES = frozenset({"PATH", "HOME", "LANG", "TERM", "TMPDIR", "USER", "SHELL", "VIRTUAL_ENV"})
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
DIRECT = {"NO_PROXY": "localhost,127.0.0.1,::1", "no_proxy": "localhost,127.0.0.1,::1", "NODE_USE_ENV_PROXY": "1"}
BACKGROUND_ENDED = "[ended what was left in the background]"


def build_environment(given: Mapping[str, str], *, run: str) -> dict[str, str]:
    """Return what a command sees of our environment: an allowlist, so that no key is in it, the run it works for, and
    in a sandbox the proxy to the hosts that may be reached."""
    passed = {name: value for name, value in given.items() if name in PASSED_VARIABLES or name.startswith("LC_")}
    proxy = given.get(PROXY_VARIABLE)
    proxied = {} if proxy is None else {**dict.fromkeys(PROXY_VARIABLES, proxy), **DIRECT}
    return {"PATH": os.defpath, **passed, **proxied, "RETINUE_RUN": run}


class OutputPipe:
    """The reading end of a command's output. Feeds `ends` a chunk per turn of the loop, and shows it to whoever
    watches; closes both."""

    def __init__(self, fd: int, ends: Ends, show: Callable[[bytes], None]) -> None:
        self._fd, self._ends, self._show = fd, ends, show
        self._over = asyncio.Event()
        os.set_blocking(fd, False)

    def __enter__(self) -> OutputPipe:
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._ends.drop()

    async def wait_for_end(self) -> bool:
        """Wait a little for the end of the output; return False if somebody still holds the pipe open."""
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
            self._show(chunk)
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        self._over.set()


def start_command(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    tool: str,
    guard: bool,
    what: str = "command",
    pass_fds: Sequence[int] = (),
) -> tuple[ProcessGroup, int]:
    """Start a command and return it with the reading end of its output. `guard` says that nobody else ends it if we
    are killed."""
    reading, writing = os.pipe()
    try:
        group = start_group(
            argv,
            cwd=cwd,
            env=env,
            stdout=writing,
            stderr=writing,
            pass_fds=pass_fds,
            guard=Guard() if guard else None,
        )
    except (OSError, ValueError) as error:  # no such folder, too long a command, a NUL or half a character in it
        os.close(reading)
        raise ToolError(f"{tool}: cannot start the {what}: {error}") from error
    finally:
        os.close(writing)
    return group, reading


def make_outcome(group: ProcessGroup, output: tuple[str, str], notes: list[str], *, late: str) -> Outcome:
    """Make the outcome of a command that has ended: its output (with the file that has all of it), and below it how it
    ended. `late` says that its time was up."""
    text, file = output
    if late:
        notes = [*notes, late]
    elif group.returncode:
        notes = [*notes, f"[exit code {exit_code(group.returncode)}]"]
    if text and notes and not text.endswith("\n"):
        text += "\n"
    return Outcome(text + "\n".join(notes), success=not late and group.returncode == 0, file=file)
