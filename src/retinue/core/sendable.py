"""Values that can be stored in a log and sent to a model: what models, tools and people say is checked where it enters.

A log and a provider take UTF-8 and JSON. Half of a surrogate pair is no character, NaN and Infinity are no JSON, and
encoders refuse deep values and long integers. Text is repaired; a tool call that cannot be stored is refused, and its
model reads why, because a repaired argument would no longer be what the model asked for.
"""

from __future__ import annotations

import math
from typing import Any

from msgspec import structs

from retinue.core.messages import Call, Reply

INVALID = "INVALID_JSON"
DEEPEST = 100
_KEPT_CHARACTERS = 2000
_INTEGERS = range(-(2**63), 2**64)
_REFUSED = "The arguments of {name} cannot be used: {why}. Nothing was run; make the call again without that."


def repair_text(text: str) -> str:
    """Return the text with every half of a surrogate pair replaced by a question mark."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def find_problem(value: Any) -> str:
    """Return why a JSON value cannot be stored or sent; empty if it can be."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inner += (*each, *each.values())
            elif isinstance(each, list | tuple):
                inner += each
            elif why := _find_scalar_problem(each):
                return why
        if not inner:
            return ""
        level = inner
    return f"they are nested more than {DEEPEST} levels deep"


def _find_scalar_problem(value: Any) -> str:
    if isinstance(value, str):
        return (
            "" if repair_text(value) is value else "a text in them has half of a surrogate pair, which is no character"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN and Infinity are not JSON"
    if isinstance(value, int) and value not in _INTEGERS:
        return "a whole number in them is longer than 64 bits"
    return ""


def repair_reply(reply: Reply) -> Reply:
    """Return the reply of a model with texts that can be stored, and a problem in each call that cannot be."""
    text = repair_text(reply.text)
    calls = tuple([_check_call(call) for call in reply.calls])
    thoughts = tuple([structs.replace(each, text=repair_text(each.text)) for each in reply.thoughts])
    natives = tuple(
        [
            structs.replace(each, args={}, result=repair_text(each.result), content=None)
            if find_problem((each.args, each.content))
            else structs.replace(each, result=repair_text(each.result))
            for each in reply.natives
        ]
    )
    return structs.replace(reply, text=text, calls=calls, thoughts=thoughts, natives=natives)


def _check_call(call: Call) -> Call:
    name, call_id = repair_text(call.name), repair_text(call.id)
    why = find_problem(call.args)
    if not why:
        return call if (name, call_id) == (call.name, call.id) else structs.replace(call, name=name, id=call_id)
    kept = call.args.get(INVALID)
    text = repair_text(kept[:_KEPT_CHARACTERS]) if isinstance(kept, str) else why
    problem = repair_text(call.problem) or _REFUSED.format(name=name, why=why)
    return structs.replace(call, name=name, id=call_id, args={INVALID: text}, problem=problem)
