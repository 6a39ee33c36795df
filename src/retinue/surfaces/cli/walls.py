"""Whether the wall that a run asks for can be built, found out before any model is called; if not, what to do."""

from __future__ import annotations

import sys
from dataclasses import replace

from retinue import build
from retinue.config import rulefile, trust
from retinue.core.errors import ConfigError
from retinue.core.profiles import Profile, RuntimeName
from retinue.surfaces.cli import screen

LAX: RuntimeName = "inherited"
HINT = "; or run without a wall, with your own authority: --runtime inherited"
CHOICES = """\
  o  run it without a wall, with your own authority, this once
  i  the same in this project from now on (written to {file})
  q  quit
Which? [q] """


def checked(parts: build.Parts, profile: Profile, *, terminal: bool) -> build.Parts:
    """The parts a run can be built from; at a terminal the user may do without the wall."""
    wanted = profile.runtime or parts.runtime
    try:
        build.placement(parts).runtime(wanted)
    except ConfigError as error:
        text = f"runtime '{wanted}' is not possible here: {error}"
        if not terminal or profile.runtime is not None:
            raise ConfigError(text + HINT) from None
        screen.warn(text)
        _ask(parts)
        return replace(parts, runtime=LAX)
    return parts


def _ask(parts: build.Parts) -> None:
    """Returns when the user wants no wall; for this project from now on, that is written down."""
    file = parts.rules_file or parts.project / "retinue.yaml"
    print(CHOICES.format(file=file), end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip().lower()
    if answer not in ("o", "i"):
        raise ConfigError("nothing was run")
    if answer == "i":
        before, after = rulefile.set_runtime(file, LAX)
        if parts.trusting:
            trust.follow(file, before, after)
