"""Validation by untrusted JSON schemas, in a bounded number of steps.

The schemas come from MCP servers and project files. References that double at each level, slow patterns and large
values cost a bounded number of steps. RE2 matches the patterns in linear time. Patterns that RE2 cannot read, and the
`unevaluated` keywords, are not checked here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry

CHECK_STEPS = 50_000
SCHEMA_STEPS = 1_000_000
REFERENCE_STEPS = 20  # resolving a reference takes about as long as this many other steps
UNIQUE_ITEMS = 1000
PATTERN_BYTES = 1024 * 1024
TOO_COSTLY = "its schema takes too many steps to check"
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_LEFT: ContextVar[list[int]] = ContextVar("steps left")

Keyword = Callable[[Any, Any, Any, dict[str, Any]], Iterator[ValidationError] | None]


class SchemaTooCostly(ValueError):
    """A check used up its steps."""

    def __init__(self) -> None:
        super().__init__(TOO_COSTLY)


class BoundedSchema:
    """A JSON schema. Raises SchemaError for an invalid `schema`, SchemaTooCostly if the check takes too many steps."""

    def __init__(self, schema: dict[str, Any]) -> None:
        kind = validator_for(schema)
        meta = _bound_keywords(validator_for(kind.META_SCHEMA))(kind.META_SCHEMA)
        error = _find_error(meta, schema, SCHEMA_STEPS)
        if error is not None:
            raise SchemaError.create_from(error)
        self._validator = _bound_keywords(kind)(schema, registry=Registry())

    def find_error(self, value: Any) -> ValidationError | None:
        """Return the error in a value, or None if the value is valid.

        Raises SchemaTooCostly, and `Unresolvable` or RecursionError if the schema's references cannot be followed."""
        return _find_error(self._validator, value, CHECK_STEPS)

    def find_part_error(self, part: dict[str, Any], value: Any) -> ValidationError | None:
        """Return the error in a value according to `part`, a part of this schema. Return None if the value is valid."""
        return _find_error(self._validator.evolve(schema=part), value, CHECK_STEPS)


def _find_error(validator: Any, value: Any, steps: int) -> ValidationError | None:
    token = _LEFT.set([steps])
    try:
        found: ValidationError | None = best_match(validator.iter_errors(value))
    finally:
        _LEFT.reset(token)
    return found


@lru_cache(16)
def _bound_keywords(kind: Any) -> Any:
    """Return a validator class like `kind` in which every keyword costs steps."""
    ours: dict[str, Keyword] = {
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "unevaluatedItems": _accept_anything,
        "unevaluatedProperties": _accept_anything,
    }
    keywords = {**kind.VALIDATORS, **{name: check for name, check in ours.items() if name in kind.VALIDATORS}}
    for name, limit in (("additionalProperties", _limit_additional), ("uniqueItems", _limit_unique)):
        if name in keywords:
            keywords[name] = limit(keywords[name])
    counted = {
        name: _count_steps(check, REFERENCE_STEPS if name in _REFERENCES else 1) for name, check in keywords.items()
    }
    return extend(kind, counted)  # type: ignore[no-untyped-call]


def _count_steps(check: Keyword, steps: int) -> Keyword:
    def run(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError] | None:
        left = _LEFT.get()
        left[0] -= steps + (_measure_value(value) + _measure_value(instance)) // 16
        if left[0] < 0:
            raise SchemaTooCostly
        return check(validator, value, instance, schema)

    return run


def _measure_value(value: Any) -> int:
    return len(value) if isinstance(value, Sized) and not isinstance(value, str) else 0


def _accept_anything(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> None:
    """Accept any value, for a keyword that is not checked here."""


def _check_pattern(validator: Any, pattern: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
    regex = _compile_pattern(pattern)
    if isinstance(instance, str) and regex is not None and not _is_found(regex, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _check_pattern_properties(
    validator: Any, patterns: Any, instance: Any, schema: dict[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict) or not isinstance(patterns, dict):
        return
    for pattern, about in patterns.items():
        regex = _compile_pattern(pattern)
        for name in instance if regex is not None else ():
            if _is_found(regex, name):
                yield from validator.descend(instance[name], about, path=name, schema_path=pattern)


def _limit_additional(check: Keyword) -> Keyword:
    def run(validator: Any, about: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError] | None:
        patterns = schema.get("patternProperties")
        if not patterns or not isinstance(instance, dict):
            return check(validator, about, instance, schema)
        found = [_compile_pattern(pattern) for pattern in patterns]
        if None in found:
            return None
        extras = {name: value for name, value in instance.items() if not any(_is_found(regex, name) for regex in found)}
        return check(validator, about, extras, {**schema, "patternProperties": {}})

    return run


def _limit_unique(check: Keyword) -> Keyword:
    def run(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError] | None:
        return check(validator, value, instance, schema) if _measure_value(instance) <= UNIQUE_ITEMS else None

    return run


@lru_cache(256)
def _compile_pattern(pattern: Any) -> Any:
    """Compile a pattern with RE2, which matches in linear time. Return None for a pattern that RE2 does not support."""
    re2 = importlib.import_module("re2")  # re2 has no type hints
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PATTERN_BYTES
    with suppress(re2.error, UnicodeEncodeError, TypeError):
        return re2.compile(pattern, options)
    return None


def _is_found(regex: Any, text: str) -> bool:
    """Return True if a pattern occurs in a text, or if the text cannot be encoded."""
    try:
        return regex.search(text) is not None
    except UnicodeEncodeError:
        return True
