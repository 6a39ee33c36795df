"""The tools that work on one file: `read`, `write` and `edit`.

Files are handled as bytes: an edit changes only the named text and keeps line endings and foreign encodings. `paths`
decides which paths are allowed, and opens and replaces the files. This module knows no path rules.
"""

from __future__ import annotations

import difflib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from retinue.concurrency import run_in_thread
from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Execution, Folders, Outcome
from retinue.core.unseen import reveal_line, reveal_text
from retinue.tools.arguments import quote_text, read_argument, show_arguments
from retinue.tools.paths import (
    make_file_error,
    open_allowed_file,
    replace_allowed_file,
    resolve_readable,
    resolve_writable,
)
from retinue.tools.truncate import HeadAndTail

CHUNK = 64 * 1024
SNIFF_BYTES = 8 * 1024
EDIT_BYTES = 16 * 1024 * 1024
PREVIEW_CHARACTERS = 512 * 1024
LINKED = "over a link, to {path}:"
CUT_PREVIEW = "[... {more} characters more; the arguments of the call have all of it]"
COMPARE_LINES = 4000
COMPARE_BYTES = 1024 * 1024
# Serializes writes, so that two children that edit the same file of a shared workspace lose no edit.
_EDITING = threading.Lock()


class FileTool(ABC):
    """Base of the tools that only read or write files. They run in a thread and have no time limit of their own."""

    shown_arguments: tuple[str, ...] = ("path", "file_path")

    def time_limit(self, call: Call) -> float | None:
        return None

    def preview(self, call: Call, folders: Folders) -> str:
        return show_arguments(call.args, *self.shown_arguments)

    async def __call__(self, call: Call, execution: Execution) -> Outcome:
        return await run_in_thread(lambda stop: self.handle_call(call, execution.folders, stop))

    @abstractmethod
    def handle_call(self, call: Call, folders: Folders, stop: threading.Event) -> Outcome:
        """Execute a call. Stop early if `stop` is set."""


class Read(FileTool):
    """The `read` tool, which returns the text of a file or of some of its lines."""

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
            with open_allowed_file(path, folders.roots, tool=call.name) as file:
                return _read_lines(file, path, first or 1, count, stop=stop, tool=call.name)
        except OSError as error:
            raise make_file_error(call.name, raw, error) from error

    def preview(self, call: Call, folders: Folders) -> str:
        _read_path(call)
        return super().preview(call, folders)


class Write(FileTool):
    """The `write` tool, which creates or replaces a whole file."""

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
            replace_allowed_file(path, data, folders, tool=call.name)
        return Outcome(f"wrote {raw} ({len(data)} bytes)")

    def preview(self, call: Call, folders: Folders) -> str:
        raw, data = _read_path(call), _read_bytes(call, "content")
        path = resolve_writable(folders, raw, tool=call.name)
        old = _read_whole(path, folders, call.name) if os.path.lexists(path) else b""
        if old == data:
            return "(no change)"
        note = _describe_link(folders, raw, path)
        if _is_comparable(old, data):
            return note + _format_diff(old, data)
        return f"{note}replaces {_describe_size(old)} by {_describe_size(data)}:\n{_prefix_lines('+', data)}"


class Edit(FileTool):
    """The `edit` tool, which replaces one string in a file."""

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
            replace_allowed_file(path, new, folders, tool=call.name)
        return Outcome(f"edited {_read_path(call)}")

    def preview(self, call: Call, folders: Folders) -> str:
        path, old, new = _plan_edit(call, folders)
        note = _describe_link(folders, _read_path(call), path)
        if _is_comparable(old, new):
            return note + _format_diff(old, new)
        return (
            note
            + _prefix_lines("-", _read_bytes(call, "old_string"))
            + "\n"
            + _prefix_lines("+", _read_bytes(call, "new_string"))
        )


def _describe_link(folders: Folders, raw: str, path: Path) -> str:
    """Return a line that names the file to be written, if `raw` leads to it over a symlink; else ""."""
    named = os.path.normpath(os.path.join(os.path.realpath(folders.workspace), raw))  # noqa: PTH118
    return "" if named == str(path) else f"{reveal_line(LINKED.format(path=path))}\n"


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
    """Return the path, its content, and its content after the edit. Raises ToolError if the edit does not apply."""
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
        # bytes.count does not count overlapping occurrences, but there are at least two.
        times = max(2, data.count(old))
        advice = "give more of what is around it, or set replace_all"
        raise ToolError(f"{call.name}: 'old_string' occurs {times} times in {quote_text(raw)}; {advice}")
    if len(data) + data.count(old) * (len(new) - len(old)) > EDIT_BYTES:
        raise ToolError(f"{call.name}: {quote_text(raw)} would be over {EDIT_BYTES} bytes")
    return path, data, data.replace(old, new)


def _read_whole(path: Path, folders: Folders, tool: str) -> bytes:
    try:
        with open_allowed_file(path, [folders.workspace], tool=tool) as file:
            data = file.read(EDIT_BYTES + 1)
    except OSError as error:
        raise make_file_error(tool, path, error) from error
    if len(data) > EDIT_BYTES:
        raise ToolError(f"{tool}: {quote_text(path)} is over {EDIT_BYTES} bytes, too large to work on as a whole")
    if is_binary(data):
        raise ToolError(f"{tool}: {quote_text(path)} is binary ({len(data)} bytes)")
    return data


def is_binary(start: bytes) -> bool:
    return b"\0" in start[:SNIFF_BYTES]


def _read_lines(
    file: BinaryIO, path: Path, first: int, count: int | None, *, stop: threading.Event, tool: str
) -> Outcome:
    """Return `count` lines, starting at line `first`. Reads in chunks, so that neither a large file nor a long line is
    held in memory."""
    ends, skip, seen, last, given = HeadAndTail(has=path), first - 1, 0, b"\n", False
    while (chunk := file.read(CHUNK)) and not stop.is_set():
        if not seen and is_binary(chunk):
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
    """Return the offset after the first `lines` lines of a chunk, and how many lines are still to skip."""
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
    """Return True if two texts are small enough to diff while a person waits. The time grows faster than their size."""
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
    """Return the lines as text. No line is left out, since an approval covers everything that the call does.

    A text that is too long for an event is cut with a mark; the arguments of the call still have all of it."""
    text = "\n".join(map(reveal_text, _mark_last_line(lines)))
    more = len(text) - PREVIEW_CHARACTERS
    return text if more <= 0 else f"{text[:PREVIEW_CHARACTERS]}\n{CUT_PREVIEW.format(more=more)}"


def _mark_last_line(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield line.removesuffix("\n")
        if not line.endswith("\n"):
            yield "\\ No newline at end of file"
