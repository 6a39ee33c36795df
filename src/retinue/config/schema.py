"""What a mapping in a file may hold: every key once, with its kind, what it means and how it looks.

The same table reads a file strictly, says it as a JSON schema, and writes it down for `retinue init`. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from retinue.config.located import Node, Section

DRAFT = "http://json-schema.org/draft-07/schema#"


@dataclass(frozen=True)
class Kind:
    """A kind of value: how it is read, and what a JSON schema says of it. `shape` is that of a mapping."""

    read: Callable[[Node], Any]
    schema: Mapping[str, Any]
    shape: Shape | None = None


@dataclass(frozen=True)
class Key:
    """`null` says whether null may stand there; `example` is a value as YAML, on one line."""

    name: str
    kind: Kind
    help: str
    example: str = ""
    null: bool = True


@dataclass(frozen=True)
class Shape:
    """A mapping with these keys and no others; `hints` has better words for some of the others."""

    title: str
    keys: tuple[Key, ...]
    hints: Mapping[str, str] = field(default_factory=dict)

    def read(self, section: Section) -> dict[str, Any]:
        """The values of the keys that were given; null is None."""
        found: dict[str, Any] = {}
        for key in self.keys:
            node = section.entry(key.name)
            if node is not None:
                found[key.name] = None if key.null and node.value is None else key.kind.read(node)
        section.finish(self.hints)
        return found

    def schema(self) -> dict[str, Any]:
        properties = {}
        for key in self.keys:
            about = dict(nullable(key.kind.schema) if key.null else key.kind.schema)
            about["description"] = f"{key.help} (such as {key.example})" if key.example else key.help
            properties[key.name] = about
        return {"title": self.title, "type": "object", "properties": properties, "additionalProperties": False}


def nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same, or null."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    more: dict[str, Any] = {"type": [*kinds, "null"]}
    if "enum" in schema:
        more["enum"] = [*schema["enum"], None]
    return {**schema, **more}


def mapping(shape: Shape, make: Callable[[dict[str, Any]], Any] = lambda found: found) -> Kind:
    """A mapping of that shape; `make` makes a value of what was found."""
    return Kind(lambda node: make(shape.read(node.section())), shape.schema(), shape)


def choice(options: tuple[str, ...]) -> Kind:
    """One of these words."""
    return Kind(lambda node: node.choice(options), {"type": "string", "enum": list(options)})


def texts_like(read: Callable[[Node], Any], pattern: str, *, what: str) -> Kind:
    """A list of texts, each of which `read` makes a value of; the pattern says the same to a JSON schema."""
    return Kind(
        lambda node: tuple(read(item) for item in node.items(what=what)),
        {"type": "array", "items": {"type": "string", "pattern": pattern}},
    )


def at_least(least: int) -> Kind:
    """A whole number of this or more."""
    return Kind(lambda node: node.integer(minimum=least), {"type": "integer", "minimum": least})


WHOLE = at_least(0)
NUMBER = Kind(lambda node: node.number(minimum=0), {"type": "number", "minimum": 0})
COUNT = at_least(1)
POSITIVE = Kind(lambda node: node.number(minimum=1), {"type": "number", "minimum": 1})
FLAG = Kind(Node.flag, {"type": "boolean"})
TEXT = Kind(Node.text, {"type": "string"})
WORD = Kind(Node.word, {"type": "string", "pattern": r"\S"})
TEXTS = Kind(Node.texts, {"type": "array", "items": {"type": "string"}})
