"""Benchmark of the commands that read the log, as it grows: many trees, and one very long tree, each against the
smallest log."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from bench.table import Row
from retinue.core.events import (
    Event,
    EventBody,
    Message,
    RunEnded,
    RunSpawned,
    RunStarted,
    TurnEnded,
    TurnStarted,
    UsageReported,
)
from retinue.core.usage import Usage
from retinue.files.state_owner import claim_state_folder
from retinue.log.sqlite import SqliteLog
from retinue.supervisor.tree import new_tree_id

TREES = 100, 1_000, 10_000
EVENTS = 50, 500_000
ROUNDS = 3
LIMIT = 3
GIVE_UP_SECONDS = 60
SPENT = UsageReported("scripted", Usage(10, 5))
TOGETHER = 20  # trees that are written in one batch
COMMANDS = {"ps": ["ps"], "ps --all": ["ps", "--all"], "show LABEL": ["show", "{label}"],
            "tail PREFIX": ["tail", "{prefix}"], "resume LABEL": ["resume", "{label}"],
            "usage": ["usage"], "usage --since": ["usage", "--since", "0s"]}  # fmt: skip


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        yield from _rows_of_trees(Path(folder))
        yield from _rows_of_events(Path(folder))


def _rows_of_trees(folder: Path) -> Iterator[Row]:
    places = {count: folder / f"trees-{count}" for count in TREES}
    names = {count: _fill_log(place, trees=count, turns=1) for count, place in places.items()}
    for what, words in COMMANDS.items():
        smallest = 0.0
        for count, place in places.items():
            label, tree = names[count]
            command = [word.format(label=label, prefix=tree[:12]) for word in words]
            seconds = statistics.median(_run_command(place, command)[0] for _ in range(ROUNDS))
            smallest = smallest or seconds
            ratio = None if count == TREES[0] else seconds / smallest
            yield Row(f"{what}, {count:,} trees", f"{seconds * 1e3:.0f} ms", ratio, ratio and LIMIT)


def _rows_of_events(folder: Path) -> Iterator[Row]:
    places = [folder / f"events-{count}" for count in EVENTS]
    for count, place in zip(EVENTS, places, strict=True):
        _fill_log(place, trees=1, turns=count // 4)
    for what, words in (("ps", ["ps"]), ("tail | head", ["tail"])):
        (first, small), (second, large) = (_run_command(place, words, lines=10) for place in places)
        name = f"{what}, one tree of {EVENTS[1]:,} events, of one of {EVENTS[0]}"
        yield Row(name, f"{second * 1e3:.0f} ms", second / first, LIMIT)
        yield Row(f"{name}: memory", f"{large / 1024:.0f} MiB", large / small, LIMIT)


def _fill_log(project: Path, *, trees: int, turns: int) -> tuple[str, str]:
    """Write a log in a process of its own: the most memory of a command includes that of the process it is forked
    from."""
    call = f"write_trees({str(project)!r}, {trees}, {turns})"
    code = f"import asyncio; from bench.logs import write_trees; asyncio.run({call})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    label, tree = done.stdout.split()
    return label, tree


async def write_trees(project: str, trees: int, turns: int) -> None:
    """Write ended trees through the log, and print the label and the id of one in the middle."""
    claim_state_folder(Path(project) / ".retinue")
    log = SqliteLog(Path(project) / ".retinue" / "logs")
    ids = [new_tree_id() for _ in range(trees)]
    for number, tree in enumerate(ids):
        at = time.time()
        spawned = RunSpawned(None, f"label-{number}", 0, "count the files", f"main-{number}", "/x", model="scripted")
        bodies: list[EventBody] = [spawned, RunStarted("inherited")]
        for turn in range(1, turns + 1):
            bodies += [TurnStarted(turn), Message("there are many of them"), SPENT, TurnEnded(turn)]
        bodies.append(RunEnded("done", "many", 1))
        for seq, body in enumerate(bodies, 1):
            wait = seq % 1000 == 0 or (isinstance(body, RunEnded) and number % TOGETHER == 0)
            written = log.append(Event(seq, tree, 0, "/main", "main", at, body), wait)
            if wait and written is not None:
                await written
    await log.close()
    print(f"label-{trees // 2}", ids[trees // 2])


def _run_command(project: Path, words: list[str], *, lines: int | None = None) -> tuple[float, int]:
    """Return the processor seconds of a command, which others on the machine do not change, and the most memory it
    held, in KiB. With `lines`, read no more than those. A command is given up after some time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "retinue", *words],
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    giving_up = threading.Timer(GIVE_UP_SECONDS, process.kill)
    giving_up.start()
    if lines is None:
        process.stdout.read()
    else:
        for _ in range(lines):
            process.stdout.readline()
    process.stdout.close()
    _, status, used = os.wait4(process.pid, 0)
    giving_up.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    found = 2 if words[0] == "resume" else 0  # the tree that is found has ended, so it is not resumed
    assert lines is not None or process.returncode in (found, -signal.SIGKILL), process.returncode
    return used.ru_utime + used.ru_stime, used.ru_maxrss
