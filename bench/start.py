"""How long `retinue --help` takes against an idle interpreter, and how soon an MCP client has its first answer."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.table import Row


def fastest(command: list[str], *, times: int = 15) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def first_answer(request: dict[str, object], *, times: int = 15) -> float:
    """From the start of `retinue mcp serve` until its first answer is read."""
    command = [str(Path(sys.executable).with_name("retinue")), "mcp", "serve", "--model", "scripted:none.yaml"]
    line = json.dumps({"jsonrpc": "2.0", "id": 1, **request}).encode() + b"\n"
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            started = time.perf_counter()
            with subprocess.Popen(
                command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(line)
                process.stdin.flush()
                assert b'"result"' in process.stdout.readline()
                seconds.append(time.perf_counter() - started)
                process.stdin.close()
    return min(seconds)


def rows() -> Iterator[Row]:
    nothing = fastest([sys.executable, "-c", "pass"])
    yield Row("reference: python -c pass", f"{nothing * 1e3:.1f} ms")
    shown = fastest([sys.executable, "-m", "retinue", "--help"])
    yield Row("retinue --help", f"{shown * 1e3:.1f} ms", shown / nothing, 5)
    imported = fastest([sys.executable, "-c", "import retinue; retinue.open"])
    yield Row("import retinue, with the library loaded", f"{imported * 1e3:.1f} ms", imported / nothing)
    asyncio = fastest([sys.executable, "-c", "import asyncio"])
    yield Row("reference: python -c 'import asyncio'", f"{asyncio * 1e3:.1f} ms")
    hello = {"method": "initialize", "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {}}}
    answered = first_answer(hello)
    yield Row("retinue mcp serve: the answer to initialize", f"{answered * 1e3:.1f} ms", answered / asyncio, 6)
    envelope = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    answered = first_answer({"method": "server/discover", "params": {"_meta": envelope}})
    yield Row("retinue mcp serve: the answer to server/discover", f"{answered * 1e3:.1f} ms", answered / asyncio, 6)
