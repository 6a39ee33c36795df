"""The arguments of a tool call: typed access for tools, and safe display of a model's text to a person."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar, cast

from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.results import FINAL_ANSWER
from retinue.core.unseen import reveal_text
from retinue.protocol.subagent_tools import ID_FIELDS, TOOLS, check_arguments

T = TypeVar("T")

SHOWN_CHARACTERS = 200
PROFILE_PREFIX = "subagent_"
OTHER_SPELLINGS = dict.fromkeys(("read", "write", "edit"), ("file_path",))
_REQUIRED: Final = object()
_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def read_argument(call: Call, name: str, kind: type[T], default: T | object = _REQUIRED, *, alias: str = "") -> T:
    """Return one argument of a call, or `default` if it is missing. Null counts as missing.

    Raises ToolError if a required argument is missing, the type is wrong, or the argument is given under both `name`
    and `alias`: an approval would then show one value and the call use the other."""
    value = call.args.get(name)
    if alias and (other := call.args.get(alias)) is not None:
        if value is not None:
            raise ToolError(f"{call.name}: '{name}' and '{alias}' are the same: give only one")
        value = other
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
    """Return an error text if a call has an argument that its tool does not know, else "".

    Tools of MCP servers and `final_answer` are not checked here: they check calls against their own schemas."""
    known = spec.schema.get("properties")
    if isinstance(known, dict):
        for name in call.args:
            if name not in known:
                return _check_spellings(call, spec, known)
    return ""


def _check_spellings(call: Call, spec: ToolSpec, known: Iterable[str]) -> str:
    """Return an error text if a call has an argument that is no other spelling of an argument in `known`, else ""."""
    if spec.server or spec.name == FINAL_ANSWER:
        return ""
    if spec.name.startswith(PROFILE_PREFIX) and not isinstance(call.args.get("task"), str):
        return ""  # the tool itself reports the missing task
    also = ID_FIELDS if spec.name in TOOLS else OTHER_SPELLINGS.get(spec.name, ())
    try:
        check_arguments(spec.name, call.args, tuple(known), also=also)
    except ToolError as error:
        return str(error)
    return ""


def quote_text(raw: object) -> str:
    """Return a path or another text for a message: quoted, on one line, and of bounded length."""
    text = str(raw)
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:150]}...{text[-40:]}")


def show_arguments(args: Mapping[str, Any], *names: str) -> str:
    """Return the arguments for a person who decides on the call. The values of `names` come first, without their
    names, then all other arguments with their names. Nothing that the call does is left out."""
    main = [str(args[name]) for name in names if args.get(name)]
    others = [f"{name}: {_encode(value)}" for name, value in args.items() if name not in names and value is not None]
    return reveal_text("\n\n".join(main) + "\n" * bool(main and others) + "\n".join(others))


def _encode(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "(nested too deeply to show)"
