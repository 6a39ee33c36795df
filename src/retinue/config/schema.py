"""Declarations of settings: each key once, with its kind, default, help, example and trust rule.

A `Section` is read in three steps. `read` returns the keys that a file gives, checked strictly. `restrict` applies the
trust rules to them. `make` turns them into the value that the program works with. The same declarations describe the
section as a JSON schema (`make_schema`) and generate docs/settings.md. This module knows no particular setting and
reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from msgspec import UNSET

from retinue.config.located import Node
from retinue.core.errors import ConfigError

DRAFT = "http://json-schema.org/draft-07/schema#"
_KEY = "retinue.setting"
_SAME = object()

Given = dict[str, Any]
Null = Literal["unset", "unlimited", "refused"]


@dataclass(frozen=True)
class Loosening:
    """A value that loosens the restrictions of agents: its key, and the value as a person writes it."""

    key: str
    value: str

    def with_prefix(self, key: str) -> Loosening:
        """Return the same loosening with its key inside the section or setting `key`."""
        return Loosening(f"{key}.{self.key}" if self.key else key, self.value)

    def __str__(self) -> str:
        return f"{self.key}: {self.value}"


Restricted = tuple[Any, list[Loosening]]


@dataclass(frozen=True)
class TrustRule:
    """A rule for values that loosen the restrictions of agents. `words` describe those values.

    `restrict` returns the value that applies without the user's trust, or UNSET for the default, and the loosenings it
    removed. The key of a loosening is "" for the setting itself, else a key below it.
    """

    words: str
    restrict: Callable[[Any, Setting], Restricted]


@dataclass(frozen=True)
class Kind:
    """A kind of value: its reader, and the function that makes its JSON schema, which few programs ask for."""

    read: Callable[[Node], Any]
    make_schema: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """The declaration of one key.

    If `kind` is a section, the trust rules of its keys apply, and its value is made with that of the section around it.
    `default` applies if nobody sets the key. `null` says how to treat null: like a missing key, as no limit, or as an
    error. `example` is a value as YAML on one line; None means the default. `trust` is the rule for values that loosen
    the restrictions of agents; without a rule every value applies.
    """

    kind: Kind | Section
    help: str
    default: Any = None
    example: str | None = None
    null: Null = "unset"
    trust: TrustRule | None = None

    @property
    def shown_example(self) -> str:
        return format_default(self.default) if self.example is None else self.example


def limit(
    kind: Kind, help: str, *, default: Any = None, example: str | None = None, null: Null = "unlimited"
) -> Setting:
    """Declare a limit. A value above the default needs trust."""
    trust = None if default is None else ABOVE_DEFAULT
    return Setting(kind, help, default=default, example=example, null=null, trust=trust)


def setting(kind: Kind | Section, help: str, *, default: Any = None, unset: Any = _SAME, **more: Any) -> Any:
    """Declare a setting as a field of a dataclass, with the arguments of `Setting`. The field's name is the key.
    `unset` is the field's value if nobody sets the key, if different from the default."""
    value = default if unset is _SAME else unset
    metadata = {_KEY: Setting(kind, help, default=default, **more)}
    if value == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=value, metadata=metadata)


def format_default(value: object) -> str:
    """Return a default as YAML, or an empty text for an empty default."""
    if value is None or value in ((), {}, ""):
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")


def list_settings(cls: type) -> dict[str, Setting]:
    """Return the declarations in the fields of a dataclass, in order."""
    return {each.name: each.metadata[_KEY] for each in fields(cls) if _KEY in each.metadata}


@dataclass(frozen=True)
class Section:
    """A section of a file: its title, its settings by key, and the function or class that makes its value from those
    given. `hints` has better error texts for some unknown keys."""

    title: str
    make_value: Callable[..., Any]
    settings: Mapping[str, Setting]
    required: tuple[str, ...] = ()
    hints: Mapping[str, str] = field(default_factory=dict)

    def read(self, node: Node) -> Given:
        """Return the given keys. An unknown key is an error."""
        given: Given = {}
        for key, each in self.settings.items():
            if key in self.required:
                node.require(key)
            entry = node.entries().get(key)
            if entry is None:
                continue
            if entry.value is not None or each.null == "refused":
                given[key] = each.kind.read(entry)
            elif each.null == "unlimited":
                given[key] = None
        node.check_keys(self.settings, self.hints)
        return given

    def restrict(self, given: Given) -> tuple[Given, list[Loosening]]:
        """Return the given keys that apply without the user's trust, and the loosenings they leave out."""
        kept, loosened = {}, []
        for key, value in given.items():
            each = self.settings[key]
            narrow, found = value, list[Loosening]()
            if each.trust is not None:
                narrow, found = each.trust.restrict(value, each)
            elif isinstance(each.kind, Section):
                narrow, found = each.kind.restrict(value)
            loosened += [loosening.with_prefix(key) for loosening in found]
            if narrow is not UNSET:
                kept[key] = narrow
        return kept, loosened

    def make(self, given: Given, /, **more: Any) -> Any:
        """Return the value of the section. `more` are arguments that are not settings."""
        kinds = {key: self.settings[key].kind for key in given}
        sections = {key: kind.make(given[key]) for key, kind in kinds.items() if isinstance(kind, Section)}
        return self.make_value(**{**given, **sections, **more})

    def read_value(self, node: Node, **more: Any) -> Any:
        """Read and make the value at once, without trust rules."""
        return self.make(self.read(node), **more)

    def make_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the section."""
        properties = {}
        for key, each in self.settings.items():
            about = each.kind.make_schema() if each.null == "refused" else nullable(each.kind.make_schema())
            example = each.shown_example
            about["description"] = f"{each.help} (such as {example})" if example else each.help
            properties[key] = about
        schema = {"title": self.title, "type": "object", "properties": properties, "additionalProperties": False}
        return {**schema, "required": list(self.required)} if self.required else schema

    @property
    def value_kind(self) -> Kind:
        """The kind of a key or item that holds this section as a whole: its trust rules do not apply there."""
        return Kind(self.read_value, self.make_schema)


def make_named_schema(pattern: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a mapping whose names match `pattern`."""
    return {"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": schema}


def nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema extended to allow null."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    more: dict[str, Any] = {"type": [*kinds, "null"]}
    if "enum" in schema:
        more["enum"] = [*schema["enum"], None]
    return {**schema, **more}


# Trust rules.


def _drop_value(value: Any, _: Setting) -> Restricted:
    items = value if isinstance(value, tuple) else (value,)
    return UNSET, [_make_loosening(item) for item in items]


def _drop_more(value: Any, declaration: Setting) -> Restricted:
    within = value is not None and value <= declaration.default
    return (value, []) if within else (declaration.default, [_make_loosening(value)])


def _drop_less(value: Any, declaration: Setting) -> Restricted:
    return (value, []) if value >= declaration.default else (declaration.default, [_make_loosening(value)])


def _make_loosening(value: object) -> Loosening:
    return Loosening("", "null" if value is None else str(value).removesuffix(".0"))


def trust_for(*loose: str) -> TrustRule:
    """Return the rule of a setting where only the values `loose` need trust."""
    words = ", ".join(f"`{value}`" for value in loose)
    return TrustRule(words, lambda value, each: _drop_value(value, each) if value in loose else (value, []))


def trust_none(words: str, describe: Callable[[Any], list[Loosening]]) -> TrustRule:
    """Return the rule of a setting where every value needs trust. `describe` returns its loosenings."""
    return TrustRule(words, lambda value, _: (UNSET, describe(value)))


IF_TRUE = TrustRule("`true`", lambda value, _: (UNSET, [Loosening("", "true")]) if value else (value, []))
ANY_VALUE = TrustRule("any value", _drop_value)
ANY_COMMAND = trust_none("any value", lambda value: [Loosening("", " ".join(value))] if value else [])
ABOVE_DEFAULT = TrustRule("above the default", _drop_more)
BELOW_DEFAULT = TrustRule("below the default", _drop_less)


# Kinds of values.


def choice(options: tuple[str, ...]) -> Kind:
    """Return the kind of a word from `options`."""
    return Kind(lambda node: node.choice(options), lambda: {"type": "string", "enum": list(options)})


def text_for(parse: Callable[[str], Any], pattern: str) -> Kind:
    """Return the kind of a text that `parse` turns into a value. `pattern` describes the same texts in a JSON
    schema."""
    return Kind(lambda node: node.parse(parse), lambda: {"type": "string", "pattern": pattern})


def text_like(pattern: str, what: str, *, convert: Callable[[str], str] = str) -> Kind:
    """Return the kind of a text that matches `pattern`, and is then converted. `what` names such a text in errors."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ConfigError(f"{text!r} is not {what}")
        return convert(text)

    return text_for(check, pattern)


def list_of(kind: Kind, *, what: str) -> Kind:
    """Return the kind of a list with items of `kind`."""
    return Kind(
        lambda node: tuple(kind.read(item) for item in node.items(what=what)),
        lambda: {"type": "array", "items": kind.make_schema()},
    )


def whole_from(least: int) -> Kind:
    """Return the kind of a whole number that is at least `least`."""
    return Kind(lambda node: node.integer(minimum=least), lambda: {"type": "integer", "minimum": least})


WHOLE = whole_from(0)
NUMBER = Kind(lambda node: node.number(minimum=0), lambda: {"type": "number", "minimum": 0})
COUNT = whole_from(1)
POSITIVE = Kind(lambda node: node.number(minimum=1), lambda: {"type": "number", "minimum": 1})
FLAG = Kind(Node.flag, lambda: {"type": "boolean"})
TEXT = Kind(Node.text, lambda: {"type": "string"})
WORD = Kind(Node.word, lambda: {"type": "string", "pattern": r"\S"})
TEXTS = Kind(Node.texts, lambda: {"type": "array", "items": {"type": "string"}})
