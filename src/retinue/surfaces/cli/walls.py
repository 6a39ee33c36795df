"""Whether the wall that a run asks for can be built, found out before any model is called; if not, what to do."""

from __future__ import annotations

import sys
from dataclasses import replace

from retinue import build
from retinue.core.errors import ConfigError
from retinue.core.profiles import Profile
from retinue.surfaces.cli import screen

HINT = "; or run without a wall, with your own authority: --runtime inherited"
QUESTION = "Run it without a wall, with your own authority? [y/N] "


def checked(parts: build.Parts, profile: Profile, *, terminal: bool) -> build.Parts:
    """The parts a run can be built from; at a terminal the user may do without the wall, this once."""
    wanted = profile.runtime or parts.runtime
    try:
        build.placement(parts).runtime(wanted)
    except ConfigError as error:
        text = f"runtime '{wanted}' is not possible here: {error}"
        if not terminal or profile.runtime is not None:
            raise ConfigError(text + HINT) from None
        screen.warn(text)
        print(QUESTION, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise ConfigError("nothing was run") from None
        return replace(parts, runtime="inherited")
    return parts
