"""Edits of retinue.yaml: one rule or one value, with all comments and other values kept.

ruamel.yaml changes the document; the new text is then read again by our own strict reader. Unless the one change is all
that differs, nothing is written. What is written takes the file's place at once. ruamel.yaml keeps comments, quotes and
the order of keys; it may lay out odd indentation and extra spaces anew. It takes long to import: import this module
when something is to be written.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.tokens import CommentToken

from retinue.config.files import exists, read_text
from retinue.config.location import Place
from retinue.config.yaml import parse_yaml
from retinue.core.errors import ConfigError
from retinue.files.atomic import replace_file

NEW = "# retinue.yaml\n"
ALLOW = ("approvals", "allow")
RUNTIME_MODE = ("orchestrator", "coordination", "subagent_runtime_mode")
WIDTH = 1_000_000  # never wrap a line that a person wrote


def add_allowed(path: Path, rule: str) -> tuple[str | None, str]:
    """Add a rule to `approvals.allow`; make the file when there is none.

    Return the text before (None when there was no file) and after. Raises ConfigError when it cannot be changed."""

    def want(values: dict[str, Any]) -> dict[str, Any]:
        allowed = (values.get("approvals") or {}).get("allow") or []
        return values if rule in allowed else _with_value(values, ALLOW, [*allowed, rule])

    def change(document: CommentedMap) -> None:
        _append_item(_enter_section(document, "approvals"), "allow", rule)

    return _change_file(path, want, change, f"cannot be changed here; add this to approvals.allow by hand: {rule}")


def set_runtime(path: Path, runtime: str) -> tuple[str | None, str]:
    """Set the runtime mode of the project; otherwise like `add_allowed`."""

    def want(values: dict[str, Any]) -> dict[str, Any]:
        return _with_value(values, RUNTIME_MODE, runtime)

    def change(document: CommentedMap) -> None:
        *sections, key = RUNTIME_MODE
        for section in sections:
            document = _enter_section(document, section)
        if key in document:
            document[key] = runtime
        else:
            document.insert(0, key, runtime)

    return _change_file(
        path, want, change, f"cannot be changed here; write {'.'.join(RUNTIME_MODE)}: {runtime} by hand"
    )


def _change_file(
    path: Path,
    want: Callable[[dict[str, Any]], dict[str, Any]],
    change: Callable[[CommentedMap], None],
    otherwise: str,
) -> tuple[str | None, str]:
    path = Path(os.path.realpath(path))
    there = _read_raw(path) if exists(path) else None
    old = NEW if there is None else there
    before = _read_values(old, path)
    by_hand = Place(str(path)).error(otherwise)
    try:
        wanted = want(before)
        if wanted == before:
            return there, old
        new = _edit_text(old, change)
        if _read_values(new, path) != wanted:
            raise by_hand
    except (ConfigError, YAMLError, ValueError, AttributeError, TypeError):
        raise by_hand from None
    try:
        replace_file(path, new.encode(), mode=None, sync=True)
    except OSError as error:
        raise Place(str(path)).error(f"cannot be written: {error.strerror or error}") from None
    return there, new


def _read_raw(path: Path) -> str:
    read_text(path)  # reports what is wrong with the file, if anything is
    return path.read_bytes().decode("utf-8-sig")


def _read_values(text: str, path: Path) -> Any:
    return parse_yaml(text.replace("\r\n", "\n"), str(path)).to_plain() or {}


def _with_value(values: dict[str, Any], keys: tuple[str, ...], value: object) -> dict[str, Any]:
    key, *rest = keys
    return {**values, key: _with_value(values.get(key) or {}, tuple(rest), value) if rest else value}


def _edit_text(text: str, change: Callable[[CommentedMap], None]) -> str:
    """Return the text with the change made, in the indentation and line ends that it has."""

    end = "\r\n" if "\r\n" in text else "\n"
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = WIDTH
    mapping, offset = _find_indent(text)
    yaml.indent(mapping=mapping, sequence=offset + 2, offset=offset)
    document = yaml.load(text)
    head = ""
    if document is None:  # nothing but comments, which have no value to hang on
        head, document = text if not text or text.endswith("\n") else text + end, CommentedMap()
    change(document)
    out = io.StringIO()
    yaml.dump(document, out)
    return head + out.getvalue().replace("\n", end)


def _find_indent(text: str) -> tuple[int, int]:
    """Return how far the text indents keys in a section, and the dashes of a list below its key."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: dict[bool, int] = {}
    for before, line in pairwise(lines):
        depth = len(line) - len(line.lstrip()) - (len(before) - len(before.lstrip()))
        is_list = line.lstrip().startswith("- ")
        starts = not before.lstrip().startswith("- ") and before.partition(" #")[0].rstrip().endswith(":")
        if starts and depth >= (0 if is_list else 1):
            found.setdefault(is_list, depth)
    return found.get(False, 2), found.get(True, 2)


def _enter_section(document: CommentedMap, key: str) -> CommentedMap:
    """Return the section of that name, which is made if it is missing or empty."""

    if document.get(key) is None:
        document[key] = CommentedMap()
    section = document[key]
    if not isinstance(section, CommentedMap):
        raise TypeError(f"{key} is no section")
    return section


def _append_item(section: CommentedMap, key: str, text: str) -> None:
    """Append the text to a list, which is made if it is missing or empty."""

    value = DoubleQuotedScalarString(text)
    items = section.get(key)
    if isinstance(items, CommentedSeq):
        items.append(value)
        _move_comments_below(items)
    elif items is not None:
        raise TypeError(f"{key} is no list")
    elif key in section:
        section[key] = CommentedSeq([value])
    else:
        section.insert(0, key, CommentedSeq([value]))


def _move_comments_below(items: CommentedSeq) -> None:
    """Keep comments that stood below the list below its new last item: ruamel.yaml hangs them on the old one."""

    last = len(items) - 2
    tokens = items.ca.items.get(last)
    if not tokens or tokens[0] is None:
        return
    token = tokens[0]
    own, _, below = token.value.partition("\n")
    if not below:
        return
    items.ca.items[last + 1] = [CommentToken("\n" + below, token.start_mark), None, None, None]
    if own:
        tokens[0] = CommentToken(own + "\n", token.start_mark)
    else:
        del items.ca.items[last]
