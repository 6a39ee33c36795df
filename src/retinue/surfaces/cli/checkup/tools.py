"""The tools that agents have here: those that always work, and those that need a host to be allowed."""

from __future__ import annotations

from collections.abc import Iterator

from retinue import build
from retinue.core.errors import RetinueError
from retinue.core.profiles import LOCAL_TOOLS, SPAWN_TOOLS, WEB_TOOLS
from retinue.surfaces.cli.checkup.check import Check, Look

OFF = "web_fetch and web_search are off: no host may be reached"
ON = "web_fetch, and web_search where the model's provider has one"
NAME_THEM = "name what may be reached: `network: [HOST, ...]` in retinue.yaml, then `retinue trust`"


def checks(look: Look) -> Iterator[Check]:
    try:
        parts, project = build.project_parts(look.folder)
    except RetinueError:
        return  # what is wrong with the settings is told elsewhere
    reached = bool(parts.network) and parts.network != "none"
    yield Check("tools", "ok", ", ".join((*LOCAL_TOOLS, *SPAWN_TOOLS)))
    yield Check("tools", "ok", ON if reached else OFF)
    for profile in project.all_profiles:
        wanted = [name for name in profile.tools or () if name in WEB_TOOLS]
        if wanted and not reached:
            text = f"profile '{profile.name}' names {' and '.join(wanted)}, which cannot work: no host may be reached"
            yield Check("tools", "warn", text, NAME_THEM)
