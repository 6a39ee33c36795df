"""How long `retinue --help` takes against an interpreter that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from bench.table import Row


def fastest(command: list[str], *, times: int = 15) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def rows() -> Iterator[Row]:
    nothing = fastest([sys.executable, "-c", "pass"])
    yield Row("reference: python -c pass", f"{nothing * 1e3:.1f} ms")
    shown = fastest([sys.executable, "-m", "retinue", "--help"])
    yield Row("retinue --help", f"{shown * 1e3:.1f} ms", shown / nothing, 5)
    imported = fastest([sys.executable, "-c", "import retinue; retinue.open"])
    yield Row("import retinue, with the library loaded", f"{imported * 1e3:.1f} ms", imported / nothing)
