"""Commands without the start of an interpreter: a process that has imported the command line forks one for each.

Importing takes most of a short command's time, and the suite runs more than a thousand. A forked command is a process
of its own, with its own folder, environment, umask, streams and exit code. Run as a program this file is the server: it
reads requests from the socket that is its stdin, and ends with it.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import retinue

PACKAGE = Path(retinue.__file__).parent
PYTHON_SETTINGS = {"PYTHONPATH": str(PACKAGE.parent), "PYTHONUTF8": "1"}  # read when an interpreter starts
# Loaded by few commands, and with a large library behind each.
RARE = ("retinue.models.provider", "retinue.telemetry", "retinue.pytest", "retinue.remote.a2a", "retinue.surfaces.a2a")


def can_fork(env: Mapping[str, str]) -> bool:
    """Tell whether an interpreter that runs already can take this environment over."""
    return {name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_", "LC_"))} == PYTHON_SETTINGS


class ForkServer:
    """The server of this process, which lives as long."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        atexit.register(self._socket.close)
        argv, env = [sys.executable, __file__], {**os.environ, **PYTHON_SETTINGS}
        subprocess.run(argv, env=env, stdin=theirs, stdout=subprocess.DEVNULL, check=True)
        theirs.close()

    def run_command(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: str | None, timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run one command from start to end, as `subprocess.run` does."""
        umask = os.umask(0)
        os.umask(umask)
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "umask": umask}
        # Packets: of a short command on a busy machine both the number and the exit code may be there at once.
        told, their_told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given, words, (out, their_out), (err, their_err) = (
            _open_input(stdin),
            os.memfd_create("x"),
            os.pipe(),
            os.pipe(),
        )
        with open(words, "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._socket, [b"x"], [their_told.fileno(), words, given, their_out, their_err])
        their_told.close()
        for fd in (given, their_out, their_err):
            os.close(fd)
        with told, open(out, encoding="utf-8") as output, open(err, encoding="utf-8") as errors:
            told.settimeout(timeout)
            watchdog = threading.Timer(timeout, os.kill, (int(told.recv(64)), signal.SIGKILL))
            watchdog.start()
            try:
                said: list[str] = []
                reading = threading.Thread(target=lambda: said.append(errors.read()))
                reading.start()
                answer = output.read()
                reading.join()
                code = int(told.recv(64))
            finally:
                watchdog.cancel()
        return subprocess.CompletedProcess([*arguments], code, answer, said[0])


@cache
def start_fork_server() -> ForkServer:
    return ForkServer()


def _open_input(text: str | None) -> int:
    if text is None:
        return os.open(os.devnull, os.O_RDONLY)
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError), open(writing, "w", encoding="utf-8") as stream:
            stream.write(text)

    threading.Thread(target=write).start()
    return reading


def load_modules() -> None:
    for found in pkgutil.walk_packages(retinue.__path__, "retinue."):
        if not found.name.startswith(RARE) and "__main__" not in found.name and ".sample" not in found.name:
            importlib.import_module(found.name)


def serve() -> dict[str, Any]:
    """Serve until the client is gone. Returns in each forked process, with its request."""
    client, running = socket.socket(fileno=0), selectors.DefaultSelector()
    running.register(client, selectors.EVENT_READ)
    while True:
        for key, _ in running.select():
            if key.data is not None:
                _end_command(running, key.fd, *key.data)
                continue
            data, fds, _, _ = socket.recv_fds(client, 16, 5)
            if not data:
                _leave()
            told, words, *streams = fds
            if (pid := os.fork()) == 0:
                client.detach()
                running.close()
                return _become(words, streams)
            running.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))
            os.write(told, str(pid).encode())
            for fd in (words, *streams):
                os.close(fd)


def _leave() -> NoReturn:
    os._exit(0)


def _leave_as_a_program(main: Callable[[], int]) -> NoReturn:
    """Do all that an interpreter does at its end, but for taking its modules apart: that takes longer than most
    commands."""
    try:
        code = main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _end_command(running: selectors.BaseSelector, pidfd: int, pid: int, told: int) -> None:
    _, status = os.waitpid(pid, 0)
    running.unregister(pidfd)
    os.close(pidfd)
    with suppress(BrokenPipeError):  # the client has given up
        os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(told)


def _become(words: int, streams: Sequence[int]) -> dict[str, Any]:
    """Take over all that a new process would have been given."""
    os.lseek(words, 0, os.SEEK_SET)
    with open(words, "rb") as file:
        request: dict[str, Any] = json.load(file)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(3, 4096)
    sys.stdin = sys.__stdin__ = _open_stream(0, "r", "surrogateescape")
    sys.stdout = sys.__stdout__ = _open_stream(1, "w", "surrogateescape")
    sys.stderr = sys.__stderr__ = _open_stream(2, "w", "backslashreplace")
    sys.stderr.reconfigure(line_buffering=True)
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [str(PACKAGE / "__main__.py"), *request["arguments"]]
    sys.path[0] = request["cwd"]
    return request


def _open_stream(fd: int, mode: str, errors: str) -> TextIOWrapper:
    return TextIOWrapper(open(fd, f"{mode}b", closefd=False), encoding="utf-8", errors=errors)


if __name__ == "__main__":
    if os.fork():  # nobody's child: tests look for what is left below their own process
        _leave()
    load_modules()
    gc.collect()
    gc.freeze()
    serve()
    _leave_as_a_program(importlib.import_module("retinue.surfaces.cli.main").main)
