"""`retinue doctor --escape`: try to break out of each sandbox that works here, and show what held.

A sandboxed run gets the commands from a model that is a list. The first command checks that the sandbox works; unless
it does, the model says no more, so nothing is ever tried without a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from retinue.build.parts import Parts
from retinue.build.sandboxes import make_placement, plant_escape_attempts, run_as_ordinary_user
from retinue.build.supervisor import open_control
from retinue.core.errors import RetinueError
from retinue.core.ports import Model
from retinue.core.profiles import Profile, RuntimeName, Task
from retinue.core.results import Result
from retinue.surfaces.cli import output as screen
from retinue.surfaces.printer import safe

SANDBOXES: tuple[RuntimeName, ...] = ("isolated", "container")
NEEDED = frozenset({"pid", "mount", "net", "proxy", "caps", "no_new_privs"})
USER_SECONDS = 300.0
HELD, ESCAPED, UNKNOWN = "held", "ESCAPED", "no answer"
WIDE = 11
_TRIES = '"$1" -m retinue doctor --build-image >/dev/null 2>&1; exec "$1" -m retinue doctor --escape --json'


class NotTried(RetinueError):
    """The sandbox was not seen to work, so nothing was tried."""


def run_attempts(*, as_json: bool) -> int:
    """Print the table; return 1 if something got out, or if no sandbox works."""
    columns, reasons = tried()
    if os.geteuid() == 0:
        told, why = _as_ordinary()
        columns |= told
        reasons += why
    if as_json:
        screen.print_json({"tries": columns, "not_tried": reasons})
    else:
        print_table(columns, reasons)
    found = [told for column in columns.values() for told in column.values()]
    return int(not found or any(told != HELD for told in found))


def tried() -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return what was tried in each sandbox that works here, and why the others do not."""
    who = "root" if os.geteuid() == 0 else "user"
    columns: dict[str, dict[str, str]] = {}
    reasons = []
    for runtime in SANDBOXES:
        try:
            escaped = asyncio.run(try_all(runtime))
        except RetinueError as error:
            reasons.append(f"{runtime}, by {who}: {error}")
            continue
        columns[f"{runtime}, by {who}"] = {
            name: UNKNOWN if out is None else ESCAPED if out else HELD for name, out in escaped.items()
        }
    return columns, reasons


def _as_ordinary() -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the same, tried as an ordinary user."""
    try:
        done = run_as_ordinary_user(["/bin/sh", "-c", _TRIES, "sh", sys.executable], seconds=USER_SECONDS)
        told = json.loads(done.stdout)
        return told["tries"], told["not_tried"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        return {}, [f"by an ordinary user: {type(error).__name__}: {error}"]


def print_table(columns: Mapping[str, Mapping[str, str]], reasons: list[str]) -> None:
    tries = list(dict.fromkeys(name for column in columns.values() for name in column))
    wide = max(map(len, tries), default=0)
    if columns:
        for row in zip(*(title.split(", ") for title in columns), strict=True):
            print(f"{'':<{wide}}  " + "".join(f"{word:<{WIDE}}" for word in row).rstrip())
        for name in tries:
            told = (column.get(name, UNKNOWN) for column in columns.values())
            print(f"{name:<{wide}}  " + "".join(f"{word:<{WIDE}}" for word in told).rstrip())
        answers = [told for column in columns.values() for told in column.values()]
        counts = ", ".join(f"{answers.count(word)} {word}" for word in (HELD, ESCAPED, UNKNOWN) if word in answers)
        print(f"{len(answers)} tries from inside {len(columns)} sandboxes: {counts}")
    for reason in reasons:
        print(f"not tried: {safe.escape_line(reason)}")


async def try_all(runtime: RuntimeName) -> dict[str, bool | None]:
    """Return which tries got out of one sandbox; None for one without an answer. Raises NotTried, or ConfigError where
    there is no such sandbox."""
    if runtime not in SANDBOXES:
        raise NotTried(f"runtime {runtime!r} is no sandbox")
    with plant_escape_attempts(runtime) as (made, parts):
        started = make_placement(parts).runtime(runtime, "hosts").started
        sandbox = () if started is None else started.sandbox
        if not set(sandbox) >= NEEDED:
            raise NotTried(f"only these of its parts work: {', '.join(sandbox)}")
        result = await play(parts, made.model)
        if not made.model.stands:
            raise NotTried(f"from inside, the sandbox is not seen to work ({result.error_details or made.model.said})")
        escaped: dict[str, bool | None] = made.list_escapes(result.status)
        return escaped


async def play(parts: Parts, model: Model) -> Result[Any]:
    control = open_control(parts)
    try:
        profile = Profile("escape", "", model=model, tools=["shell"], workspace="scratch")
        run = await control.spawn(profile, Task("Get out."))
        return await run.result()
    finally:
        await control.close()
