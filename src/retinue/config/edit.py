"""Edits of retinue.yaml: add a rule or set a value, and keep all comments and other values.

ruamel.yaml changes the document. Then our own strict reader reads the new text; if anything else has changed, nothing
is written. The file is replaced atomically. ruamel.yaml keeps comments, quotes and the order of keys, but may
normalize odd indentation and extra spaces. It is slow to import, so import this module only to write.
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
from retinue.config.location import SourceLocation
from retinue.config.yaml import parse_yaml
from retinue.core.errors import ConfigError
from retinue.files.atomic import replace_file

NEW = "# retinue.yaml\n"
ALLOW = ("approvals", "allow")
AGENTS = ("a2a_agents",)
RUNTIME_MODE = ("orchestrator", "coordination", "subagent_runtime_mode")
WIDTH = 1_000_000  # never wrap the user's lines


def add_allowed(path: Path, rule: str) -> tuple[str | None, str]:
    """Add a rule to `approvals.allow`, and create the file if it does not exist.

    Return the text before (None if there was no file) and after. Raises ConfigError if the file cannot be changed.
    """
    by_hand = f"cannot be changed here; add this to approvals.allow by hand: {rule}"
    return _change_file(path, ALLOW, lambda rules: rules if rule in (rules or ()) else [*(rules or ()), rule], by_hand)


def set_runtime(path: Path, runtime: str) -> tuple[str | None, str]:
    """Set the runtime mode of the project. Otherwise like `add_allowed`."""
    by_hand = f"cannot be changed here; write {'.'.join(RUNTIME_MODE)}: {runtime} by hand"
    return _change_file(path, RUNTIME_MODE, lambda _: runtime, by_hand)


def add_agent(path: Path, name: str, values: dict[str, Any]) -> tuple[str | None, str]:
    """Add an agent to `a2a_agents`, or replace it. Otherwise like `add_allowed`."""
    by_hand = f"cannot be changed here; write {'.'.join(AGENTS)}.{name} by hand: {values}"
    return _change_file(path, (*AGENTS, name), lambda _: values, by_hand)


def _change_file(
    path: Path, keys: tuple[str, ...], make_value: Callable[[Any], Any], by_hand: str
) -> tuple[str | None, str]:
    """Set the key at path `keys` to the value that `make_value` returns for the old value. `by_hand` is the error text
    if the file cannot be changed."""
    path = Path(os.path.realpath(path))
    there = _read_raw(path) if exists(path) else None
    old = NEW if there is None else there
    before = _read_values(old, path)
    try:
        value = make_value(_get_value(before, keys))
        wanted = _with_value(before, keys, value)
        if wanted == before:
            return there, old
        new = _edit_text(old, keys, value)
        changed = _read_values(new, path) == wanted
    except (ConfigError, YAMLError, ValueError, AttributeError, TypeError):
        changed = False
    if not changed:
        raise SourceLocation(str(path)).error(by_hand)
    try:
        replace_file(path, new.encode(), mode=None, sync=True)
    except OSError as error:
        raise SourceLocation(str(path)).error(f"cannot be written: {error.strerror or error}") from None
    return there, new


def _read_raw(path: Path) -> str:
    read_text(path)  # raises if the file is not a valid text file
    return path.read_bytes().decode("utf-8-sig")


def _read_values(text: str, path: Path) -> Any:
    return parse_yaml(text.replace("\r\n", "\n"), str(path)).to_plain() or {}


def _get_value(values: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        values = (values or {}).get(key)
    return values


def _with_value(values: dict[str, Any], keys: tuple[str, ...], value: object) -> dict[str, Any]:
    key, *rest = keys
    return {**values, key: _with_value(values.get(key) or {}, tuple(rest), value) if rest else value}


def _edit_text(text: str, keys: tuple[str, ...], value: Any) -> str:
    """Return the text with the new value. Indentation and line ends stay the same."""
    end = "\r\n" if "\r\n" in text else "\n"
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = WIDTH
    mapping, offset = _find_indent(text)
    yaml.indent(mapping=mapping, sequence=offset + 2, offset=offset)
    document = yaml.load(text)
    head = ""
    if document is None:  # only comments: ruamel.yaml has no value to attach them to
        head, document = text if not text or text.endswith("\n") else text + end, CommentedMap()
    *sections, key = keys
    section = document
    for name in sections:
        section = _enter_section(section, name)
    _set_value(section, key, value)
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
    """Return the section named `key`. Create it if it is missing or empty."""
    if document.get(key) is None:
        document[key] = CommentedMap()
    section = document[key]
    if not isinstance(section, CommentedMap):
        raise TypeError(f"{key} is not a section")
    return section


def _set_value(section: CommentedMap, key: str, value: Any) -> None:
    """Set a value, or append the last item of a list. Create the key if it is missing."""
    items = section.get(key)
    if isinstance(value, list) and isinstance(items, CommentedSeq):
        items.append(DoubleQuotedScalarString(value[-1]))
        _move_comments_below(items)
        return
    if isinstance(value, list):
        if items is not None:
            raise TypeError(f"{key} is not a list")
        value = CommentedSeq([DoubleQuotedScalarString(value[-1])])
    if key in section:
        section[key] = value
    else:
        section.insert(0, key, value)


def _move_comments_below(items: CommentedSeq) -> None:
    """Keep comments that follow the list below its new last item: ruamel.yaml attaches them to the previous last
    item."""
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
