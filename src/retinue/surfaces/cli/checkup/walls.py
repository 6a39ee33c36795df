"""Whether a wall stands here: one is built and looked at from inside."""

from __future__ import annotations

from collections.abc import Iterator

from retinue import build
from retinue.core.errors import RetinueError
from retinue.surfaces.cli.checkup.check import Check, Look


def checks(look: Look) -> Iterator[Check]:
    exposed = () if look.project is None else look.project.settings.expose_paths
    try:
        started = build.placement(build.Parts(look.folder, expose=exposed)).runtime("isolated").started
    except RetinueError as error:
        yield Check("walls", "warn", f"runtime `isolated` is not possible here: {error}")
    else:
        yield Check("walls", "ok", f"runtime `isolated` stands: {', '.join(started.walls)}")
