"""The base of tools that run a command or a program: its environment, the pipe of its output, its end, its outcome.

Starting and ending it with all it started is `processes.group`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES, TERM_SECONDS
from retinue.core.messages import Call
from retinue.core.network import PROXY_VARIABLE
from retinue.core.ports import Execution, Folders, Outcome
from retinue.core.unseen import reveal_text
from retinue.files.content import read_available
from retinue.processes.group import Guard, ProcessGroup, exit_code, start_group
from retinue.tools.arguments import read_argument
from retinue.tools.truncate import Ends

DRAIN_SECONDS = 0.5
CHUNK = 64 * 1024
MOST_LEFT = 1024 * 1024  # a pipe holds no more, whoever enlarged it
# Configuration and state hold what the user trusts: a retinue that is started as an MCP server has to find the same.
PASSED_VARIABLES = frozenset({
    "PATH", "HOME", "LANG", "TERM", "TMPDIR", "USER", "SHELL", "VIRTUAL_ENV", "XDG_CONFIG_HOME", "XDG_STATE_HOME",
    "XDG_CACHE_HOME", "PYTHONPYCACHEPREFIX",
})  # fmt: skip
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

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._ends.drop()

    async def wait_for_end(self) -> bool:
        """Wait a little for the end of the output; return False if somebody still holds the pipe open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._over.wait()
        # Where this process did not run meanwhile, the time is over and the end of the pipe was never looked for.
        for _ in range(MOST_LEFT // CHUNK + 1):
            if self._over.is_set() or not self._read():
                break
        return self._over.is_set()

    def _read(self) -> bool:
        """Take a chunk; return False if there is none at the moment."""
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

    `grace` is how long it may take to end after SIGTERM; `sandboxed` says that it ends with its sandbox anyhow."""

    text_argument: str
    seconds_argument: str
    default_seconds: float
    what = "command"
    note_bytes = 256  # room for what is said below the output
    max_seconds = 3600.0

    def __init__(self, *, grace: float = TERM_SECONDS, sandboxed: bool = False) -> None:
        self._grace = grace
        self._sandboxed = sandboxed

    def time_limit(self, call: Call) -> float | None:
        return self.read_arguments(call)[1]

    def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(self.read_arguments(call)[0])

    def read_arguments(self, call: Call) -> tuple[str, float]:
        """Return the command or program and its time limit in seconds. Raises ToolError."""
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
        """Run a command and end all that is left of it; return its output, and below it `notes` and how it ended.

        `follow` waits for its end. It returns "", or, where the command does not end by itself, why it is ended."""
        folders = execution.folders
        ends = Ends(INLINE_BYTES - self.note_bytes, spill=lambda: folders.spill(f"{call.name}.txt"))
        env = build_environment(os.environ, run=execution.path)
        guard = None if self._sandboxed else Guard()
        reading, writing = os.pipe()
        try:
            group = start_group(
                argv, cwd=folders.workspace, env=env, stdout=writing, stderr=writing, pass_fds=pass_fds, guard=guard
            )
        except (OSError, ValueError) as error:  # no such folder, too long a command, a NUL or half a character in it
            os.close(reading)
            raise ToolError(f"{call.name}: cannot start the {self.what}: {error}") from error
        finally:
            os.close(writing)
        has_background, grace = False, self._grace
        with OutputPipe(reading, ends, execution.show_output) as pipe:
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
