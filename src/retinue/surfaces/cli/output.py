"""Helpers that several commands share: the project's log, tables, times, JSON. Text of others is always escaped."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.config.project import find_project
from retinue.core.errors import ConfigError
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader
from retinue.files.state_owner import verify_state_folder
from retinue.log.lookup import find_run
from retinue.log.opening import open_reader
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.safe import measure_width

LEAST_WIDTH = 12  # of a column that is shortened on a narrow terminal
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class ProjectLog:
    """The state folder of a project, and the log in it."""

    state: Path
    log: LogReader


def open_project_log() -> ProjectLog:
    """Open the log of the project around the current folder for reading."""
    state = check_folder(find_project(Path.cwd())) / ".retinue"
    return ProjectLog(state, open_reader(state))


async def look_up(name: str | None, *, everything: bool = False, live: bool = False) -> tuple[ProjectLog, RunRef]:
    """Open the project's log and find the run of that name in it. Warns of parts that cannot be read."""
    project = open_project_log()
    return project, await find_run(project.log, name, print_warning, everything=everything, live=live)


def check_folder(folder: Path) -> Path:
    """Return the project's folder, unless its name cannot stand in a log, which is UTF-8, or its state is not ours."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name of the folder {folder} is not UTF-8; rename it") from None
    verify_state_folder(folder / ".retinue")
    return folder


def find_command() -> str:
    """Return the command to call us from another folder: our name, or the whole path where that is not on PATH."""
    called = Path(sys.argv[0])
    if called.name != "retinue" or shutil.which("retinue") is not None:
        return "retinue"
    return shlex.quote(str(called.absolute()))


def print_error(text: str) -> None:
    print(f"retinue: {safe.escape_line(text)}", file=sys.stderr)


def print_warning(text: object) -> None:
    print_error(f"warning: {text}")


def print_text(text: str, *, end: str = "\n") -> None:
    """Print text of a run; on a terminal without characters that could harm it."""
    print(safe.escape_text(text) if sys.stdout.isatty() else text, end=end)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print JSON; on a terminal without characters that could harm it."""
    print(json.dumps(value, ensure_ascii=sys.stdout.isatty(), indent=indent))


def format_duration(seconds: float) -> str:
    """Format a length of time in a few characters: 0.04 s, 12 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_age(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} s ago"


def format_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset(), flexible: str = ""
) -> list[str]:
    """Format rows as lines with aligned columns, on a terminal no wider than it.

    On a narrow terminal the `flexible` column is shortened first, so that all columns but the last fit."""
    widths = [max(measure_width(row[n]) for row in (heads, *rows)) for n in range(len(heads))]
    screen = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else None
    if screen is not None and flexible:
        place = heads.index(flexible)
        others = sum(widths[:-1]) - widths[place] + 2 * len(widths)
        widths[place] = min(widths[place], max(LEAST_WIDTH, screen - others))
    lines = []
    for row in (heads, *rows):
        cells = []
        for head, cell, width in zip(heads, row, widths, strict=True):
            text = shorten_to_width(cell, width)
            space = " " * (width - measure_width(text))
            cells.append(space + text if head in right else text + space)
        line = "  ".join(cells).rstrip()
        lines.append(line if screen is None else shorten_to_width(line, screen))
    return lines


def shorten_to_width(text: str, width: int) -> str:
    if measure_width(text) <= width:
        return text
    while text and measure_width(text) > width - 1:
        text = text[: min(len(text) - 1, width)]
    return text + "…"
