"""The project's files: which folder it is, its retinue.yaml and whether it is trusted, its agents, its state folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from retinue.config.project import SETTINGS_FILE
from retinue.surfaces.cli.checkup.check import Check, Look


def checks(look: Look) -> Iterator[Check]:
    marked = (look.folder / SETTINGS_FILE).exists()
    note = "" if marked else f" (no {SETTINGS_FILE}: defaults)"
    yield Check("project", "ok", f"{look.folder}{note}", "" if marked else "retinue init")
    yield _state(look.state)
    if look.project is None:
        yield Check("profiles", "fail", look.error, "correct the file at this place")
        return
    if look.project.ignored:
        ignored = ", ".join(look.project.ignored)
        yield Check("trust", "warn", f"{SETTINGS_FILE} is not trusted; ignored: {ignored}", "retinue trust")
    untold = look.project.warnings[1:] if look.project.ignored else look.project.warnings
    for warning in untold:
        yield Check("profiles", "warn", warning, f"correct it in {SETTINGS_FILE}")
    names = ", ".join(profile.name for profile in look.project.profiles) or "none"
    yield Check("profiles", "ok", f"{names} ({len(look.project.all_profiles)} in all)")


def _state(state: Path) -> Check:
    """Asks the file system and makes nothing: the folder appears with the first run."""
    there = next(folder for folder in (state, *state.parents) if os.path.lexists(folder))
    if not there.is_dir():
        return Check("state", "fail", f"{there} is not a folder", f"move {there} away")
    if not os.access(there, os.W_OK | os.X_OK):
        return Check("state", "fail", f"{there} cannot be written", f"chmod u+rwx {there}, or work in another folder")
    return Check("state", "ok", f"{state} " + ("can be written" if there == state else "will be made by the first run"))
