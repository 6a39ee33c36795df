"""Helpers that several commands share: the project's log, tables, times, JSON. Text of others is always escaped."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from retinue.config.project import find_project
from retinue.core.errors import ConfigError
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader
from retinue.files.state_owner import verify_state_folder
from retinue.log.lookup import find_run, resolve_recent
from retinue.log.opening import open_reader
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.safe import measure_width

GAP = "  "
NO_WIDTHS: Mapping[str, int] = MappingProxyType({})
PaintCell = Callable[[str, str, str], str]  # of the head of a column, a cell, and as much of it as fits
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
    """Open the project's log and find the run of that name in it. Warns of parts that cannot be read.

    `last` and `@N` are words of this command line only: models give labels, and none may take a word of a person."""
    project = open_project_log()
    if name is not None:
        name = await resolve_recent(project.log, name, everything=everything)
    return project, await find_run(project.log, name, print_warning, everything=everything, live=live)


def check_folder(folder: Path) -> Path:
    """Return the project's folder, unless its name cannot stand in a log, which is UTF-8, or its state is not ours."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name of the folder {folder} is not UTF-8; rename it") from None
    verify_state_folder(folder / ".retinue")
    return folder


def shorten_path(path: str, project: Path) -> str:
    """Return a path in the project relative to the current folder; any other as it is."""
    return os.path.relpath(path) if Path(path).is_relative_to(project) else path


def find_command() -> str:
    """Return the command to call us from another folder: our name, or the whole path where that is not on PATH."""
    called = Path(sys.argv[0])
    if called.name != "retinue" or shutil.which("retinue") is not None:
        return "retinue"
    return shlex.quote(str(called.absolute()))


def print_error(text: str) -> None:
    print(safe.fold_line(f"retinue: {safe.escape_line(text)}", sys.stderr, indent="  "), file=sys.stderr)


def print_warning(text: object) -> None:
    print_error(f"warning: {text}")


def print_text(text: str) -> None:
    """Print text of a run; on a terminal without characters that could harm it."""
    print(safe.escape_text(text) if sys.stdout.isatty() else text)


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
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[str] = frozenset(),
    flexible: Mapping[str, int] = NO_WIDTHS,
    paint: PaintCell | None = None,
    indent: int = 0,
) -> list[str]:
    """Format rows as lines with aligned columns, on a terminal no wider than it is behind an `indent`.

    On a narrow terminal the `flexible` columns are shortened first, in this order, each down to its least width; then
    the others from the last on. `paint` colours a cell that has its width already."""
    widths = _measure_columns(heads, rows)
    screen = measure_screen()
    if screen is not None:
        _shrink_columns(widths, screen - indent, [(heads.index(head), least) for head, least in flexible.items()])
    lines = []
    for row in (heads, *rows):
        cells = []
        for head, cell, width in zip(heads, row, widths, strict=True):
            text = shorten_to_width(cell, width)
            space = " " * (width - measure_width(text))
            text = text if paint is None or not text else paint(head, cell, text)
            cells.append(space + text if head in right else text + space)
        lines.append(GAP.join(cells).rstrip())
    return lines


def drop_columns(
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    flexible: Mapping[str, int],
    expendable: Sequence[str],
) -> tuple[str, ...]:
    """Return the heads of the columns that fit on the terminal. The `expendable` ones are dropped in this order, until
    the others fit with the `flexible` ones at their least width."""
    screen, left = measure_screen(), dict(zip(heads, _measure_columns(heads, rows), strict=True))
    left = {head: min(width, flexible.get(head, width)) for head, width in left.items()}
    for head in expendable:
        if screen is None or sum(left.values()) + len(GAP) * (len(left) - 1) <= screen:
            break
        left.pop(head, None)
    return tuple(left)


def measure_screen() -> int | None:
    """Return the columns of the terminal; None if stdout is none."""
    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else None


def _measure_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(measure_width(row[n]) for row in (heads, *rows)) for n in range(len(heads))]


def _shrink_columns(widths: list[int], screen: int, flexible: Sequence[tuple[int, int]]) -> None:
    others = [(at, 1) for at in reversed(range(len(widths)))]
    for at, least in (*flexible, *others):
        over = sum(widths) + len(GAP) * (len(widths) - 1) - screen
        if over > 0:
            widths[at] = max(widths[at] - over, min(least, widths[at]))


def shorten_to_width(text: str, width: int) -> str:
    if measure_width(text) <= width:
        return text
    while text and measure_width(text) > width - 1:
        text = text[: min(len(text) - 1, width)]
    return text + "…"
