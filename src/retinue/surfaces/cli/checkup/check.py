"""One thing that `retinue doctor` looked at, and what it looks at it with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retinue.config.project import Project

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """ok: as it should be; warn: works, but you should know; fail: what this project needs does not work. `do` is the
    exact thing that cures it."""

    name: str
    state: State
    text: str
    do: str = ""


@dataclass(frozen=True)
class Look:
    """The project; None with the `error` that stands in its files when they cannot be read."""

    folder: Path
    project: Project | None
    error: str = ""

    @property
    def state(self) -> Path:
        return self.folder / ".retinue"
