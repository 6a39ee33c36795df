"""A strict YAML reader: turns text into Nodes that know their line. Not a general YAML reader.

It reads only the unambiguous part of YAML: mappings with texts as keys, lists, and scalars as in YAML 1.2 (`null`,
`true`, decimal numbers; `yes`, `1:30`, `0x1f` and dates are texts). Tags, anchors, aliases, duplicate keys, further
documents, NaN, infinities and deep nesting are errors. Nodes are built from the parser's events instead of
`yaml.compose`, because composing recurses in C without a limit and loses the explicit tags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from retinue.config.files import read_text
from retinue.config.located import MAX_DEPTH, Node, check_number, check_text
from retinue.config.location import SourceLocation
from retinue.core.errors import ConfigError

FENCE = "---"
MAX_EVENTS = 50_000  # parser events, about one per key and per value
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_FLAGS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_ODD_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_HINTS = {
    "alias": "quote a text that begins with '*', such as \"*\"",
    "cannot start any token": "indent with spaces, not tabs, and quote a text that begins with '@', '%' or '`'",
    "mapping values are not allowed": "quote a text that has ': ' in it",
}
_NOT_YAML = re.compile("[^\t\n\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def read_yaml(path: Path) -> Node:
    """Read the single document of a file."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, file: str) -> Node:
    """Read the single document of `text`. `file` names its origin in errors. An empty text is null."""
    bad = _NOT_YAML.search(text)
    if bad is not None:
        line = text.count("\n", 0, bad.start()) + 1
        raise SourceLocation(file, line).error(f"has a character that YAML does not allow (U+{ord(bad[0]):04X})")
    node = None
    try:
        events = _limit_events(yaml.parse(text, Loader=_LOADER), file)
        for event in events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if node is not None:
                raise SourceLocation(file, _line_of(event)).error("a second document begins here; one is allowed")
            first = next(events)
            node = _read_node(first, events, SourceLocation(file, _line_of(first)))
    except yaml.MarkedYAMLError as error:
        raise _make_syntax_error(error, file) from None
    except yaml.YAMLError:
        raise SourceLocation(file, 1).error("is not valid YAML") from None
    return node or Node(SourceLocation(file, 1), None)


def parse_frontmatter(text: str, file: str) -> tuple[Node, str]:
    """Read a Markdown text that begins with YAML between two `---` lines. Return its keys and its body."""
    lines = text.split("\n")
    if lines[0].rstrip() != FENCE:
        raise SourceLocation(file, 1).error(f"the first line must be '{FENCE}', with the keys below it (frontmatter)")
    end = next((i for i, line in enumerate(lines) if i > 0 and line.rstrip() == FENCE), None)
    if end is None:
        raise SourceLocation(file, 1).error(f"the frontmatter that begins here has no closing '{FENCE}' line")
    node = parse_yaml("\n".join(["", *lines[1:end]]), file)  # the empty line keeps the line numbers right
    entries = {} if node.value is None else dict(node.entries(what="'key: value' lines"))
    return Node(SourceLocation(file, 1), entries), "\n".join(lines[end + 1 :]).strip()


def _limit_events(events: Iterator[Any], file: str) -> Iterator[Any]:
    """Yield the events. Raises for a document with too many: the size in bytes says little about the time to read
    it."""
    for number, event in enumerate(events):
        if number >= MAX_EVENTS:
            raise SourceLocation(file, _line_of(event)).error(f"has more than {MAX_EVENTS:,} keys and values")
        yield event


def _read_node(event: Any, events: Iterator[Any], place: SourceLocation) -> Node:
    """Return the node that begins with `event`. Consumes its other events."""
    _check_bare(event, place)
    if len(place.keys) > MAX_DEPTH:
        raise place.error(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(event, yaml.ScalarEvent):
        return Node(place, _read_scalar(event, place))
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_read_node(event, events, place.child(len(items), _line_of(event))))
        return Node(place, tuple(items))
    entries: dict[str, Node] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        line = _line_of(event)
        key = _read_key(event, SourceLocation(place.file, line, place.keys))
        below = place.child(key, line)
        if key in entries:
            raise below.error(f"appears twice, first on line {entries[key].place.line}")
        entries[key] = _read_node(next(events), events, below)
    return Node(place, entries)


def _check_bare(event: Any, place: SourceLocation) -> None:
    if isinstance(event, yaml.AliasEvent):
        raise place.error(f"aliases are not allowed; quote a text that begins with '*': \"*{event.anchor}\"")
    if event.anchor is not None:
        raise place.error(f"anchors are not allowed; quote a text that begins with '&': \"&{event.anchor}\"")
    if event.tag is not None:
        raise place.error(f"tags are not allowed ({event.tag}); quote a text that begins with '!'")


def _read_key(event: Any, place: SourceLocation) -> str:
    """Return the text of a mapping's key. The key is checked before any value below it, so keys in keys cannot
    nest."""
    _check_bare(event, place)
    if not isinstance(event, yaml.ScalarEvent):
        raise place.error("a list or mapping cannot be a key")
    key = _read_scalar(event, place)
    if not isinstance(key, str):
        hint = f'quote this one: "{event.value}"' if event.value else "there is none before ':'"
        raise place.error(f"keys must be texts; {hint}")
    return key


def _read_scalar(event: Any, place: SourceLocation) -> str | int | float | bool | None:
    """Return the value of a scalar. Quoted and block scalars are always texts."""
    text: str = event.value
    if event.style is not None and event.style != "":
        return check_text(text, place)
    if text in _NULL:
        return None
    if text in _FLAGS:
        return _FLAGS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > 21:  # none fits, and Python refuses to convert very long ones
            raise place.error("the whole number does not fit in 64 bits")
        return check_number(int(text), place)
    if _FLOAT.fullmatch(text):
        return check_number(float(text), place)
    if _ODD_FLOAT.fullmatch(text):
        raise place.error(f"'{text}' is not a number that is allowed here")
    return check_text(text, place)


def _line_of(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _make_syntax_error(error: yaml.MarkedYAMLError, file: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else mark.line + 1
    words = " ".join(part for part in (error.context, error.problem) if part)
    hint = next((f"; {hint}" for part, hint in _HINTS.items() if part in words), "")
    return SourceLocation(file, line).error(f"is not valid YAML: {words}{hint}")
