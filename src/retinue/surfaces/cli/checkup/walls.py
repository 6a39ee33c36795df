"""Which walls can be had here: each is built and looked at from inside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from retinue import build
from retinue.core.errors import RetinueError
from retinue.core.profiles import RuntimeName
from retinue.surfaces.cli.checkup.check import Check, Look

WALLS: tuple[RuntimeName, ...] = ("isolated", "container")


def checks(look: Look) -> Iterator[Check]:
    try:
        parts, _ = build.project_parts(look.folder)
    except RetinueError:
        parts = build.Parts(look.folder)  # what is wrong with the settings is told elsewhere
    runtimes = build.placement(replace(parts, fallback=None))
    for name in WALLS:
        try:
            started = runtimes.runtime(name).started
        except RetinueError as error:
            yield Check("walls", "warn", f"runtime `{name}` is not possible here: {error}")
        else:
            yield Check("walls", "ok", f"runtime `{name}` stands: {', '.join(started.walls if started else ())}")
