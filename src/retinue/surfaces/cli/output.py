"""Output and lookup for several commands: the project's log, tables, times, JSON. Escapes text of runs on terminals."""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from retinue.build.logs import open_log_reader
from retinue.config.project import find_project
from retinue.core.errors import ConfigError
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader
from retinue.files.reserved import STATE_FOLDER
from retinue.files.state_owner import verify_state_folder
from retinue.log.lookup import find_run, resolve_recent
from retinue.surfaces.cli.main import FAILED, complain
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.safe import measure_width

GAP = "  "
NO_WIDTHS: Mapping[str, int] = MappingProxyType({})
PaintCell = Callable[[str, str, str], str]  # takes the head of a column, a cell, and the part of it that fits
print_error = complain  # also for errors that do not end the command
UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class ProjectLog:
    """The state folder of a project, and the log in it."""

    state: Path
    log: LogReader


def open_project_log() -> ProjectLog:
    """Open the log of the project around the current folder for reading."""
    state = check_folder(find_project(Path.cwd())) / STATE_FOLDER
    return ProjectLog(state, open_log_reader(state))


async def look_up(name: str | None, *, everything: bool = False, live: bool = False) -> tuple[ProjectLog, RunRef]:
    """Open the project's log and find the run `name` in it. Prints a warning for logs that cannot be read.

    `last` and `@N` work only on the command line. A model chooses labels, and no label may shadow these words."""
    project = open_project_log()
    if name is not None:
        name = await resolve_recent(project.log, name, print_warning, everything=everything)
    return project, await find_run(project.log, name, print_warning, everything=everything, live=live)


def check_folder(folder: Path) -> Path:
    """Return `folder`. Raises ConfigError if its name is not UTF-8 (the log is), or if its state is not the user's."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name of the folder {folder} is not UTF-8; rename it") from None
    verify_state_folder(folder / STATE_FOLDER)
    return folder


def shorten_path(path: str, project: Path) -> str:
    """Return `path` relative to the current folder if it is in the project, else unchanged."""
    return os.path.relpath(path) if Path(path).is_relative_to(project) else path


def find_command() -> list[str]:
    """Return the command that starts Retinue from any folder.

    If `retinue` is not on the PATH, return its whole path, or the Python that runs it."""
    if shutil.which("retinue") is not None:
        return ["retinue"]
    called = Path(sys.argv[0]).absolute()
    return [str(called)] if called.name == "retinue" else [sys.executable, "-P", "-m", "retinue"]


def format_command() -> str:
    """Return the command for a hint to the user, which is short: `retinue` also stands for `python -m retinue`."""
    words = find_command()
    return shlex.join(words) if len(words) == 1 else "retinue"


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause the garbage collector. A long list consists of many small values without cycles (bench row `ps --all`)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exit_stuck(code: int = FAILED) -> NoReturn:
    """End the process at once, because a thread hangs on the terminal. A normal exit would wait for it forever."""
    os._exit(code)


def print_warning(text: object) -> None:
    print_error(f"warning: {text}")


def print_text(text: str) -> None:
    """Print text of a run. On a terminal, escape control characters."""
    print(safe.escape_text(text) if sys.stdout.isatty() else text)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print JSON. On a terminal, escape all characters that are not ASCII."""
    print(json.dumps(value, ensure_ascii=sys.stdout.isatty(), indent=indent))


def format_duration(seconds: float) -> str:
    """Format a length of time, such as 0.04 s, 12 s, 3 min 5 s or 2 h 10 min."""
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
    expendable: Sequence[str] = (),
    indent: int = 0,
) -> list[str]:
    """Format rows as lines with aligned columns; see `drop_columns` and `format_columns`."""
    columns = drop_columns(make_columns(heads, rows), flexible=flexible, expendable=expendable)
    return format_columns(columns, right=right, flexible=flexible, indent=indent)


def make_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Turn rows into columns, keyed by their heads."""
    return {head: [row[at] for row in rows] for at, head in enumerate(heads)}


def format_columns(
    columns: Mapping[str, Sequence[str]],
    *,
    right: frozenset[str] = frozenset(),
    flexible: Mapping[str, int] = NO_WIDTHS,
    paint: PaintCell | None = None,
    indent: int = 0,
) -> list[str]:
    """Format the columns of a table, keyed by their heads, as aligned lines. The `right` columns are numbers, which are
    aligned to the right and never shortened.

    On a terminal, the other columns are shortened until the lines are no wider than its width less `indent`: the
    `flexible` ones first, in their order, each down to its least width; then the rest, beginning with the last. `paint`
    colours a cell after it was shortened."""
    with_heads = {head: (head, *cells) for head, cells in columns.items()}
    widths = {head: _measure_column(column) for head, column in with_heads.items()}
    screen = measure_screen()
    if screen is not None:
        _shrink_columns(widths, screen - indent, flexible, right)
    template, aligned = [], []
    for head, column in with_heads.items():
        width, is_right = widths[head], head in right
        if paint is None and _is_ascii(column) and len(max(column, key=len)) <= width:
            template.append(f"%{width}s" if is_right else f"%-{width}s")  # the fast path, for bench row `ps --all`
            aligned.append(column)
        else:
            template.append("%s")
            aligned.append(_align_cells(column, width, is_right=is_right, paint=paint))
    line = GAP.join(template)
    return [(line % cells).rstrip() for cells in zip(*aligned, strict=True)]


def drop_columns(
    columns: Mapping[str, Sequence[str]], *, flexible: Mapping[str, int], expendable: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Return the columns that fit on the terminal.

    Drops `expendable` columns in their order, until the rest fits with the `flexible` columns at their least width."""
    left, screen = dict(columns), measure_screen()
    if screen is None:
        return left
    widths = {head: _measure_column((head, *cells)) for head, cells in columns.items()}
    widths = {head: min(width, flexible.get(head, width)) for head, width in widths.items()}
    for head in expendable:
        if sum(widths.values()) + len(GAP) * (len(widths) - 1) <= screen:
            break
        if head in left:
            del left[head], widths[head]
    return left


def measure_screen() -> int | None:
    """Return the width of the terminal, or None if stdout is not a terminal."""
    return shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else None


def _measure_column(column: Sequence[str]) -> int:
    """Return the width of the widest cell."""
    return max(map(len if _is_ascii(column) else measure_width, column))


def _is_ascii(column: Sequence[str]) -> bool:
    return "".join(column).isascii()  # one check for all cells: bench row `ps --all`


def _align_cells(column: Sequence[str], width: int, *, is_right: bool, paint: PaintCell | None) -> tuple[str, ...]:
    """Return the cells of a column, head included, cut or padded to `width`."""
    aligned = []
    for cell in column:
        text = safe.cut_to_width(cell, width)
        space = " " * (width - measure_width(text))
        text = text if paint is None or not text else paint(column[0], cell, text)
        aligned.append(space + text if is_right else text + space)
    return tuple(aligned)


def _shrink_columns(widths: dict[str, int], screen: int, flexible: Mapping[str, int], rigid: frozenset[str]) -> None:
    others = [(head, 1) for head in reversed(widths) if head not in rigid]
    for head, least in (*flexible.items(), *others):
        over = sum(widths.values()) + len(GAP) * (len(widths) - 1) - screen
        if over > 0 and head in widths:
            widths[head] = max(widths[head] - over, min(least, widths[head]))
