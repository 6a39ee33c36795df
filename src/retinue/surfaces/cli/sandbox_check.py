"""Whether the wall that a run asks for can be built, found out before any model is called; if not, what to do."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from retinue import build
from retinue.build.sandboxes import build_image, find_container_engine
from retinue.config import trust
from retinue.core.errors import ConfigError
from retinue.core.profiles import Profile, RuntimeName
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import prompts
from retinue.surfaces.printer import safe

LAX: RuntimeName = "inherited"
BOXED: RuntimeName = "container"
HINT = "; or run without a wall, with your own authority: --runtime inherited"
IN_CONTAINER = "  c  run it in a container of {engine}, in this project from now on (written to {file})\n"
CHOICES = """\
  o  run it without a wall, with your own authority, this once
  i  the same in this project from now on (written to {file})
  q  quit
"""
MAKING = "making the image for it of this machine's own files; nothing is downloaded"


def checked(parts: build.Parts, profile: Profile, *, terminal: bool) -> build.Parts:
    """The parts a run can be built from; at a terminal the user may choose another wall, or do without."""
    wanted = profile.runtime or parts.runtime
    try:
        build.make_placement(parts).runtime(wanted)
    except ConfigError as error:
        text = f"runtime '{wanted}' is not possible here: {error}"
        if not terminal or profile.runtime is not None:
            raise ConfigError(text + HINT) from None
        screen.warn(text)
        return _chosen(parts, None if wanted == BOXED else find_container_engine())
    return parts


def _chosen(parts: build.Parts, engine: str | None) -> build.Parts:
    """What the user says; for this project from now on, that is written down once it works."""
    file = parts.rules_file or parts.project / "retinue.yaml"
    offered = "" if engine is None else IN_CONTAINER.format(engine=engine, file=safe.escape_line(str(file)))
    print(offered + CHOICES.format(file=safe.escape_line(str(file))), end="", file=sys.stderr)
    answer = (prompts.ask("Which? [q]") or "q").lower()
    if answer == "c" and engine is not None:
        boxed = replace(parts, runtime=BOXED)
        _make_ready(boxed)
        _write(boxed, file)
        return boxed
    if answer not in ("o", "i"):
        raise ConfigError("nothing was run")
    bare = replace(parts, runtime=LAX)
    if answer == "i":
        _write(bare, file)
    return bare


def _make_ready(parts: build.Parts) -> None:
    """The container wall stands, with an image made for it where there is none; raises ConfigError."""
    try:
        build.make_placement(parts).runtime(BOXED)
    except ConfigError:
        if parts.image is not None:
            raise
        screen.complain(MAKING)
        build_image()
        build.make_placement(parts).runtime(BOXED)


def _write(parts: build.Parts, file: Path) -> None:
    from retinue.config.edit import set_runtime  # loads ruamel.yaml

    before, after = set_runtime(file, parts.runtime)
    if parts.keeps_trust:
        trust.carry_answer(file, before, after)
