"""The search tools: `glob` finds files by name, `grep` finds lines.

A search walks the files below a folder in a fixed order, without following symlinks to folders, and stops between two
files when its run is cancelled. `paths` decides which files may be opened. RE2 matches the regexes, in time linear in
the line. Python's `re` cannot be interrupted within a line, so a model's regex could block the whole process.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from retinue.core.errors import ConfigError, ToolError
from retinue.core.globs import GlobPattern, compile_glob
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Outcome
from retinue.core.rules import matches_path
from retinue.files.reserved import GIT_FOLDER, STATE_FOLDER
from retinue.tools.arguments import quote_text, read_argument
from retinue.tools.files import FileTool, is_binary
from retinue.tools.paths import open_allowed_file, open_allowed_folder, resolve_readable
from retinue.tools.truncate import truncate_text

MAX_FILES = 1000
MAX_MATCHES = 500
LINE_CHARS = 300
MATCH_CHARS = 10_000
GREP_BYTES = 10 * 1024 * 1024
SKIPPED = frozenset({GIT_FOLDER, STATE_FOLDER})


class Glob(FileTool):
    """The `glob` tool, which lists files by name."""

    spec = ToolSpec(
        name="glob",
        description="List the files below a folder whose path, relative to it, fits a pattern such as 'src/**/*.py'.",
        schema={
            "type": "object",
            "properties": {
                "pattern": {"type": "string"},
                "path": {"type": "string", "description": "the folder to search; all you may read unless given"},
            },
            "required": ["pattern"],
        },
        tier="observe",
        display_name="Glob",
        repeatable=True,
    )

    shown_arguments = ("pattern",)

    def handle_call(self, call: Call, folders: Folders, stop: threading.Event) -> Outcome:
        pattern = _compile_pattern(read_argument(call, "pattern", str), tool=call.name)
        raw = read_argument(call, "path", str, "")
        found: list[str] = []
        for top, _ in _find_tops(raw, folders, call.name):
            for parts in _walk_files(top, folders, stop, call.name):
                if pattern.matches("/".join(parts)) and not _is_hidden(top, parts, folders):
                    found.append(_display_path("/".join(parts)))
                    if len(found) > MAX_FILES:
                        break
        lines = sorted(found[:MAX_FILES])
        if len(found) > MAX_FILES:
            lines.append(f"[... more than {MAX_FILES} files; narrow the pattern ...]")
        return _make_outcome(lines, call, folders)


class Grep(FileTool):
    """The `grep` tool, which finds lines by regex."""

    spec = ToolSpec(
        name="grep",
        description="Search a file, or the text files below a folder, for lines that match a regex (RE2 syntax). "
        "Gives 'path:line:text'.",
        schema={
            "type": "object",
            "properties": {
                "pattern": {"type": "string"},
                "path": {"type": "string", "description": "the folder or file to search; all you may read"},
                "glob": {"type": "string", "description": "only files that fit, such as '*.py'"},
                "ignore_case": {"type": "boolean", "default": False},
            },
            "required": ["pattern"],
        },
        tier="observe",
        display_name="Grep",
        repeatable=True,
    )

    shown_arguments = ("pattern",)

    def handle_call(self, call: Call, folders: Folders, stop: threading.Event) -> Outcome:
        regex = _compile_regex(call)
        raw, name = read_argument(call, "path", str, ""), read_argument(call, "glob", str, "")
        only = _compile_pattern(name if "/" in name else f"**/{name or '*'}", tool=call.name)
        lines: list[str] = []
        for path, shown in _list_files(raw, only, folders, stop, call.name):
            for number, text in _find_matches(path, regex, folders, call.name):
                lines.append(f"{shown}:{number}:{text}")
                if len(lines) > MAX_MATCHES:
                    lines[-1] = f"[... more than {MAX_MATCHES} matches; narrow the search ...]"
                    return _make_outcome(lines, call, folders)
        return _make_outcome(lines, call, folders)


def _compile_pattern(text: str, *, tool: str) -> GlobPattern:
    """Compile the glob pattern of a call, for paths below the searched folder. Raises ToolError."""
    names = [name for name in text.split("/") if name not in ("", ".")]
    if not names or text.startswith("/") or ".." in names:
        raise ToolError(f"{tool}: {quote_text(text)} must be a pattern below the folder; give the folder as 'path'")
    try:
        return compile_glob("/".join(names), paths=True)
    except ConfigError as error:
        raise ToolError(f"{tool}: the pattern {quote_text(text)} {error}") from error


def _compile_regex(call: Call) -> Any:
    re2 = importlib.import_module("re2")
    options = re2.Options()
    options.case_sensitive = not read_argument(call, "ignore_case", bool, False)
    options.log_errors = False
    pattern = read_argument(call, "pattern", str)
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeEncodeError) as error:
        raise ToolError(f"{call.name}: bad regex {quote_text(pattern)}: {_format_error(error)}") from error


def _format_error(error: Exception) -> str:
    said = error.args[0] if error.args else error
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)


def _find_tops(raw: str, folders: Folders, tool: str) -> list[tuple[Path, str]]:
    """Return the folders (or the one file) to search, each with the prefix for its displayed paths."""
    if raw:
        return [(resolve_readable(folders, raw, tool=tool), raw)]
    tops = [top for top in dict.fromkeys(folders.search_roots) if top.is_dir()]
    return [(top, "") for top in tops if not any(_is_covered_by(other, top) for other in tops)]


def _is_covered_by(other: Path, top: Path) -> bool:
    """Return True if a search of `other` also searches `top`."""
    return other != top and top.is_relative_to(other) and SKIPPED.isdisjoint(top.relative_to(other).parts)


def _list_files(
    raw: str, only: GlobPattern, folders: Folders, stop: threading.Event, tool: str
) -> Iterator[tuple[Path, str]]:
    """Yield every file to search, with its displayed path."""
    for top, prefix in _find_tops(raw, folders, tool):
        for parts in _walk_files(top, folders, stop, tool):
            if not parts or (only.matches("/".join(parts)) and not _is_hidden(top, parts, folders)):
                yield top.joinpath(*parts), _display_path(str(PurePosixPath(prefix, *parts)))


def _is_hidden(top: Path, parts: tuple[str, ...], folders: Folders) -> bool:
    """Return True if a rule hides a file from searches.

    The rule may match any name of the file or of a symlink's target: absolute, or relative to one of the run's
    roots."""
    if not folders.hidden_paths or not parts:
        return False
    path = top.joinpath(*parts)
    names: set[str] = set()
    for name in (path, Path(os.path.realpath(path))):
        names.add(str(name))
        names |= {str(name.relative_to(root)) for root in folders.roots if name.is_relative_to(root)}
    return any(matches_path(pattern, name) for pattern in folders.hidden_paths for name in names)


def _walk_files(top: Path, folders: Folders, stop: threading.Event, tool: str) -> Iterator[tuple[str, ...]]:
    """Yield the files below a folder in name order, as path parts. For a file, yield one empty tuple."""
    if not top.is_dir():
        open_allowed_file(top, folders.roots, tool=tool).close()
        yield ()
        return
    waiting: list[tuple[tuple[str, ...], bool]] = [((), True)]
    while waiting and not stop.is_set():
        parts, is_folder = waiting.pop()
        if not is_folder:
            yield parts
            continue
        try:
            entries = _list_folder(top.joinpath(*parts), folders, tool)
        except (OSError, ToolError):
            if not parts:
                raise
            continue  # skip a subfolder that cannot be read or is gone by now
        waiting += [((*parts, name), is_folder) for name, is_folder in reversed(entries)]


def _list_folder(folder: Path, folders: Folders, tool: str) -> list[tuple[str, bool]]:
    fd = open_allowed_folder(folder, folders.roots, tool=tool)
    try:
        with os.scandir(fd) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if _is_listed(entry)]
    finally:
        os.close(fd)
    return sorted(found)


def _is_listed(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir(follow_symlinks=False):
        return entry.name not in SKIPPED
    return entry.is_file()


def _find_matches(path: Path, regex: Any, folders: Folders, tool: str) -> Iterator[tuple[int, str]]:
    """Yield the matching lines of one file with their numbers. A large, binary or unreadable file yields none."""
    try:
        real = resolve_readable(folders, str(path), tool=tool)
        with open_allowed_file(real, folders.roots, tool=tool) as file:
            data = b"" if os.fstat(file.fileno()).st_size > GREP_BYTES else file.read(GREP_BYTES)
    except (OSError, ToolError):
        return
    if is_binary(data):
        return
    lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n") if data else []
    for number, line in enumerate(lines, 1):
        text = line.removesuffix("\r")
        if regex.search(text[:MATCH_CHARS]):
            yield number, text if len(text) <= LINE_CHARS else f"{text[:LINE_CHARS]} [...]"


def _display_path(path: str) -> str:
    """Return a path as one line of printable text. File names may hold any bytes."""
    return "".join(char if char.isprintable() else "\ufffd" for char in path)


def _make_outcome(lines: list[str], call: Call, folders: Folders) -> Outcome:
    text, file = truncate_text("\n".join(lines), spill=lambda: folders.spill(f"{call.name}.txt"))
    return Outcome(text, file=file)
