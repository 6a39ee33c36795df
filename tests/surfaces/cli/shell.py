"""The real command line in real processes, in a project of the test's own."""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import retinue
from tests.surfaces.cli.fork_server import can_fork, start_fork_server

SECONDS = 200.0  # only ends what hangs, before the test itself is ended
COMMAND = [sys.executable, "-m", "retinue"]
SOURCE = str(Path(retinue.__file__).parents[1])
# Root may write everywhere; without these two capabilities it is bound by modes like everybody.
_POWERS = "-dac_override,-dac_read_search"
BOUND_BY_MODES = ["setpriv", "--bounding-set", _POWERS, "--inh-caps", _POWERS] if os.geteuid() == 0 else []
# Loaded by a command that asks a provider's model; for `find_python`.
PROVIDER = ("retinue.models.providers", "pydantic_ai.models.anthropic", "pydantic_ai.models.openai")
A2A = ("retinue.remote.a2a.adapter", "retinue.surfaces.a2a.server")
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


def environment(**more: str) -> dict[str, str]:
    """Return a small environment for a command, so that the machine's own variables decide no test."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return kept | {"PYTHONPATH": SOURCE, "PYTHONUTF8": "1", "NO_COLOR": "1"} | more


def find_python(env: Mapping[str, str], *load: str) -> list[str]:
    """Return `python` for a program, with modules to `load`; forked instead of started where this environment allows
    it. A test that kills the process, or uses its process id, starts a real interpreter."""
    return start_fork_server().find_python(*load) if can_fork(env) else [sys.executable]


def find_quick_command(*load: str) -> list[str]:
    """Return `COMMAND` in the same way."""
    return [*find_python(environment(), *load), "-m", "retinue"]


@cache
def find_path_without_engines() -> str:
    """Return a PATH with every program of this one but those of containers."""
    folder = Path(tempfile.mkdtemp(prefix="retinue-programs-"))
    atexit.register(shutil.rmtree, folder)
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in _list_programs(place):
            if program.name not in ("podman", "docker"):
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


def _list_programs(place: str) -> list[Path]:
    """Return what a folder of PATH has; nothing if it is not there, or not ours to read."""
    try:
        return list(Path(place).iterdir())
    except OSError:
        return []


def _asks_provider(arguments: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Tell whether a command probably loads the adapter of providers."""
    models = [model for option, model in pairwise(arguments) if option == "--model"]
    return any(name.endswith("_API_KEY") for name in variables) or not all(
        model.startswith("scripted:") for model in models
    )


class Project:
    """A folder with a retinue.yaml, and the commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix: list[str] = []
        self.runtime = "inherited"  # so quick; empty says nothing, which is what a user does
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "retinue.yaml").touch()

    def script(self, agents: dict[str, Any], *, name: str = "script.yaml", **more: Any) -> str:
        """Writes a script file and gives the model that plays it."""
        (self.folder / name).write_text(json.dumps({"agents": agents, **more}))  # JSON is YAML
        return f"scripted:{name}"

    def said(self, arguments: Sequence[str]) -> list[str]:
        """The words of a command, with where its runs live."""
        if (
            not self.runtime
            or not arguments
            or arguments[0] not in ("run", "resume", "continue")
            or "--runtime" in arguments
        ):
            return list(arguments)
        return [*arguments, "--runtime", self.runtime]

    def retinue(self, *arguments: str, stdin: str | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        """One command from start to end."""
        env = environment(**more)
        if not self.prefix and can_fork(env):
            return start_fork_server().run_command(
                ["-m", "retinue", *self.said(arguments)],
                cwd=self.folder,
                env=env,
                stdin=stdin,
                timeout=SECONDS,
                load=PROVIDER if _asks_provider(arguments, more) else (),
            )
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        return subprocess.run(
            [*self.prefix, *COMMAND, *self.said(arguments)],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=SECONDS,
            check=False,
            **given,
        )

    def doctor(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """`retinue doctor` where neither podman nor docker is installed: with one it starts a container."""
        return self.retinue("doctor", *arguments, PATH=find_path_without_engines(), **more)

    def run(self, *arguments: str, agents: dict[str, Any], **more: Any) -> subprocess.CompletedProcess[str]:
        """`retinue run` with this script."""
        return self.retinue("run", "the task", "--model", self.script(agents), *arguments, **more)

    @contextmanager
    def running(self, *arguments: str, quick: bool = True, **more: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command, and kill it at the end of the block or after SECONDS. A command that the test kills or signals
        by its process id is not `quick`."""
        env = environment(**more)
        process = subprocess.Popen(
            [*(find_python(env) if quick else [sys.executable]), "-m", "retinue", *self.said(arguments)],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()
            process.communicate()

    def events(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the events that `tail --json` prints for the latest tree."""
        return [json.loads(line) for line in self.retinue("tail", "--json", *arguments).stdout.splitlines()]

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """Return the rows that `ps --json` prints."""
        rows: list[dict[str, Any]] = json.loads(self.retinue("ps", "--json", *arguments).stdout)
        return rows


def read_until(stream: Any, text: str) -> str:
    """Read lines until one has the text, and return everything read. Fail if the stream ends first."""
    read = ""
    for line in stream:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} never came; there was:\n{read}")


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def until(condition: Callable[[], bool]) -> None:
    """Asks again and again, for SECONDS at most, whether something real has come true."""
    pause, end = threading.Event(), time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came true"
        pause.wait(0.02)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    """The one line a command that was used wrongly says; nothing else, no traceback, exit code 2."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("retinue: ")
    return lines[0].removeprefix("retinue: ")
