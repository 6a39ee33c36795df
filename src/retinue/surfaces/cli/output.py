"""What several commands need to print: the project's archive, tables, times, JSON. Text of others is always escaped."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retinue.config.project import find_project
from retinue.core.errors import ConfigError
from retinue.log.archive import Archive, unlinked
from retinue.log.lookup import Found, find
from retinue.surfaces.printer import safe

UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def open_archive() -> Archive:
    """The logs of the project around the current folder."""
    return Archive(checked(find_project(Path.cwd())) / ".retinue")


def look_up(name: str | None, *, everything: bool = False, live: bool = False) -> tuple[Archive, Found]:
    """The project's logs, and the run of that name in them; of logs that cannot be read it is told either way."""
    archive = open_archive()
    try:
        return archive, find(archive, name, everything=everything, live=live)
    finally:
        warn_of_problems(archive)


def checked(folder: Path) -> Path:
    """The folder, if its name can stand in a log, which is UTF-8, and its state is in it."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the name of the folder {folder} is not UTF-8; rename it") from None
    unlinked(folder / ".retinue")
    return folder


def command() -> str:
    """How to call us from another folder: by name, or where that is not on the path, by the whole path."""
    called = Path(sys.argv[0])
    if called.name != "retinue" or shutil.which("retinue") is not None:
        return "retinue"
    return shlex.quote(str(called.absolute()))


def complain(text: str) -> None:
    print(f"retinue: {safe.escape_line(text)}", file=sys.stderr)


def warn(text: str) -> None:
    complain(f"warning: {text}")


def warn_of_problems(archive: Archive) -> None:
    for problem in archive.problems:
        warn(problem)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """JSON that harms no terminal; what is not for one keeps its characters."""
    text = json.dumps(value, ensure_ascii=sys.stdout.isatty(), indent=indent)
    print(text)


def duration(seconds: float) -> str:
    """A length of time in a few characters: 0.04 s, 12 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ago(seconds: float) -> str:
    for size, unit in UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now" if seconds < 10 else f"{int(seconds)} s ago"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> list[str]:
    """Lines with aligned columns, on a terminal no wider than it."""
    widths = [max(columns(row[n]) for row in (heads, *rows)) for n in range(len(heads))]
    screen = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else None
    lines = []
    for row in (heads, *rows):
        cells = []
        for head, text, width in zip(heads, row, widths, strict=True):
            space = " " * (width - columns(text))
            cells.append(space + text if head in right else text + space)
        line = "  ".join(cells).rstrip()
        lines.append(line if screen is None else shortened(line, screen))
    return lines


def columns(text: str) -> int:
    """How wide a text is on a terminal: wide letters take two columns, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def shortened(text: str, width: int) -> str:
    if columns(text) <= width:
        return text
    while text and columns(text) > width - 1:
        text = text[: min(len(text) - 1, width)]
    return text + "…"
