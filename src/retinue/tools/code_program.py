"""The script that runs one program of code mode in its own process. The script imports nothing from retinue.

Its only argument is the number of a file descriptor: the channel to its parent process. A frame on the channel is a
four-byte length and as many bytes of JSON. The first frame holds the program and the source of the modules below
`tools`. Then each tool call is sent with an id, and the answer comes back with the same id. The output of the program
is everything it prints, and the value of its last expression. A thread reads the answers, so that calls work from any
event loop.
"""

from __future__ import annotations

import ast
import json
import os
import socket
import sys
import threading
import types
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False  # type checkers read it as typing.TYPE_CHECKING; `typing` is not imported
if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from traceback import TracebackException
    from typing import Any

NAME = "program.py"
LAST = "__last__"
HEAD = 4
FRAME_BYTES = 4 * 1024 * 1024
COROUTINE = 0x80  # inspect.CO_COROUTINE, without importing `inspect`


class ToolError(Exception):
    """A tool said no or failed; the text is its words."""


ToolError.__module__ = "tools"


class ProgramChannel:
    """The program's end of the channel. Calls are sent under a lock. One thread reads the answers and resolves the
    futures of the calls."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._asked = 0
        self._reader: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False

    def receive(self) -> Any:
        size = int.from_bytes(self._receive_bytes(HEAD), "big")
        return json.loads(self._receive_bytes(size))

    async def call(self, tool: str, args: dict[str, Any], field: str = "") -> Any:
        """Call a tool and return its value. If the value is an object with `field` as its only field, return that
        field.

        An argument whose value is `...` was left out by the program and is not sent."""
        import asyncio  # noqa: PLC0415 - takes most of a program's start time, and only calls need it

        given = {name: value for name, value in args.items() if value is not ...}
        value = await asyncio.wrap_future(self._ask(tool, given))
        return value[field] if field and isinstance(value, dict) and list(value) == [field] else value

    def _ask(self, tool: str, args: dict[str, Any]) -> Future[Any]:
        from concurrent.futures import Future  # noqa: PLC0415

        if os.getpid() != self._process:
            raise ToolError("tools can be called from the program's first process only")
        waiting: Future[Any] = Future()
        with self._lock:
            self._asked += 1
            body = json.dumps(
                {"id": self._asked, "tool": tool, "args": args}, ensure_ascii=False, allow_nan=False
            ).encode()
            if len(body) > FRAME_BYTES:
                raise ToolError(f"the arguments are {len(body)} bytes; a call can have {FRAME_BYTES}")
            if self._closed:
                raise ToolError("the channel to the tools is closed")
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            self._waiting[self._asked] = waiting
            try:
                self._socket.sendall(len(body).to_bytes(HEAD, "big") + body)
            except OSError as error:
                self._waiting.pop(self._asked, None)
                raise ToolError(f"the channel to the tools is closed: {error}") from None
        return waiting

    def _read(self) -> None:
        try:
            while True:
                answer = self.receive()
                waiting = self._waiting.pop(answer["id"], None)
                if waiting is None or not waiting.set_running_or_notify_cancel():
                    continue
                if answer.get("error") is None:
                    waiting.set_result(answer.get("value"))
                else:
                    waiting.set_exception(ToolError(answer["error"]))
        except (EOFError, OSError, ValueError):
            with self._lock:
                self._closed = True
            for waiting in self._waiting.values():
                if waiting.set_running_or_notify_cancel():
                    waiting.set_exception(ToolError("the channel to the tools is closed"))

    def _receive_bytes(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


class Modules:
    """An importer that finds and loads `tools.NAME` from the sources sent with the program."""

    def __init__(self, sources: dict[str, str], call: Any) -> None:
        self._sources = {f"tools.{name}": source for name, source in sources.items()}
        listed = ", ".join(sources) or "there is none"
        tools = types.ModuleType("tools", f"The tools of this run's MCP servers, one module each: {listed}.")
        tools.__path__ = []
        tools.__dict__.update(ToolError=ToolError, _call=call, __all__=[*sources, "ToolError"], __getattr__=self._get)
        sys.modules["tools"] = tools
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, origin=_name_file(name)) if name in self._sources else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = _name_file(module.__name__)
        exec(compile(self._sources[module.__name__], module.__file__, "exec", dont_inherit=True), module.__dict__)

    def get_source(self, name: str) -> str:
        return self._sources[name]

    def _get(self, name: str) -> Any:
        if f"tools.{name}" not in self._sources:
            known = ", ".join(full.partition(".")[2] for full in self._sources) or "none"
            raise AttributeError(f"module 'tools' has no {name!r}; available: {known}")
        __import__(f"tools.{name}")
        return sys.modules[f"tools.{name}"]


def _name_file(name: str) -> str:
    return name.replace(".", "/") + ".py"


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
    channel = ProgramChannel(int(sys.argv[1]))
    start = channel.receive()
    Modules(start["modules"], channel.call)
    sys.argv[:] = [NAME]
    code = start["code"]
    try:
        body = _compile(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        _print_error(error, only=True)
        sys.exit(1)
    import linecache  # noqa: PLC0415

    linecache.cache[NAME] = (len(code), None, f"{code}\n".splitlines(keepends=True), NAME)
    sys.exit(_run_body(body))


def _compile(code: str) -> types.CodeType:
    """Compile the program. If its last statement is an expression, assign its value to the name `LAST`."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree: ast.Module = compile(code, NAME, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        kept = ast.Assign([ast.Name(LAST, ast.Store())], last.value)
        tree.body[-1] = ast.fix_missing_locations(ast.copy_location(kept, last))
    body: types.CodeType = compile(tree, NAME, "exec", flags, dont_inherit=True)
    return body


def _run_body(body: types.CodeType) -> int:
    program = types.ModuleType("__main__")
    program.__dict__["__file__"] = NAME
    sys.modules["__main__"] = program
    try:
        if body.co_flags & COROUTINE:
            import asyncio  # noqa: PLC0415

            asyncio.run(eval(body, program.__dict__))
        else:  # no event loop runs here, so that the program can call asyncio.run(main()) itself
            exec(body, program.__dict__)
        value = program.__dict__.get(LAST)
        if value is not None:
            print(repr(value))
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the program raises is its output
        _print_error(error)
        return 1
    return 0


def _print_error(error: BaseException, *, only: bool = False) -> None:
    """Print the error as Python does, with only the program's own lines. With `only`, print no traceback."""
    from traceback import TracebackException  # noqa: PLC0415

    told = TracebackException.from_exception(error)
    _trim_frames(told, set())
    sys.stdout.flush()
    bare = only or not (told.stack or told.exceptions)  # an exception group may have frames only in its members
    sys.stderr.write("".join(told.format_exception_only() if bare else told.format()))


def _trim_frames(told: TracebackException, seen: set[int]) -> None:
    if id(told) in seen:
        return
    seen.add(id(told))
    told.stack[:] = [frame for frame in told.stack if frame.filename == NAME]
    for other in (told.__cause__, told.__context__, *(told.exceptions or ())):
        if other is not None:
            _trim_frames(other, seen)


if __name__ == "__main__":
    main()
