"""Values that can be stored in a log and sent to a model. The values of models, tools and people are checked on entry.

A log and a provider take UTF-8 and JSON. A lone surrogate is not a character, NaN and Infinity are not JSON, and
encoders refuse deep values and long integers. Text is repaired. A tool call that cannot be stored is refused, and its
model reads why, because a repaired argument would no longer be the one the model asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from retinue.core.messages import Call, ProviderToolCall, Reply
from retinue.core.usage import repair_usage

INVALID = "INVALID_JSON"
DEEPEST = 100
_KEPT_CHARACTERS = 2000
_INTEGERS = range(-(2**63), 2**64)
_SEQUENCES = (list, tuple)  # `list | tuple` would be built for each value
_REFUSED = "The arguments of {name} cannot be used: {why}. Nothing was run; make the call again without that."


def repair_text(text: str) -> str:
    """Return the text with every lone surrogate replaced by a question mark."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def is_text(text: str) -> bool:
    """Return True if the text has no lone surrogates. Bytes of a command line that are not UTF-8 become such
    surrogates."""
    return repair_text(text) is text


def find_problem(value: Any, levels: int = DEEPEST) -> str:
    """Return why a JSON value cannot be stored or sent; empty if it can. `levels` is the maximum nesting depth."""
    if isinstance(value, dict):
        inner: Sequence[Any] = [*value, *value.values()]
    elif isinstance(value, _SEQUENCES):
        inner = value
    else:
        return _find_scalar_problem(value)
    if inner and not levels:
        return f"they are nested more than {DEEPEST} levels deep"
    for each in inner:
        if isinstance(each, str) and each.isascii():
            continue
        if why := find_problem(each, levels - 1):
            return why
    return ""


def _find_scalar_problem(value: Any) -> str:
    if isinstance(value, str):
        return "" if is_text(value) else "a text in them has half of a surrogate pair, which is not a character"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN and Infinity are not JSON"
    if isinstance(value, int) and value not in _INTEGERS:
        return "a whole number in them is longer than 64 bits"
    return ""


def repair_reply(reply: Reply) -> Reply:
    """Return the reply of a model with texts and counts that can be stored. Each call that cannot be stored gets a
    `problem`."""
    usage = repair_usage(reply.usage)
    if usage is not reply.usage:
        reply = structs.replace(reply, usage=usage)
    if not reply.text.isascii():
        reply = structs.replace(reply, text=repair_text(reply.text))
    for call in reply.calls:
        if not _is_plain(call):
            reply = structs.replace(reply, calls=tuple([_check_call(each) for each in reply.calls]))
            break
    if reply.thoughts:
        thoughts = tuple([structs.replace(each, text=repair_text(each.text)) for each in reply.thoughts])
        reply = structs.replace(reply, thoughts=thoughts)
    if reply.natives:
        reply = structs.replace(reply, natives=tuple([_repair_native(each) for each in reply.natives]))
    return reply


def _repair_native(native: ProviderToolCall) -> ProviderToolCall:
    result = repair_text(native.result)
    if find_problem((native.args, native.content)):
        return structs.replace(native, args={}, result=result, content=None)
    return structs.replace(native, result=result)


def _is_plain(call: Call) -> bool:
    """Return True if the call has nothing but ASCII texts, as most have; nothing can be wrong with them."""
    for name, value in call.args.items():
        if type(value) is not str or not value.isascii() or type(name) is not str or not name.isascii():
            return False
    return call.name.isascii() and call.id.isascii()


def _check_call(call: Call) -> Call:
    """Return the call with its names repaired, and with a `problem` if its arguments cannot be stored."""
    why = find_problem(call.args)
    name, call_id = repair_text(call.name), repair_text(call.id)
    if not why:
        return call if name is call.name and call_id is call.id else structs.replace(call, name=name, id=call_id)
    kept = call.args.get(INVALID)
    text = repair_text(kept[:_KEPT_CHARACTERS]) if isinstance(kept, str) else why
    problem = repair_text(call.problem) or _REFUSED.format(name=name, why=why)
    return structs.replace(call, name=name, id=call_id, args={INVALID: text}, problem=problem)
