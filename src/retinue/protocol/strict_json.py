"""Strict JSON bodies: typos, duplicate keys, endless nesting and broken characters are errors that name the problem.

Does no I/O. Used for data from other processes, such as control requests and reports.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, TypeVar

import msgspec

from retinue.core.events import decode_raw, replace_half_characters

MAX_DEPTH = 100
MAX_DIGITS = 18
MAX_NAME = 200
T = TypeVar("T")
_ENCODER = msgspec.json.Encoder(enc_hook=str)


class InvalidBody(ValueError):
    """A body that does not have the expected shape; the text says why."""


def encode_body(value: Any) -> bytes:
    """Encode a value as JSON. A lone surrogate becomes `?`. A value of a type unknown to JSON becomes its `str`."""
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        return _ENCODER.encode(replace_half_characters(msgspec.to_builtins(value, enc_hook=_to_plain)))


def _to_plain(value: Any) -> Any:
    return decode_raw(value) if isinstance(value, msgspec.Raw) else str(value)


def decode_body(body: bytes, shape: type[T]) -> T:
    """Decode a body as `shape`. Raises InvalidBody and nothing else."""
    try:
        text = body.decode()
        value = json.loads(
            text,
            object_pairs_hook=_make_object,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
            parse_float=_parse_float,
        )
        if "\\" in text:  # a lone surrogate can only appear as an escape
            json.dumps(value, ensure_ascii=False).encode()
        _check_depth(value, MAX_DEPTH)
        return msgspec.convert(value, shape)
    except InvalidBody:
        raise
    except RecursionError:
        raise InvalidBody("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidBody("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise InvalidBody("the body holds half of a character") from None
    except json.JSONDecodeError as error:
        raise InvalidBody(f"the body is not JSON: {error}") from None
    except msgspec.ValidationError as error:
        raise InvalidBody(str(error)) from None


def refuse_repeated_keys(body: bytes) -> None:
    """Raise InvalidBody if an object in `body`, which is known to be JSON, has a key twice."""
    json.loads(body, object_pairs_hook=_make_object, parse_int=str)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidBody(f"the key {name[:MAX_NAME]!r} is given twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidBody(f"{name} is not JSON")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise InvalidBody(f"a number has more than {MAX_DIGITS} digits")
    return int(digits)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InvalidBody(f"the number {text[:MAX_NAME]} is too large")
    return number


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise InvalidBody("the body is nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, left - 1)
