"""Benchmark of starting: `retinue --help` against an idle interpreter, and the first answer to an MCP client."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from bench.table import Row, compare

ROUNDS = 15


def time_command(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def time_first_answer(request: Mapping[str, object]) -> float:
    """Return the seconds from the start of `retinue mcp serve` until its first answer is read."""
    command = [str(Path(sys.executable).with_name("retinue")), "mcp", "serve", "--model", "scripted:none.yaml"]
    line = json.dumps({"jsonrpc": "2.0", "id": 1, **request}).encode() + b"\n"
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(line)
            process.stdin.flush()
            assert b'"result"' in process.stdout.readline()
            seconds = time.perf_counter() - started
            process.stdin.close()
    return seconds


def time_first_pixel(wanted: bytes = b"") -> float:
    """Return the seconds from the start of `retinue run` at a terminal until something is on the screen: anything, or
    these bytes."""
    master, slave = pty.openpty()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "script.yaml").write_text('{"agents": {"main": ["done"]}}')
        command = [str(Path(sys.executable).with_name("retinue")), "run", "x", "--model", "scripted:script.yaml"]
        environment = {**os.environ, "TERM": "xterm"}
        started = time.perf_counter()
        with subprocess.Popen(
            [*command, "--runtime", "inherited"], cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True,
        ) as process:  # fmt: skip
            os.close(slave)
            seen = os.read(master, 65536)
            while wanted not in seen:
                seen += os.read(master, 65536)
            seconds = time.perf_counter() - started
            with suppress(OSError):  # the end, once the process has closed its side
                while os.read(master, 65536):
                    pass
            process.wait()
        os.close(master)
    return seconds


def rows() -> Iterator[Row]:
    nothing = partial(time_command, sys.executable, "-c", "pass")
    yield Row("reference: python -c pass", f"{nothing() * 1e3:.1f} ms")
    yield _row("retinue --help", partial(time_command, sys.executable, "-m", "retinue", "--help"), nothing, 5)
    yield _row("retinue run: the first pixel on a terminal (300 ms are promised)", time_first_pixel, nothing, 6)
    header = partial(time_first_pixel, b"no budget")
    yield _row("retinue run: its header, with model, sandbox, workspace and budget", header, nothing, None)
    library = partial(time_command, sys.executable, "-c", "import retinue; retinue.open")
    yield _row("import retinue, with the library loaded", library, nothing, None)
    asyncio = partial(time_command, sys.executable, "-c", "import asyncio")
    yield Row("reference: python -c 'import asyncio'", f"{asyncio() * 1e3:.1f} ms")
    hello = {"method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}}
    yield _row("retinue mcp serve: the answer to initialize", partial(time_first_answer, hello), asyncio, 6)
    envelope = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    discover = partial(time_first_answer, {"method": "server/discover", "params": {"_meta": envelope}})
    yield _row("retinue mcp serve: the answer to server/discover", discover, asyncio, 6)


def _row(what: str, candidate: Callable[[], float], reference: Callable[[], float], limit: float | None) -> Row:
    seconds, ratio = compare(candidate, reference, rounds=ROUNDS)
    return Row(what, f"{seconds * 1e3:.1f} ms", ratio, limit)
