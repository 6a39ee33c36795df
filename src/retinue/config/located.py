"""Plain values with their place in a file, and typed access to them.

A Node is one JSON-like value with its Place (file, line, key path). This module knows no YAML and reads no files:
`yaml.py` makes Nodes from text, `make_node` makes them from Python values. Every wrong value is a one-line
ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from retinue.config.location import SourceLocation, show_text, suggest
from retinue.core.errors import ConfigError

MAX_DEPTH = 64
INTEGERS = range(-(2**63), 2**64)  # the range that all our JSON readers and writers support
S = TypeVar("S", bound=str)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """One value and its place. Each method returns the value as one type, or raises ConfigError."""

    place: SourceLocation
    value: str | int | float | bool | tuple[Node, ...] | dict[str, Node] | None

    def error(self, what: str) -> ConfigError:
        return self.place.error(what)

    def type_error(self, expected: str) -> ConfigError:
        return self.error(f"expected {expected}, got {_describe_kind(self.value)}")

    def text(self) -> str:
        if not isinstance(self.value, str):
            hint = " (quote it to make it a text)" if isinstance(self.value, (bool, int, float)) else ""
            raise self.error(f"expected a text, got {_describe_kind(self.value)}{hint}")
        return self.value

    def word(self) -> str:
        """Return a text that is not blank."""
        text = self.text()
        if not text.strip():
            raise self.error("expected a text, got an empty one")
        return text

    def integer(self, *, minimum: int | None = None, maximum: int | None = None) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            got = str(self.value) if isinstance(self.value, float) else _describe_kind(self.value)
            raise self.error(f"expected a whole number, got {got}")
        self._check_range(self.value, minimum, maximum)
        return self.value

    def number(self, *, minimum: float | None = None, maximum: float | None = None) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.type_error("a number")
        self._check_range(self.value, minimum, maximum)
        return float(self.value)

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.type_error("true or false")
        return self.value

    def items(self, *, what: str = "a list") -> tuple[Node, ...]:
        if not isinstance(self.value, tuple):
            raise self.type_error(what)
        return self.value

    def texts(self) -> tuple[str, ...]:
        return tuple(item.text() for item in self.items(what="a list of texts"))

    def entries(self, *, what: str = "a mapping") -> Mapping[str, Node]:
        if not isinstance(self.value, dict):
            raise self.type_error(what)
        return self.value

    def named_entries(self, check: Callable[[str], object]) -> Mapping[str, Node]:
        """Return the entries of a mapping with names as keys. Raises for a name that `check` refuses, and for names
        that differ only in case."""
        places: dict[str, Node] = {}
        for name, entry in self.entries().items():
            key = Node(entry.place, name)
            key.parse(check)
            other = places.setdefault(name.casefold(), key)
            if other is not key:
                raise key.error(f"is the same name as '{other.value}' on line {other.place.line}")
        return self.entries()

    def get(self, *keys: str) -> Node | None:
        """Return the node at a path of keys, or None if it is missing or null."""
        node = self
        for key in keys:
            found = node.entries().get(key)
            if found is None or found.value is None:
                return None
            node = found
        return node

    def locate(self, *keys: str | int) -> Node:
        """Return the node at a path of keys, or the closest one above it."""
        node = self
        for key in keys:
            below = dict(enumerate(node.value)) if isinstance(node.value, tuple) else node.value
            if not isinstance(below, dict) or key not in below:
                break
            node = below[key]  # type: ignore[index]
        return node

    def require(self, key: str) -> Node:
        """Return the node of a key. Raises if it is missing or null."""
        node = self.get(key)
        if node is None:
            others = (other for other in self.entries() if other != key)
            raise self.error(f"the key '{key}' is missing{suggest(key, others)}")
        return node

    def read_keys(self, readers: Mapping[str, Callable[[Node], Any]]) -> dict[str, Any]:
        """Return the values of the given keys, each read by its reader. Raises for a key without a reader."""
        values = {key: read(node) for key, read in readers.items() if (node := self.get(key)) is not None}
        self.check_keys(readers)
        return values

    def check_keys(self, known: Iterable[str], hints: Mapping[str, str] | None = None) -> None:
        """Raise for the first key that is not in `known`. `hints` has better error texts for some keys."""
        allowed = sorted(known)
        for key, node in self.entries().items():
            if key in allowed:
                continue
            if hints and key in hints:
                raise node.error(hints[key])
            raise node.error(f"unknown key; allowed here: {', '.join(allowed) or 'none'}{suggest(key, allowed)}")

    def choice(self, options: tuple[S, ...]) -> S:
        text = self.text()
        for option in options:
            if option == text:
                return option
        raise self.error(
            f"unknown value '{show_text(text, 80)}'; available: {', '.join(options)}{suggest(text, options)}"
        )

    def parse(self, check: Callable[[str], T]) -> T:
        """Return the value that `check` makes from the text. Errors of `check` get the place of this node."""
        text = self.text()
        try:
            return check(text)
        except ConfigError as error:
            raise self.error(str(error)) from None

    def to_plain(self) -> Any:
        """Return the value without places, as `json.loads` would return it."""
        if isinstance(self.value, tuple):
            return [item.to_plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.to_plain() for key, item in self.value.items()}
        return self.value

    def _check_range(self, value: float, minimum: float | None, maximum: float | None) -> None:
        if minimum is not None and value < minimum:
            raise self.error(f"must be {minimum} or more, got {value}")
        if maximum is not None and value > maximum:
            raise self.error(f"must be {maximum} or less, got {value}")


def make_node(value: object, place: SourceLocation) -> Node:
    """Return a Node from Python values: dicts with texts as keys, lists, tuples, texts, numbers, flags and None."""
    if len(place.keys) > MAX_DEPTH:
        raise place.error(f"nested deeper than {MAX_DEPTH} levels")
    match value:
        case None | bool():
            return Node(place, value)
        case str():
            return Node(place, check_text(value, place))
        case int() | float():
            return Node(place, check_number(value, place))
        case list() | tuple():
            return Node(place, tuple(make_node(item, place.child(i)) for i, item in enumerate(value)))
        case dict():
            return Node(
                place, {_check_key(key, place): make_node(item, place.child(key)) for key, item in value.items()}
            )
    raise place.error(f"expected a text, number, flag, list or dict, got {type(value).__name__}")


def check_text(text: str, place: SourceLocation) -> str:
    """Return the text, or raise if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise place.error("has half of a surrogate pair, which is not a character") from None
    return text


def check_number(number: T, place: SourceLocation) -> T:
    """Return the number, or raise if JSON cannot represent it."""
    if isinstance(number, float) and not math.isfinite(number):
        raise place.error("expected a number, got one that is not finite")
    if isinstance(number, int) and number not in INTEGERS:
        raise place.error("the whole number does not fit in 64 bits")
    return number


def _check_key(key: object, place: SourceLocation) -> str:
    if not isinstance(key, str):
        raise place.error(f"keys must be texts, got {type(key).__name__}")
    return check_text(key, place)


def _describe_kind(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case tuple():
            return "a list"
    return "a mapping"
