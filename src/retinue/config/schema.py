"""Declarations of settings: each key once, with its kind, default, help, example and trust rule.

A section of a file is a frozen dataclass whose fields are made by `setting`. These declarations are used to read a
file strictly (`read_section`), describe it as a JSON schema (`section_schema`), apply trust rules (`restrict_section`)
and generate docs/settings.md. This module knows no particular setting and reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from msgspec import UNSET

from retinue.config.located import Node
from retinue.core.errors import ConfigError

DRAFT = "http://json-schema.org/draft-07/schema#"
_KEY = "retinue.setting"
_SAME = object()
T = TypeVar("T")

Null = Literal["unset", "unlimited", "refused"]
Restrict = Callable[[Any, "Setting"], tuple[Any, "list[Loosening]"]]


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


@dataclass(frozen=True)
class TrustRule:
    """A rule for values that loosen the restrictions of agents. `words` describe those values.

    `restrict` returns the value that applies without the user's trust, and the loosenings it removed. The key of a
    loosening is "" for the setting itself, else a key below it.
    """

    words: str
    restrict: Restrict


@dataclass(frozen=True)
class Kind:
    """A kind of value: its reader and its JSON schema. `section` is the dataclass of a section."""

    read: Callable[[Node], Any]
    schema: Mapping[str, Any]
    section: type | None = None


@dataclass(frozen=True)
class Setting:
    """The declaration of one key.

    `default` applies if nobody sets the key. `unset` is the field's value in this case, if different (an unset limit
    can still come from a profile). `null` says how to treat null: like a missing key, as no limit, or as an error.
    `example` is a value as YAML on one line. `trust` is the rule for values that loosen the restrictions of agents;
    without a rule every value applies.
    """

    name: str
    kind: Kind
    help: str
    default: Any
    unset: Any
    example: str
    null: Null
    trust: TrustRule | None


def setting(
    kind: Kind,
    help: str,
    *,
    default: Any = None,
    unset: Any = _SAME,
    example: str | None = None,
    null: Null = "unset",
    trust: TrustRule | None = None,
) -> Any:
    """Declare one key as a field of a section's dataclass. The field's name is the key. The default example is the
    default."""
    unset = default if unset is _SAME else unset
    example = format_default(default) if example is None else example
    declaration = Setting(
        name="", kind=kind, help=help, default=default, unset=unset, example=example, null=null, trust=trust
    )
    metadata = {_KEY: declaration}
    if isinstance(unset, dict):
        return field(default_factory=lambda: unset, metadata=metadata)
    return field(default=unset, metadata=metadata)


def limit(kind: Kind, help: str, *, default: Any = None, example: str | None = None, null: Null = "unlimited") -> Any:
    """Declare the key of a limit. Its field is UNSET unless given, because the limit can still come from a profile or
    an option. A value above the default needs trust."""
    trust = None if default is None else ABOVE_DEFAULT
    return setting(kind, help, default=default, unset=UNSET, example=example, null=null, trust=trust)


def format_default(value: object) -> str:
    """Return a default as YAML, or an empty text for an empty default."""
    if value is None or value in ((), {}, ""):
        return ""
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")


def section(cls: type[T], help: str, *, example: str = "") -> Any:
    """Declare one key that holds a section. A missing section has all its defaults."""
    kind = Kind(lambda node: read_section(cls, node), section_schema(cls), cls)
    return setting(kind, help, default=cls(), example=example, trust=TrustRule("", restrict_section))


def list_settings(cls: type) -> tuple[Setting, ...]:
    """Return the declarations of a section's keys, in order."""
    found = [(each.name, each.metadata.get(_KEY)) for each in fields(cls)]
    return tuple(replace(declaration, name=name) for name, declaration in found if declaration is not None)


def read_section(cls: type[T], node: Node, **more: Any) -> T:
    """Read a section strictly: an unknown key is an error. `more` are fields that are not settings."""
    settings, values = list_settings(cls), {}
    for each in settings:
        entry = node.entries().get(each.name)
        if entry is None:
            continue
        if entry.value is not None or each.null == "refused":
            values[each.name] = each.kind.read(entry)
        elif each.null == "unlimited":
            values[each.name] = None
    node.check_keys((each.name for each in settings), getattr(cls, "hints", None))
    return cls(**values, **more)


def section_schema(cls: type) -> dict[str, Any]:
    """Return the JSON schema of a section."""
    properties = {}
    for each in list_settings(cls):
        about = dict(each.kind.schema if each.null == "refused" else nullable(each.kind.schema))
        about["description"] = f"{each.help} (such as {each.example})" if each.example else each.help
        properties[each.name] = about
    title = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
    return {"title": title, "type": "object", "properties": properties, "additionalProperties": False}


def nullable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema extended to allow null."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    more: dict[str, Any] = {"type": [*kinds, "null"]}
    if "enum" in schema:
        more["enum"] = [*schema["enum"], None]
    return {**schema, **more}


# Trust rules.


def restrict_section(values: Any, _: Setting | None = None) -> tuple[Any, list[Loosening]]:
    """Apply the trust rules of a section's keys."""
    changes, loosened = {}, []
    for each in list_settings(type(values)):
        value = getattr(values, each.name)
        if each.trust is None or value is each.unset:
            continue
        changes[each.name], found = each.trust.restrict(value, each)
        loosened += [loosening.with_prefix(each.name) for loosening in found]
    return replace(values, **changes), loosened


def _drop_value(value: Any, declaration: Setting) -> tuple[Any, list[Loosening]]:
    items = value if isinstance(value, tuple) else (value,)
    return declaration.unset, [_make_loosening(item) for item in items]


def _drop_more(value: Any, declaration: Setting) -> tuple[Any, list[Loosening]]:
    within = value is not None and value <= declaration.default
    return (value, []) if within else (declaration.default, [_make_loosening(value)])


def _drop_less(value: Any, declaration: Setting) -> tuple[Any, list[Loosening]]:
    return (value, []) if value >= declaration.default else (declaration.default, [_make_loosening(value)])


def _make_loosening(value: object) -> Loosening:
    return Loosening("", "null" if value is None else str(value).removesuffix(".0"))


def trust_for(*loose: str) -> TrustRule:
    """Return the rule of a setting where only the values `loose` need trust."""
    words = ", ".join(f"`{value}`" for value in loose)
    return TrustRule(words, lambda value, each: _drop_value(value, each) if value in loose else (value, []))


IF_TRUE = TrustRule("`true`", lambda value, _: (False, [Loosening("", "true")] if value else []))
ANY_VALUE = TrustRule("any value", _drop_value)
ANY_COMMAND = TrustRule("any value", lambda value, _: ((), [Loosening("", " ".join(value))]))
ABOVE_DEFAULT = TrustRule("above the default", _drop_more)
BELOW_DEFAULT = TrustRule("below the default", _drop_less)


# Kinds of values.


def choice(options: tuple[str, ...]) -> Kind:
    """Return the kind of a word from `options`."""
    return Kind(lambda node: node.choice(options), {"type": "string", "enum": list(options)})


def text_for(parse: Callable[[str], Any], pattern: str) -> Kind:
    """Return the kind of a text that `parse` turns into a value. `pattern` describes the same texts in a JSON
    schema."""
    return Kind(lambda node: node.parse(parse), {"type": "string", "pattern": pattern})


def text_like(pattern: str, what: str) -> Kind:
    """Return the kind of a text that matches `pattern`. `what` names such a text in errors."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ConfigError(f"{text!r} is not {what}")
        return text

    return text_for(check, pattern)


def list_of(kind: Kind, *, what: str) -> Kind:
    """Return the kind of a list with items of `kind`."""
    return Kind(
        lambda node: tuple(kind.read(item) for item in node.items(what=what)), {"type": "array", "items": kind.schema}
    )


def whole_from(least: int) -> Kind:
    """Return the kind of a whole number that is at least `least`."""
    return Kind(lambda node: node.integer(minimum=least), {"type": "integer", "minimum": least})


WHOLE = whole_from(0)
NUMBER = Kind(lambda node: node.number(minimum=0), {"type": "number", "minimum": 0})
COUNT = whole_from(1)
POSITIVE = Kind(lambda node: node.number(minimum=1), {"type": "number", "minimum": 1})
FLAG = Kind(Node.flag, {"type": "boolean"})
TEXT = Kind(Node.text, {"type": "string"})
WORD = Kind(Node.word, {"type": "string", "pattern": r"\S"})
TEXTS = Kind(Node.texts, {"type": "array", "items": {"type": "string"}})
