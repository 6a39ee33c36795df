"""Writing one thing into retinue.yaml, as a person would: in its place, with everything else as it was.

The file is text of somebody else's, so it is changed as text and then read again: unless the one thing is all that has
changed, nothing is written. What is written takes the file's place at once.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from retinue.config.files import exists, read_text
from retinue.config.location import Place
from retinue.config.yaml import parse_yaml
from retinue.core.errors import ConfigError
from retinue.files.atomic import replace_file

NEW = "# retinue.yaml\n"
MODE = ("orchestrator", "coordination", "subagent_runtime_mode")


def add_allowed(path: Path, rule: str) -> tuple[str | None, str]:
    """Adds a rule to `approvals.allow`; makes the file when there is none. Gives the text before (None when there was
    no file) and after. Raises ConfigError when it cannot."""
    by_hand = f"cannot be changed here; add this to approvals.allow by hand: {rule}"
    return _change(path, lambda before: _with_rule(before, rule), lambda text: _inserted(text, rule), by_hand)


def set_runtime(path: Path, runtime: str) -> tuple[str | None, str]:
    """Says where runs live in this project; otherwise like `add_allowed`."""
    by_hand = f"cannot be changed here; write {'.'.join(MODE)}: {runtime} by hand"
    return _change(path, lambda before: _with_value(before, MODE, runtime), lambda text: _set(text, runtime), by_hand)


def _change(
    path: Path, want: Callable[[dict[str, Any]], dict[str, Any]], change: Callable[[str], str], otherwise: str
) -> tuple[str | None, str]:
    path = Path(os.path.realpath(path))
    there = _raw(path) if exists(path) else None
    old = NEW if there is None else there
    before = _plain(old, path)
    by_hand = Place(str(path)).error(otherwise)
    try:
        wanted = want(before)
        if wanted == before:
            return there, old
        new = change(old)
        if _plain(new, path) != wanted:
            raise by_hand
    except (ConfigError, yaml.YAMLError, ValueError, AttributeError, TypeError):
        raise by_hand from None
    try:
        _replace(path, new)
    except OSError as error:
        raise Place(str(path)).error(f"cannot be written: {error.strerror or error}") from None
    return there, new


def _raw(path: Path) -> str:
    read_text(path)  # says what is wrong with the file, if anything is
    return path.read_bytes().decode("utf-8-sig")


def _plain(text: str, path: Path) -> Any:
    return parse_yaml(text.replace("\r\n", "\n"), str(path)).plain() or {}


def _with_rule(settings: dict[str, Any], rule: str) -> dict[str, Any]:
    approvals = settings.get("approvals") or {}
    allow = approvals.get("allow") or []
    return settings if rule in allow else {**settings, "approvals": {**approvals, "allow": [*allow, rule]}}


def _with_value(settings: dict[str, Any], keys: Sequence[str], value: str) -> dict[str, Any]:
    key, *rest = keys
    return {**settings, key: _with_value(settings.get(key) or {}, rest, value) if rest else value}


def _set(text: str, runtime: str) -> str:
    """The text with the mode in the innermost of its sections that is there; what comes of it is checked by the
    caller."""
    end = "\r\n" if "\r\n" in text else "\n"
    node, margin, found = yaml.compose(text, Loader=yaml.SafeLoader), "", None
    missing = list(MODE)
    while isinstance(node, yaml.MappingNode) and (inner := _value(node, missing[0])) is not None:
        found, node = inner
        missing.pop(0)
        margin = " " * (found.start_mark.column + 2)
        if not missing:
            return text[: node.start_mark.index] + runtime + text[node.end_mark.index :]
    lines = [f"{margin}{'  ' * depth}{key}:" for depth, key in enumerate(missing)]
    piece = f"{end.join(lines)} {runtime}{end}"
    if found is None:
        gap = "" if not text or text.endswith("\n") else end
        return f"{text}{gap}{piece}"
    return _after_line(text, found, piece, end)


def _inserted(text: str, rule: str) -> str:
    """The text with the rule where it belongs; what comes of it is checked by the caller."""
    word, end = json.dumps(rule, ensure_ascii=False), "\r\n" if "\r\n" in text else "\n"
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    approvals = None if root is None else _value(root, "approvals")
    if approvals is None:
        gap = "" if not text or text.endswith("\n") else end
        return f"{text}{gap}approvals:{end}  allow:{end}    - {word}{end}"
    key, value = approvals
    if not isinstance(value, yaml.MappingNode):  # `approvals:` with nothing behind it
        return _after_line(text, key, f"  allow:{end}    - {word}{end}", end)
    allow = _value(value, "allow")
    if allow is None:
        if value.flow_style:
            comma = ", " if value.value else ""
            return _before(text, value.end_mark.index - 1, f"{comma}allow: [{word}]")
        margin = " " * value.start_mark.column
        return _before(
            text, value.start_mark.index - value.start_mark.column, f"{margin}allow:{end}{margin}  - {word}{end}"
        )
    key, items = allow
    if not isinstance(items, yaml.SequenceNode):
        return _after_line(text, key, f"{' ' * (key.start_mark.column + 2)}- {word}{end}", end)
    if items.flow_style:
        return _before(text, items.end_mark.index - 1, f"{', ' if items.value else ''}{word}")
    margin = " " * items.start_mark.column
    return _after_line(text, items.value[-1], f"{margin}- {word}{end}", end)


def _value(node: Any, name: str) -> tuple[Any, Any] | None:
    return next(((key, value) for key, value in node.value if key.value == name), None)


def _before(text: str, at: int, piece: str) -> str:
    return text[:at] + piece + text[at:]


def _after_line(text: str, node: Any, piece: str, end: str) -> str:
    """Behind the line on which the node ends."""
    at = text.find("\n", node.end_mark.index)
    return f"{text}{end}{piece}" if at < 0 else _before(text, at + 1, piece)


def _replace(path: Path, text: str) -> None:
    """Whole or not at all, with the mode it had."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
    replace_file(path, text.encode(), mode=mode, sync=True)
