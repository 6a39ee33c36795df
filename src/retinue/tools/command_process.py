"""The base of the tools that run a command or a program: its environment, output pipe, end and outcome.

`processes.group` starts the process group and ends it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing, suppress

from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES, TERM_SECONDS
from retinue.core.messages import Call
from retinue.core.network import PROXY_VARIABLE
from retinue.core.ports import Execution, Folders, Outcome
from retinue.core.unseen import reveal_text
from retinue.files.content import read_available
from retinue.processes.group import Guard, ProcessGroup, exit_code, start_group
from retinue.tools.arguments import read_argument
from retinue.tools.truncate import HeadAndTail

DRAIN_SECONDS = 0.5
CHUNK = 64 * 1024
MOST_LEFT = 1024 * 1024  # no pipe holds more, even if a program enlarged it
# The XDG folders hold the user's settings and trust. A retinue started as an MCP server must find the same ones.
PASSED_VARIABLES = frozenset({
    "PATH", "HOME", "LANG", "TERM", "TMPDIR", "USER", "SHELL", "VIRTUAL_ENV", "XDG_CONFIG_HOME", "XDG_STATE_HOME",
    "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX",
})  # fmt: skip
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
DIRECT = {"NO_PROXY": "localhost,127.0.0.1,::1", "no_proxy": "localhost,127.0.0.1,::1", "NODE_USE_ENV_PROXY": "1"}
BACKGROUND_ENDED = "[ended what was left in the background]"


def build_environment(given: Mapping[str, str], *, run: str) -> dict[str, str]:
    """Return the environment of a command: an allowlist of `given`, so that no key is in it, and the path of the run.
    In a sandbox, add the proxy to the allowed hosts."""
    passed = {name: value for name, value in given.items() if name in PASSED_VARIABLES or name.startswith("LC_")}
    proxy = given.get(PROXY_VARIABLE)
    proxied = {} if proxy is None else {**dict.fromkeys(PROXY_VARIABLES, proxy), **DIRECT}
    return {"PATH": os.defpath, **passed, **proxied, "RETINUE_RUN": run}


class OutputPipe:
    """The read end of a command's output pipe. Reads one chunk per turn of the event loop, and passes it to `ends` and
    `show`."""

    def __init__(self, fd: int, ends: HeadAndTail, show: Callable[[bytes], None]) -> None:
        self._fd, self._ends, self._show = fd, ends, show
        self._over = asyncio.Event()
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def close(self) -> None:
        """Close the pipe and the spill file."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._ends.close_spill_file()

    async def wait_for_end(self) -> bool:
        """Wait up to `DRAIN_SECONDS` for the end of the output. Return False if a process still holds the pipe open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._over.wait()
        # If this process was suspended, the timeout expires before the loop has read the pipe. Read what is left.
        for _ in range(MOST_LEFT // CHUNK + 1):
            if self._over.is_set() or not self._read():
                break
        return self._over.is_set()

    def _read(self) -> bool:
        """Read one chunk. Return False if none is available now."""
        chunk = read_available(self._fd, CHUNK)
        if chunk is None:
            return False
        if chunk:
            self._ends.feed(chunk)
            self._show(chunk)
            return True
        asyncio.get_running_loop().remove_reader(self._fd)
        self._over.set()
        return True


class CommandTool:
    """Base of the tools that run a command or a program in the workspace, with a time limit among its arguments.

    `grace` is how many seconds a process may take to end after SIGTERM. `sandboxed` says that the process ends with
    its sandbox, so that it needs no guard."""

    text_argument: str
    seconds_argument: str
    default_seconds: float
    process_noun = "command"
    note_bytes = 256  # reserved for the notes below the output
    max_seconds = 3600.0

    def __init__(self, *, grace: float = TERM_SECONDS, sandboxed: bool = False) -> None:
        self._grace = grace
        self._sandboxed = sandboxed

    def time_limit(self, call: Call) -> float | None:
        return self.read_arguments(call)[1]

    def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(self.read_arguments(call)[0])

    def read_arguments(self, call: Call) -> tuple[str, float]:
        """Return the command or program, and its time limit in seconds. Raises ToolError."""
        text = read_argument(call, self.text_argument, str)
        seconds = read_argument(call, self.seconds_argument, float, self.default_seconds)
        if not text.strip():
            raise ToolError(f"{call.name}: '{self.text_argument}' is empty")
        if not seconds > 0:  # written so that NaN is refused too
            raise ToolError(f"{call.name}: '{self.seconds_argument}' must be more than 0, got {seconds}")
        return text, min(seconds, self.max_seconds)

    async def run_command(
        self,
        argv: Sequence[str],
        call: Call,
        execution: Execution,
        follow: Callable[[ProcessGroup], Awaitable[str]],
        *,
        notes: list[str],
        pass_fds: Sequence[int] = (),
    ) -> Outcome:
        """Run a command and end everything it leaves running. Return its output, followed by `notes` and how it ended.

        `follow` waits for the command. It returns "" when the command has exited, else the reason to end it."""
        folders = execution.folders
        ends = HeadAndTail(INLINE_BYTES - self.note_bytes, spill=lambda: folders.spill(f"{call.name}.txt"))
        env = build_environment(os.environ, run=execution.path)
        guard = None if self._sandboxed else Guard()
        reading, writing = os.pipe()
        try:
            group = start_group(
                argv, cwd=folders.workspace, env=env, stdout=writing, stderr=writing, pass_fds=pass_fds, guard=guard
            )
        except (OSError, ValueError) as error:  # no such folder; a command too long, or with a NUL or a lone surrogate
            os.close(reading)
            raise ToolError(f"{call.name}: cannot start the {self.process_noun}: {error}") from error
        finally:
            os.close(writing)
        has_background, grace = False, self._grace
        with closing(OutputPipe(reading, ends, execution.show_output)) as pipe:
            try:
                ended = await follow(group)
                if not ended:
                    has_background = not await pipe.wait_for_end()
                    grace = 0.0
            finally:
                await group.end(term=grace)
            await pipe.wait_for_end()
            text, file = ends.close()
        if has_background:
            notes.append(BACKGROUND_ENDED)
        if ended:
            notes.append(ended)
        elif group.returncode:
            notes.append(f"[exit code {exit_code(group.returncode)}]")
        if text and notes and not text.endswith("\n"):
            text += "\n"
        return Outcome(text + "\n".join(notes), success=not ended and group.returncode == 0, file=file)
