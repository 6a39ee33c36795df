"""Commands without the start of an interpreter: a process that has imported the package forks one for each.

Importing takes most of a short command's time, and the suite runs more than a thousand. A forked command is a process
of its own, with its own folder, environment, umask, streams and exit code. Run as a program this file is the server: it
reads requests from the socket that is its stdin and from those who connect, and ends with the first.
"""

import atexit
import gc
import importlib
import marshal
import os
import pkgutil
import runpy
import secrets
import selectors
import signal
import socket
import struct
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
CLIENT = Path(__file__).with_name("fork_client.py")
# Loaded by few commands, and with a large library behind each.
RARE = ("retinue.models.provider", "retinue.telemetry", "retinue.pytest", "retinue.remote.a2a", "retinue.surfaces.a2a")


def can_fork(env: Mapping[str, str]) -> bool:
    """Tell whether an interpreter that runs already can take this environment over."""
    read = {name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_", "LC_"))}
    search_path = set(read.pop("PYTHONPATH", "").split(os.pathsep))
    return PYTHON_SETTINGS["PYTHONPATH"] in search_path <= {PYTHON_SETTINGS["PYTHONPATH"], *sys.path} and read == {
        "PYTHONUTF8": PYTHON_SETTINGS["PYTHONUTF8"]
    }


class ForkServer:
    """The server of this process, which lives as long."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        atexit.register(self._socket.close)
        self._name = f"retinue-tests-{secrets.token_hex(16)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{self._name}")
            listener.listen(64)
            argv, env = [sys.executable, __file__, str(listener.fileno())], {**os.environ, **PYTHON_SETTINGS}
            subprocess.run(
                argv, env=env, stdin=theirs, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()], check=True
            )
        theirs.close()

    def find_python(self, *load: str) -> list[str]:
        """Return the words that start a process here in place of `python`, with the package and the modules of `load`
        imported. A signal to the started process reaches the forked one a moment later."""
        return [sys.executable, "-I", "-S", str(CLIENT), self._name, ",".join(load)]

    def run_command(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: str | None,
        timeout: float,
        load: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run `python` with these arguments from start to end, as `subprocess.run` does."""
        umask = os.umask(0)
        os.umask(umask)
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env), "umask": umask, "load": list(load)}
        # Packets: of a short command on a busy machine both the number and the exit code may be there at once.
        told, their_told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given, words, (out, their_out), (err, their_err) = (
            _open_input(stdin),
            os.memfd_create("x"),
            os.pipe(),
            os.pipe(),
        )
        with open(words, "wb") as file:
            marshal.dump(request, file)
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


def serve(listener: socket.socket) -> dict[str, Any]:
    """Serve until the first client is gone. Returns in each forked process, with its request."""
    first, running = socket.socket(fileno=0), selectors.DefaultSelector()
    for asking in (first, listener):
        running.register(asking, selectors.EVENT_READ)
    while True:
        for key, _ in running.select():
            if key.fileobj is listener:
                client = listener.accept()[0]
                if _read_user(client) == os.getuid():
                    running.register(client, selectors.EVENT_READ)
                continue
            if key.data is not None:
                key.data(running)
                continue
            assert isinstance(key.fileobj, socket.socket)
            data, fds = _receive(key.fileobj)
            if key.fileobj is not first:
                running.unregister(key.fileobj)
                key.fileobj.close()
            elif not data:
                _leave()
            if not data:
                continue
            told, words, *streams = fds
            request = _read_request(words)
            if not sys.modules.keys() >= set(request["load"]):
                for name in request["load"]:
                    importlib.import_module(name)
                gc.freeze()
            if (pid := os.fork()) == 0:
                for asking in (first, listener):
                    asking.detach()
                running.close()
                _become(request, streams)
                return request
            Command(pid, told).register(running)
            for fd in streams:
                os.close(fd)


class Command:
    """A forked process and the socket of the client who waits for its end."""

    def __init__(self, pid: int, told: int) -> None:
        self._pid, self._pidfd, self._told, self._is_over = pid, os.pidfd_open(pid), told, False
        self._tell(pid)

    def register(self, running: selectors.BaseSelector) -> None:
        running.register(self._pidfd, selectors.EVENT_READ, self._end)
        running.register(self._told, selectors.EVENT_READ, self._kill)

    def _kill(self, running: selectors.BaseSelector) -> None:
        """End the process of a client who is gone."""
        if not self._is_over:  # or it ended at the same time
            running.unregister(self._told)
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _end(self, running: selectors.BaseSelector) -> None:
        self._is_over = True
        _, status = os.waitpid(self._pid, 0)
        running.unregister(self._pidfd)
        with suppress(KeyError):  # the client is gone
            running.unregister(self._told)
        self._tell(os.waitstatus_to_exitcode(status))
        for fd in (self._pidfd, self._told):
            os.close(fd)

    def _tell(self, number: int) -> None:
        with suppress(OSError):  # the client is gone
            os.write(self._told, str(number).encode())


def _receive(client: socket.socket) -> tuple[bytes, list[int]]:
    """Return a packet and its descriptors; nothing of a client who is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(client, 16, 5)
    except OSError:
        return b"", []
    return data, fds


def _read_user(client: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def _read_request(words: int) -> dict[str, Any]:
    os.lseek(words, 0, os.SEEK_SET)
    with open(words, "rb") as file:
        request: dict[str, Any] = marshal.load(file)
    return request


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


def _become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Take over all that a new process would have been given."""
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


def run_program(arguments: Sequence[str], search_path: Sequence[str]) -> int:
    """Run what `python` would with these arguments: a module or a file."""
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if arguments[0] == "-m":
        name, *words = arguments[1:]
        sys.argv, sys.path[:] = [name, *words], [os.getcwd(), *given, *search_path]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = [*arguments], [str(Path(arguments[0]).parent), *given, *search_path]
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _open_stream(fd: int, mode: str, errors: str) -> TextIOWrapper:
    return TextIOWrapper(open(fd, f"{mode}b", closefd=False), encoding="utf-8", errors=errors)


if __name__ == "__main__":
    if os.fork():  # nobody's child: tests look for what is left below their own process
        _leave()
    os.setsid()  # no terminal of whoever runs the tests is that of a command
    kept = sys.path[2:]  # without the folder of this file and the package's
    load_modules()
    gc.collect()
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    _leave_as_a_program(lambda: run_program(asked["arguments"], kept))
