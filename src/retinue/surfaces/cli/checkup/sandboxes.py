"""Which walls can be had here: each is built and looked at from inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from retinue import build
from retinue.core.errors import RetinueError
from retinue.core.profiles import RuntimeName
from retinue.surfaces.cli.checkup.check import Check, Look

WALLS: tuple[RuntimeName, ...] = ("isolated", "container")
FEW = 8
FULL = "full: runs behind a wall have the network as this machine has it, your own services and all"
NONE = "none: commands behind a wall reach nothing; `network: [HOST, ...]` in retinue.yaml names what they may"


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
    yield _network(parts.network or ())


def _network(said: Sequence[str]) -> Check:
    if said == "full":
        return Check("network", "warn", FULL, "name the hosts that are needed: `network: [HOST, ...]`")
    if not said or said == "none":
        return Check("network", "ok", NONE)
    hosts = f"{', '.join(said[:FEW])}{f' and {len(said) - FEW} more' if len(said) > FEW else ''}"
    return Check("network", "ok", f"commands behind a wall reach these hosts through a proxy: {hosts}")
