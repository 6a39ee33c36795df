"""Validation by untrusted JSON schemas, in a bounded number of steps.

The schemas come from MCP servers and project files. References that double at each level, slow patterns, large values
and long error messages cost a bounded number of steps. A step takes about a microsecond. RE2 matches the patterns in
linear time. Patterns that RE2 cannot read, and the `unevaluated` keywords, are not checked here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sized
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import SchemaError, UnknownType, ValidationError, best_match
from jsonschema.validators import Draft202012Validator, extend, validator_for
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

CHECK_STEPS = 100_000
SCHEMA_STEPS = 3_000_000
REFERENCE_STEPS = 20  # resolving a reference takes about as long as this many other steps
PATTERN_STEPS = 100  # compiling a pattern
MATCH_STEP = 256  # characters times instructions that RE2 matches in a step, at worst
MESSAGE_STEP = 64  # characters of an error message
SIZE_STEP = 16  # members of a list or an object
UNIQUE_ITEMS = 1000
PATTERN_BYTES = 256 * 1024
ID_CHARACTERS = 2000  # of an `$id` and those around it: each reference is joined with the address that they make
TOO_COSTLY = "its schema takes too many steps to check"
UNUSABLE = "its schema cannot be used: {why}"
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_COMPARED = frozenset({"const", "dependencies", "dependentRequired", "enum"})  # their whole values are looked through
_IDS = ("$id", "id")
_NEVER = "retinue/never"  # our keyword for a schema that is False: jsonschema takes no step for its message
_NOTHING = {_NEVER: True}
_LEFT: ContextVar[Steps] = ContextVar("steps left")

Keyword = Callable[[Any, Any, Any, dict[str, Any]], Iterator[ValidationError] | None]


class SchemaTooCostly(ValueError):
    """A check used up its steps."""

    def __init__(self, why: str = TOO_COSTLY) -> None:
        super().__init__(why)


class SchemaUnusable(ValueError):
    """A check cannot follow a schema, for example because a reference leads nowhere."""


class Steps:
    """A number of steps, which several checks may share."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, steps: int) -> None:
        """Take steps. Raises SchemaTooCostly if too few are left."""
        self.left -= steps
        if self.left < 0:
            raise SchemaTooCostly


class BoundedSchema:
    """A JSON schema. Raises SchemaError for an invalid `schema`, SchemaUnusable for one with invalid addresses, and
    SchemaTooCostly if the check of the schema takes too many steps. It takes them from `steps`, too, if given."""

    def __init__(self, schema: dict[str, Any], steps: Steps | None = None) -> None:
        own = Steps(SCHEMA_STEPS if steps is None else max(0, min(SCHEMA_STEPS, steps.left)))
        given = own.left
        try:
            own.take(_measure_schema(schema))
            kind = _find_kind(schema)
            error = _find_error(_make_validator(kind, kind.META_SCHEMA), schema, own)
            if error is not None:
                raise SchemaError.create_from(error)
            self._validator = _make_validator(kind, schema)
        finally:
            if steps is not None:
                steps.left -= given - max(0, own.left)

    def find_error(self, value: Any, steps: Steps | None = None) -> ValidationError | None:
        """Return the error in a value, or None if the value is valid. Raises SchemaTooCostly and SchemaUnusable."""
        return _find_error(self._validator, value, steps or Steps(CHECK_STEPS))

    def find_part_error(self, part: dict[str, Any], value: Any, steps: Steps | None = None) -> ValidationError | None:
        """Return the error in a value according to `part`, a part of this schema. Return None if the value is valid."""
        return _find_error(self._validator, value, steps or Steps(CHECK_STEPS), part)


def _find_error(validator: Any, value: Any, steps: Steps, part: dict[str, Any] | None = None) -> ValidationError | None:
    token = _LEFT.set(steps)
    try:
        used = validator if part is None else validator.evolve(schema=part)
        found: ValidationError | None = best_match(used.iter_errors(value))
    except SchemaTooCostly:
        raise
    except RecursionError:
        raise SchemaTooCostly from None
    except Unresolvable as error:
        raise SchemaUnusable(UNUSABLE.format(why=error)) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, UnknownType, ValueError) as error:
        # A reference may lead to a part that no check of the schema has seen.
        raise SchemaUnusable(UNUSABLE.format(why=type(error).__name__)) from None
    finally:
        _LEFT.reset(token)
    return found


def _find_kind(schema: dict[str, Any]) -> Any:
    """Return the validator class for the dialect that a schema names in `$schema`."""
    try:
        return _bound_keywords(validator_for(schema, default=Draft202012Validator))
    except (AttributeError, TypeError, ValueError):
        raise SchemaUnusable(UNUSABLE.format(why="'$schema' is not an address")) from None


def _make_validator(kind: Any, schema: Any) -> Any:
    """Return a validator whose references find an anchor or an `$id` without a search through the schema each time."""
    resource = specification_with(kind.ID_OF(kind.META_SCHEMA)).create_resource(schema)
    try:
        address = resource.id() or ""
        registry = REGISTRY.with_resource(address, resource).crawl()
    except (AttributeError, TypeError, ValueError):
        raise SchemaUnusable(UNUSABLE.format(why="'$id' is not an address")) from None
    return kind(schema, registry=Registry(), _resolver=registry.resolver(base_uri=address))


def _measure_schema(schema: Any) -> int:
    """Return the number of values in a schema and of characters in the addresses of its parts. Raises SchemaTooCostly
    for a schema with a long address."""
    count = 0
    waiting = [(schema, 0)]
    while waiting:
        value, address = waiting.pop()
        count += 1
        if isinstance(value, dict):
            if own := sum(len(value[name]) for name in _IDS if isinstance(value.get(name), str)):
                address += own
                count += address
            waiting += [(each, address) for each in value.values()]
        elif isinstance(value, list):
            waiting += [(each, address) for each in value]
        if address > ID_CHARACTERS:
            raise SchemaTooCostly
    return count


@lru_cache(16)
def _bound_keywords(kind: Any) -> Any:
    """Return a validator class like `kind` in which every keyword and every part of a schema costs steps."""
    ours: dict[str, Keyword] = {
        "additionalProperties": _limit_additional(kind.VALIDATORS["additionalProperties"]),
        "pattern": _check_pattern,
        "patternProperties": _check_pattern_properties,
        "unevaluatedItems": _accept_anything,
        "unevaluatedProperties": _accept_anything,
        "uniqueItems": _check_unique,
    }
    ours = {name: check for name, check in ours.items() if name in kind.VALIDATORS}
    keywords = {**kind.VALIDATORS, **ours, _NEVER: _refuse_anything}
    bounded: Any = extend(kind, {name: _count_steps(name, check) for name, check in keywords.items()})  # type: ignore[no-untyped-call]
    evolve, descend = bounded.evolve, bounded.descend

    def evolve_bounded(validator: Any, **changes: Any) -> Any:
        schema = changes.get("schema", validator.schema)
        if schema is False:
            changes["schema"] = _NOTHING
        has_address = isinstance(schema, dict) and any(name in schema for name in _IDS)
        _LEFT.get().take(1 + _measure_value(schema) // SIZE_STEP + (REFERENCE_STEPS if has_address else 0))
        made = evolve(validator, **changes)
        kind: Any = type(made)
        if kind is bounded:
            return made
        other = _bound_keywords(kind)  # `$schema` in a part names another class, which has no bounds
        return other(made.schema, registry=Registry(), _resolver=made._resolver)

    def descend_bounded(validator: Any, instance: Any, schema: Any, *args: Any, **more: Any) -> Iterator[Any]:
        found: Iterator[Any] = descend(validator, instance, _NOTHING if schema is False else schema, *args, **more)
        return found

    bounded.evolve, bounded.descend = evolve_bounded, descend_bounded
    return bounded


def _count_steps(name: str, check: Keyword) -> Keyword:
    def run(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
        steps = 1 + (_measure_value(value) + _measure_value(instance)) // SIZE_STEP
        if name in _REFERENCES:
            steps += REFERENCE_STEPS + len(value) // SIZE_STEP
        elif name in _COMPARED:
            steps += _count_values(value) // 2
        _LEFT.get().take(steps)
        return _count_errors(check(validator, value, instance, schema) or (), _measure_value(schema.get("type")))

    return run


def _count_errors(errors: Iterator[ValidationError] | tuple[()], types: int) -> Iterator[ValidationError]:
    """Pass errors on, each for a step at each level. `types` is the number of types that `best_match` looks through."""
    for error in errors:
        length = 0 if error.schema_path else len(error.message)  # the path is empty where the message was made
        _LEFT.get().take(1 + types + length // MESSAGE_STEP)
        yield error


def _measure_value(value: Any) -> int:
    return len(value) if isinstance(value, Sized) and not isinstance(value, str) else 0


def _count_values(value: Any) -> int:
    """Return the number of values in a value, including itself."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count_values, members))


def _accept_anything(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> None:
    """Accept any value, for a keyword that is not checked here."""


def _refuse_anything(validator: Any, value: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
    yield ValidationError(f"False schema does not allow {instance!r}")


def _check_pattern(validator: Any, pattern: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
    if not isinstance(instance, str):
        return
    regex = _compile_pattern(pattern)
    if regex is not None and not _is_found(regex, instance):
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
        if not isinstance(instance, dict):
            return None
        named, patterns = schema.get("properties"), schema.get("patternProperties")
        regexes = [_compile_pattern(pattern) for pattern in patterns] if isinstance(patterns, dict) else []
        if None in regexes:
            return None
        known = named if isinstance(named, dict) else {}
        extras = {
            name: value
            for name, value in instance.items()
            if name not in known and not any(_is_found(regex, name) for regex in regexes)
        }
        return check(validator, about, extras, {})

    return run


def _check_unique(validator: Any, wanted: Any, instance: Any, schema: dict[str, Any]) -> Iterator[ValidationError]:
    if wanted is not True or not isinstance(instance, list) or len(instance) > UNIQUE_ITEMS:
        return
    _LEFT.get().take(_count_values(instance))
    if len({json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
        yield ValidationError(f"{instance!r} has non-unique elements")


@lru_cache(256)
def _compile_pattern(pattern: Any) -> Any:
    """Compile a pattern with RE2, which matches in linear time. Return None for a pattern that RE2 does not support."""
    re2 = importlib.import_module("re2")  # re2 has no type hints
    options = re2.Options()
    options.log_errors = False
    options.max_mem = PATTERN_BYTES
    _LEFT.get().take(PATTERN_STEPS + len(str(pattern)) // SIZE_STEP)
    with suppress(re2.error, UnicodeEncodeError, TypeError):
        regex = re2.compile(pattern, options)
        _LEFT.get().take(regex.programsize // SIZE_STEP)
        return regex
    return None


def _is_found(regex: Any, text: str) -> bool:
    """Return True if a pattern occurs in a text, or if the text cannot be encoded."""
    _LEFT.get().take(1 + len(text) * regex.programsize // MATCH_STEP)
    try:
        return regex.search(text) is not None
    except UnicodeEncodeError:
        return True
