"""What no check can cure: with whose authority runs work."""

from __future__ import annotations

from collections.abc import Iterator

from retinue.surfaces.cli.checkup.check import Check, Look

AUTHORITY = (
    "runs of runtime `inherited` work as you: a shell command that you allow can do whatever you can, "
    "also answer questions and change files outside the project"
)


def checks(look: Look) -> Iterator[Check]:
    yield Check("authority", "warn", AUTHORITY, "read what you allow; --yes and mode `yes` allow everything")
