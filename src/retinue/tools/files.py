"""The tools on files: read, write and edit for one file, glob and grep to look through folders.

Files are bytes here: an edit changes what it names and leaves line endings and foreign encodings as they are.
Which paths are allowed, and how a file is opened and replaced, is in `paths`; this module knows no path rules.

A search walks below one folder in a fixed order, without following folder symlinks, and stops between two files when
its run is cancelled. A regex is run by RE2, in time linear in the line: a model's regex must not be able to hold the
whole process, and Python cannot stop one of its own in the middle of a line.
"""

from __future__ import annotations

import difflib
import importlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from retinue.concurrency import run_in_thread
from retinue.core.errors import ConfigError, ToolError
from retinue.core.globs import GlobPattern, compile_glob
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Execution, Folders, Outcome
from retinue.core.rules import matches_path
from retinue.files.reserved import GIT_FOLDER, STATE_FOLDER
from retinue.tools.arguments import quote_text, read_argument, reveal_text
from retinue.tools.paths import (
    make_file_error,
    open_file,
    open_folder,
    replace_file,
    resolve_readable,
    resolve_writable,
)
from retinue.tools.truncate import Ends, truncate_text

CHUNK = 64 * 1024
SNIFF_BYTES = 8 * 1024
EDIT_BYTES = 16 * 1024 * 1024
PREVIEW_CHARACTERS = 512 * 1024
CUT_PREVIEW = "[... {more} characters more; the arguments of the call have all of it]"
COMPARE_LINES = 4000
COMPARE_BYTES = 1024 * 1024
MAX_FILES = 1000
MAX_MATCHES = 500
LINE_CHARS = 300
MATCH_CHARS = 10_000
GREP_BYTES = 10 * 1024 * 1024
SKIPPED = frozenset({GIT_FOLDER, STATE_FOLDER})
# Two children that edit one file of a shared workspace must both be seen in it.
_EDITING = threading.Lock()


class FileTool(ABC):
    """Base of the tools that only read or write files: they work in a thread, and without a time limit of their
    own."""

    shown_argument = "path"

    def time_limit(self, call: Call) -> float | None:
        return None

    def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(str(call.args.get(self.shown_argument) or ""))

    async def __call__(self, call: Call, execution: Execution) -> Outcome:
        return await run_in_thread(lambda stop: self.handle_call(call, execution.folders, stop))

    @abstractmethod
    def handle_call(self, call: Call, folders: Folders, stop: threading.Event) -> Outcome:
        """Do the work of a call, until it is done or the event is set."""


class Read(FileTool):
    """Gives the text of a file, or of some of its lines."""

    spec = ToolSpec(
        name="read",
        description="Read a text file. 'offset' is the first line to read (1 is the first of the file), 'limit' how "
        "many lines. A long text is cut in the middle; read it in parts.",
        schema={
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "relative to the workspace, or absolute"},
                "offset": {"type": "integer", "minimum": 1},
                "limit": {"type": "integer", "minimum": 1},
            },
            "required": ["path"],
        },
        tier="observe",
        display_name="Read",
        repeatable=True,
    )

    def handle_call(self, call: Call, folders: Folders, stop: threading.Event) -> Outcome:
        raw = _read_path(call)
        first, count = _read_positive(call, "offset"), _read_positive(call, "limit")
        path = resolve_readable(folders, raw, tool=call.name)
        try:
            with open_file(path, folders.roots, tool=call.name) as file:
                return _read_lines(file, path, first or 1, count, stop=stop, tool=call.name)
        except OSError as error:
            raise make_file_error(call.name, raw, error) from error

    def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(str(call.args.get("path") or call.args.get("file_path") or ""))


class Write(FileTool):
    """Makes or replaces a whole file."""

    spec = ToolSpec(
        name="write",
        description="Write a whole file in the workspace; makes the folders it needs, replaces a file that is there.",
        schema={
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
        display_name="Write",
    )

    def handle_call(self, call: Call, folders: Folders, stop: threading.Event) -> Outcome:
        raw, data = _read_path(call), _read_bytes(call, "content")
        path = resolve_writable(folders, raw, tool=call.name)
        with _EDITING:
            replace_file(path, data, folders, tool=call.name)
        return Outcome(f"wrote {raw} ({len(data)} bytes)")

    def preview(self, call: Call, folders: Folders) -> str:
        raw, data = _read_path(call), _read_bytes(call, "content")
        path = resolve_writable(folders, raw, tool=call.name)
        old = _read_whole(path, folders, call.name) if os.path.lexists(path) else b""
        if old == data:
            return "(no change)"
        if _is_comparable(old, data):
            return _format_diff(old, data)
        return f"replaces {_describe_size(old)} by {_describe_size(data)}:\n{_prefix_lines('+', data)}"


class Edit(FileTool):
    """Replaces one string in a file."""

    spec = ToolSpec(
        name="edit",
        description="Replace 'old_string' by 'new_string' in a file of the workspace. 'old_string' must be in the file "
        "exactly once, unless 'replace_all' is true.",
        schema={
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "old_string": {"type": "string"},
                "new_string": {"type": "string"},
                "replace_all": {"type": "boolean", "default": False},
            },
            "required": ["path", "old_string", "new_string"],
        },
        display_name="Edit",
    )

    def handle_call(self, call: Call, folders: Folders, stop: threading.Event) -> Outcome:
        with _EDITING:
            path, _, new = _plan_edit(call, folders)
            replace_file(path, new, folders, tool=call.name)
        return Outcome(f"edited {_read_path(call)}")

    def preview(self, call: Call, folders: Folders) -> str:
        _, old, new = _plan_edit(call, folders)
        if _is_comparable(old, new):
            return _format_diff(old, new)
        return (
            _prefix_lines("-", _read_bytes(call, "old_string"))
            + "\n"
            + _prefix_lines("+", _read_bytes(call, "new_string"))
        )


def _read_path(call: Call) -> str:
    return read_argument(call, "path", str, alias="file_path")


def _read_bytes(call: Call, name: str) -> bytes:
    try:
        return read_argument(call, name, str).encode()
    except UnicodeEncodeError:
        raise ToolError(f"{call.name}: '{name}' has characters that cannot be written as UTF-8") from None


def _read_positive(call: Call, name: str) -> int | None:
    value = read_argument(call, name, int, None)
    if value is not None and value < 1:
        raise ToolError(f"{call.name}: '{name}' must be 1 or more, got {value}")
    return value


def _plan_edit(call: Call, folders: Folders) -> tuple[Path, bytes, bytes]:
    """Return the path, its content, and the content after the edit; ToolError says why the edit does not apply."""
    raw, old, new = _read_path(call), _read_bytes(call, "old_string"), _read_bytes(call, "new_string")
    everywhere = read_argument(call, "replace_all", bool, False)
    if not old:
        raise ToolError(f"{call.name}: 'old_string' is empty; use write to make a file")
    if old == new:
        raise ToolError(f"{call.name}: 'old_string' and 'new_string' are the same")
    path = resolve_writable(folders, raw, tool=call.name)
    data = _read_whole(path, folders, call.name)
    first = data.find(old)
    if first < 0:
        hint = "; the file's lines end in \\r\\n" if b"\n" in old and b"\r\n" in data and b"\r\n" not in old else ""
        raise ToolError(f"{call.name}: 'old_string' was not found in {quote_text(raw)}{hint}")
    if not everywhere and data.find(old, first + 1) >= 0:
        # Occurrences that overlap are two, though bytes.count sees one.
        times = max(2, data.count(old))
        advice = "give more of what is around it, or set replace_all"
        raise ToolError(f"{call.name}: 'old_string' occurs {times} times in {quote_text(raw)}; {advice}")
    return path, data, data.replace(old, new)


def _read_whole(path: Path, folders: Folders, tool: str) -> bytes:
    try:
        with open_file(path, [folders.workspace], tool=tool) as file:
            data = file.read(EDIT_BYTES + 1)
    except OSError as error:
        raise make_file_error(tool, path, error) from error
    if len(data) > EDIT_BYTES:
        raise ToolError(f"{tool}: {quote_text(path)} is over {EDIT_BYTES} bytes, too large to work on as a whole")
    if _is_binary(data):
        raise ToolError(f"{tool}: {quote_text(path)} is binary ({len(data)} bytes)")
    return data


def _is_binary(start: bytes) -> bool:
    return b"\0" in start[:SNIFF_BYTES]


def _read_lines(
    file: BinaryIO, path: Path, first: int, count: int | None, *, stop: threading.Event, tool: str
) -> Outcome:
    """Return `count` lines from the `first` on, read in pieces: neither a large file nor a long line is held whole."""
    ends, skip, seen, last, given = Ends(has=path), first - 1, 0, b"\n", False
    while (chunk := file.read(CHUNK)) and not stop.is_set():
        if not seen and _is_binary(chunk):
            size = os.fstat(file.fileno()).st_size
            raise ToolError(f"{tool}: {quote_text(path)} is binary ({size} bytes)")
        seen, last = seen + chunk.count(b"\n"), chunk[-1:]
        at, skip = _skip_lines(chunk, skip)
        wanted = chunk[at:]
        if count is not None:
            at, count = _skip_lines(wanted, count)
            wanted = wanted[:at]
        ends.feed(wanted)
        given = given or bool(wanted)
        if count == 0:
            break
    if not given and first > 1:
        total = seen + (last != b"\n")
        raise ToolError(f"{tool}: offset {first} is past the end of {quote_text(path)} ({total} lines)")
    text, whole = ends.close()
    return Outcome(text, file=whole)


def _skip_lines(chunk: bytes, lines: int) -> tuple[int, int]:
    """Return the offset after this many lines of a chunk, and how many lines are still to skip after it."""
    found = chunk.count(b"\n")
    if found < lines:
        return len(chunk), lines - found
    at = 0
    for _ in range(lines):
        at = chunk.index(b"\n", at) + 1
    return at, 0


def _describe_size(data: bytes) -> str:
    lines = data.count(b"\n")
    return f"{lines} lines ({len(data)} bytes)"


def _is_comparable(old: bytes, new: bytes) -> bool:
    """Tell whether two texts are small enough to compare: the time grows faster than they do, and a person waits."""
    return len(old) + len(new) <= COMPARE_BYTES and old.count(b"\n") + new.count(b"\n") <= COMPARE_LINES


def _format_diff(old: bytes, new: bytes) -> str:
    lines = difflib.unified_diff(_split_lines(old), _split_lines(new), lineterm="\n")
    return _join_lines(line for number, line in enumerate(lines) if number > 1)


def _prefix_lines(sign: str, data: bytes) -> str:
    return _join_lines(sign + line for line in _split_lines(data))


def _split_lines(data: bytes) -> list[str]:
    lines = data.decode("utf-8", "replace").split("\n")
    return [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def _join_lines(lines: Iterable[str]) -> str:
    """Return the lines as text, all of them: a yes is for everything that the call does. What is too much for an event
    is cut with a mark; then the arguments of the call have all of it."""
    text = "\n".join(map(reveal_text, _mark_last_line(lines)))
    more = len(text) - PREVIEW_CHARACTERS
    return text if more <= 0 else f"{text[:PREVIEW_CHARACTERS]}\n{CUT_PREVIEW.format(more=more)}"


def _mark_last_line(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line.removesuffix("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"


# Looking through folders


class Glob(FileTool):
    """Lists files by name."""

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

    shown_argument = "pattern"

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
    """Finds lines by regex."""

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

    shown_argument = "pattern"

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
    """Return the pattern of a call, for paths below the folder."""
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
    """Return the folders (or the one file) to search, each with the prefix its paths are shown with."""
    if raw:
        return [(resolve_readable(folders, raw, tool=tool), raw)]
    tops = [top for top in dict.fromkeys(folders.search_roots) if top.is_dir()]
    return [(top, "") for top in tops if not any(_is_covered_by(other, top) for other in tops)]


def _is_covered_by(other: Path, top: Path) -> bool:
    """Tell whether searching one folder searches the other too."""
    return other != top and top.is_relative_to(other) and SKIPPED.isdisjoint(top.relative_to(other).parts)


def _list_files(
    raw: str, only: GlobPattern, folders: Folders, stop: threading.Event, tool: str
) -> Iterator[tuple[Path, str]]:
    """Yield every file to search, and the path it is shown with."""
    for top, prefix in _find_tops(raw, folders, tool):
        for parts in _walk_files(top, folders, stop, tool):
            if not parts or (only.matches("/".join(parts)) and not _is_hidden(top, parts, folders)):
                yield top.joinpath(*parts), _display_path(str(PurePosixPath(prefix, *parts)))


def _is_hidden(top: Path, parts: tuple[str, ...], folders: Folders) -> bool:
    """Tell whether a rule keeps a file of a search closed, by any of its names: absolute, below one of the run's
    folders, and of what a link leads to."""
    if not folders.hidden_paths or not parts:
        return False
    path = top.joinpath(*parts)
    names: set[str] = set()
    for name in (path, Path(os.path.realpath(path))):
        names.add(str(name))
        names |= {str(name.relative_to(root)) for root in folders.roots if name.is_relative_to(root)}
    return any(matches_path(pattern, name) for pattern in folders.hidden_paths for name in names)


def _walk_files(top: Path, folders: Folders, stop: threading.Event, tool: str) -> Iterator[tuple[str, ...]]:
    """Yield the files below a folder in the order of their names; for a file, the one empty path."""
    if not top.is_dir():
        open_file(top, folders.roots, tool=tool).close()
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
            continue  # a folder that may not be read, or is gone by now, is no reason to find nothing
        waiting += [((*parts, name), is_folder) for name, is_folder in reversed(entries)]


def _list_folder(folder: Path, folders: Folders, tool: str) -> list[tuple[str, bool]]:
    fd = open_folder(folder, folders.roots, tool=tool)
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
    """Yield the lines of one file that match; none of a file that is large, binary or unreadable."""
    try:
        real = resolve_readable(folders, str(path), tool=tool)
        with open_file(real, folders.roots, tool=tool) as file:
            data = b"" if os.fstat(file.fileno()).st_size > GREP_BYTES else file.read(GREP_BYTES)
    except (OSError, ToolError):
        return
    if _is_binary(data):
        return
    lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n") if data else []
    for number, line in enumerate(lines, 1):
        text = line.removesuffix("\r")
        if regex.search(text[:MATCH_CHARS]):
            yield number, text if len(text) <= LINE_CHARS else f"{text[:LINE_CHARS]} [...]"


def _display_path(path: str) -> str:
    """Return a path on one line; names may hold anything, also bytes that are no text."""
    return "".join(char if char.isprintable() else "\ufffd" for char in path)


def _make_outcome(lines: list[str], call: Call, folders: Folders) -> Outcome:
    text, file = truncate_text("\n".join(lines), spill=lambda: folders.spill(f"{call.name}.txt"))
    return Outcome(text, file=file)
