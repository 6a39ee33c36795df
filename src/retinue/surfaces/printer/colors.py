"""ANSI colours around text that is already escaped: the colour of each role, the decision whether to use colour, and
the cut of coloured lines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from retinue.log.blocks import Role, Span
from retinue.surfaces.printer import safe

_CODES: dict[Role, str] = {
    "plain": "1", "mark": "1", "name": "1", "label": "36", "tool": "35", "good": "32", "bad": "31",
    "warn": "33", "faint": "2",
}  # fmt: skip
_DIFF = {"-": "31", "+": "32", "@": "36"}
CLEAR_LINE = "\r\x1b[K"


class Stream(Protocol):
    """A text stream: a file object of the standard library, or a similar object."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


def wants_color(stream: Stream, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if output should be coloured: never with NO_COLOR, always with FORCE_COLOR, else on a terminal that
    is not dumb."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") != "0":
        return True
    return is_terminal(stream) and environment.get("TERM") != "dumb"


def is_terminal(stream: Stream) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def paint_header(spans: Iterable[Span], *, color: bool, bold: bool = True) -> str:
    """Return the spans of a header as one escaped line."""
    if not color:
        return "".join(safe.escape_line(text) for _, text in spans)
    return "".join(_paint(safe.escape_line(text), role, bold) for role, text in spans)


def cut_line(spans: Iterable[Span], width: int) -> list[Span]:
    """Return the spans of a line, escaped and cut to `width`. An ellipsis marks the cut."""
    escaped = [(role, safe.escape_line(text[: width * 4 + 4])) for role, text in spans]
    widths = [safe.measure_width(text) for _, text in escaped]
    if sum(widths) <= width:
        return escaped
    cut: list[Span] = []
    for (role, text), columns in zip(escaped, widths, strict=True):
        if columns >= width:
            return [*cut, (role, safe.cut_to_width(f"{text} ", width))]  # the space makes room for the ellipsis
        cut.append((role, text))
        width -= columns
    return cut


def paint_diff(text: str, *, color: bool) -> str:
    """Return escaped text with its removed and added lines coloured."""
    if not color:
        return text
    lines = (f"\x1b[{_DIFF[line[0]]}m{line}\x1b[0m" if line[:1] in _DIFF else line for line in text.split("\n"))
    return "\n".join(lines)


def paint_faint(text: str, *, color: bool) -> str:
    """Return escaped text in a faint colour. Each line is coloured separately, so that a pager shows it correctly."""
    if not color:
        return text
    return "\n".join(f"\x1b[2m{line}\x1b[0m" if line else line for line in text.split("\n"))


def _paint(text: str, role: Role, bold: bool) -> str:
    if not text or (role == "plain" and not bold):
        return text
    return f"\x1b[{_CODES[role]}m{text}\x1b[0m"
