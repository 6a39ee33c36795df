"""With whose authority runs work: with the user's own where a setting that is in force leaves them without a wall."""

from __future__ import annotations

from collections.abc import Iterator

from retinue.config.trust import unwalled
from retinue.surfaces.cli.checkup.check import Check, Look

AUTHORITY = (
    "runs without a wall work as you: a shell command that you allow can do whatever you can, "
    "also answer questions and change files outside the project ({settings})"
)
DO = "take that out of {file}, or read what you allow: --yes and mode `yes` allow everything"


def checks(look: Look) -> Iterator[Check]:
    settings = None if look.project is None else look.project.settings
    found = [] if settings is None else [f"`{words}`" for words in unwalled(settings)]
    if settings is not None and found:
        yield Check("authority", "warn", AUTHORITY.format(settings=", ".join(found)), DO.format(file=settings.file))
