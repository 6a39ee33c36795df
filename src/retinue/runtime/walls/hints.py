"""What a run is told when a command is missing only because the wall does not show it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

MOST = 3
NOT_SHOWN = (
    "[{name} is on this machine, at {path}, but not behind the wall: `expose_paths: [{folder}]` in the user's "
    "retinue.yaml would show it]"
)
_MISSING = re.compile(r"(?:^|: )([A-Za-z0-9_.+-]{1,64}): (?:command )?not found$", re.MULTILINE)


def hint(said: str) -> str:
    """Words to put behind what a failed command said; nothing where the command is not here either."""
    notes = []
    for name in dict.fromkeys(_MISSING.findall(said)):
        path = shutil.which(name)
        if path is not None:
            notes.append(NOT_SHOWN.format(name=name, path=path, folder=Path(path).resolve().parent))
    return "\n".join(notes[:MOST])
