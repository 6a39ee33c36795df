"""The arguments of a tool call: reading one of the right type, and showing model text to a person safely."""

from __future__ import annotations

import re
from typing import Final, TypeVar, cast

from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.protocol.subagent_tools import ID_FIELDS, TOOLS, check_arguments

T = TypeVar("T")

SHOWN_CHARACTERS = 200
ANSWER = "final_answer"
PROFILE_PREFIX = "subagent_"
OTHER_SPELLINGS = dict.fromkeys(("read", "write", "edit"), ("file_path",))
_REQUIRED: Final = object()
_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_HIDING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def read_argument(call: Call, name: str, kind: type[T], default: T | object = _REQUIRED, *, alias: str = "") -> T:
    """Return one argument of a call; ToolError if it is missing or of another type. Null counts as missing."""
    value = call.args.get(name)
    if value is None and alias:
        value = call.args.get(alias)
    if value is None:
        if default is _REQUIRED:
            raise ToolError(f"{call.name}: missing '{name}'")
        return default  # type: ignore[return-value] # not _REQUIRED, so a T
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return cast("T", value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ToolError(f"{call.name}: '{name}' must be {_KINDS[kind]}, got {type(value).__name__}")
    return value


def find_unknown_argument(call: Call, spec: ToolSpec) -> str:
    """Return what is wrong with a call that has an argument which its tool does not know; empty for any other call.

    The tools of MCP servers, and the answer whose schema the user gave, are checked by whoever made the schema."""
    if spec.server or spec.name == ANSWER or not isinstance(known := spec.schema.get("properties"), dict):
        return ""
    for name in call.args:
        if name not in known:
            break
    else:
        return ""
    if spec.name.startswith(PROFILE_PREFIX) and not isinstance(call.args.get("task"), str):
        return ""  # the tool says that in its own words
    also = ID_FIELDS if spec.name in TOOLS else OTHER_SPELLINGS.get(spec.name, ())
    try:
        check_arguments(spec.name, call.args, tuple(known), also=also)
    except ToolError as error:
        return str(error)
    return ""


def quote_text(raw: object) -> str:
    """Return a path or another text for a message: quoted, on one line, of bounded length."""
    text = str(raw)
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:150]}...{text[-40:]}")


def reveal_text(text: str) -> str:
    """Return text for a person who has to judge it: characters that move a cursor or hide are spelled out."""
    return _HIDING.sub(lambda found: ascii(found[0])[1:-1], text)
