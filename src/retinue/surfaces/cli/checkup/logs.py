"""The checks of the logs: each can be read, is whole, and has our version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from retinue.core.errors import LogError, RetinueError
from retinue.log.opening import open_reader
from retinue.surfaces.cli.checkup.check import Check, Look


def checks(look: Look) -> Iterator[Check]:
    log = open_reader(look.state)
    problems: list[LogError] = []
    try:
        found = asyncio.run(log.check_health(problems.append))
    except RetinueError as error:
        yield Check("logs", "fail", str(error), f"see that you can read {log.location}")
        return
    for problem in problems:
        do = f"move it out of {log.location}; the other logs are read all the same"
        yield Check("logs", "fail", str(problem), do)
    if found:
        yield Check("logs", "ok", found)
