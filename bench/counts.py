"""Instructions and allocations of one parent with its subagent: counts that do not depend on how busy the machine is.

Valgrind counts them in processes of their own, which do the work a few and a few more times; the difference is free of
imports and start-up. To compare two commits, compare their counts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from bench.table import Row

FEW, MORE = 20, 1020  # so many that it does not matter where the garbage collections fall
# The counts of the first version (6728237) with CPython 3.11, without and with rules and a budget. Machines differ by
# less than a thousandth.
FIRST_INSTRUCTIONS = {False: 869_436, True: 926_682}
FIRST_ALLOCATIONS = {False: 521, True: 568}
CODE = (
    "import asyncio; from bench.work import ours; asyncio.run(ours(None, count={}, delay=0, at_once=True, guarded={}))"
)
INSTRUCTIONS = (
    ["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"],
    re.compile(r"I +refs: +(\S+)"),
)
ALLOCATIONS = ["--undef-value-errors=no", "--leak-check=no"], re.compile(r"total heap usage: (\S+) allocs")


def rows() -> Iterator[Row]:
    if shutil.which("valgrind") is None:
        yield Row("instructions and allocations: not measured", "no valgrind")
        return
    for guards, guarded in (("", False), (", rules and budget on", True)):
        yield _row("instructions", guards, _count_run(INSTRUCTIONS, guarded), FIRST_INSTRUCTIONS[guarded])
        yield _row("allocations", guards, _count_run(ALLOCATIONS, guarded), FIRST_ALLOCATIONS[guarded])


def _row(what: str, guards: str, count: float, first: int) -> Row:
    return Row(f"{what} of one run in memory{guards}", f"{count:,.0f}", count / first, 1.2, "x first")


def _count_run(counter: tuple[list[str], re.Pattern[str]], guarded: bool) -> float:
    few, more = (_count_process(counter, CODE.format(count, guarded)) for count in (FEW, MORE))
    return (more - few) / (MORE - FEW)


def _count_process(counter: tuple[list[str], re.Pattern[str]], code: str) -> int:
    options, pattern = counter
    settings = {"PYTHONHASHSEED": "0"}
    if counter is ALLOCATIONS:
        settings["PYTHONMALLOC"] = "malloc"  # Python's own allocator hides most of them
    done = subprocess.run(
        ["valgrind", *options, sys.executable, "-c", code],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    found = pattern.search(done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", ""))
