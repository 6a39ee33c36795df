"""Logs: can each be read, is it whole, is its version ours."""

from __future__ import annotations

from collections.abc import Iterator

from retinue.core.errors import RetinueError
from retinue.log.archive import Archive
from retinue.surfaces.cli.checkup.check import Check, Look


def checks(look: Look) -> Iterator[Check]:
    archive = Archive(look.state)
    do = f"move it out of {archive.folder}; the other logs are read all the same"
    try:
        count, files = len(archive.trees()), archive.files()
    except RetinueError as error:
        yield Check("logs", "fail", str(error), f"see that you can read {archive.folder}")
        return
    problems = list(archive.problems)
    problems += [problem for file in files if (problem := archive.damage(file)) and problem not in problems]
    for problem in problems:
        yield Check("logs", "fail", problem, do)
    if count and not problems:
        trees = f"{count} tree{'' if count == 1 else 's'} in {len(files)} file{'' if len(files) == 1 else 's'}"
        yield Check("logs", "ok", f"{trees}, all of them whole, version {archive.version}")
