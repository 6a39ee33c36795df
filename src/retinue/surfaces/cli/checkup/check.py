"""One finding of `retinue doctor`, and the project it looks at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retinue.config.project import Project

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. ok: as it should be; warn: works, with a caveat; fail: something this project needs does not work.
    `do` is the exact cure."""

    name: str
    state: State
    text: str
    do: str = ""


@dataclass(frozen=True)
class Look:
    """The project that is checked. If its files cannot be read, `project` is None and `error` says why."""

    folder: Path
    project: Project | None
    error: str = ""

    @property
    def state(self) -> Path:
        return self.folder / ".retinue"
