"""Limits that travel down to the servers we start, and are narrowed there: depth, deadline, tokens and cost.

In the environment of a server, they hold for all its calls. In the `_meta` of a call, they are what is left to the
calling run. Pure. Incoming values come from a peer. They can only narrow the limits, and an invalid value counts as
nothing left, never as no limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from retinue.core.caller import NOBODY, Caller
from retinue.core.traces import baggage_of, traceparent_of
from retinue.protocol.reports import LONGEST_ID
from retinue.protocol.strict_json import MAX_DIGITS

DEPTH, DEADLINE = "RETINUE_SUBAGENT_DEPTH", "RETINUE_SUBAGENT_DEADLINE"
TOKENS, COST = "RETINUE_SUBAGENT_TOKENS", "RETINUE_SUBAGENT_COST"
TRACE, BAGGAGE = "TRACEPARENT", "BAGGAGE"
KEYS = {
    "depth": ("retinue/depth", DEPTH),
    "deadline": ("retinue/deadline", DEADLINE),
    "tokens": ("retinue/tokens", TOKENS),
    "cost": ("retinue/cost", COST),
}
TRACE_KEY, BAGGAGE_KEY = "traceparent", "baggage"
ASKER_KEY = "retinue/askerRunIDs"  # in a question: the ids of the run that asks
PARENT_KEY, ROOT_KEY = "retinue/parentRunID", "retinue/rootRunID"
_WHOLE = re.compile(rf"\d{{1,{MAX_DIGITS}}}", re.ASCII)


def make_run_id(tree: str, run: int) -> str:
    """Return the id under which a run is reported if no caller has given it an id."""
    return f"{tree}-{run}"


def to_environment(caller: Caller) -> dict[str, str]:
    found = {variable: _format_value(getattr(caller, name)) for name, (_, variable) in KEYS.items()}
    found |= {TRACE: caller.traceparent, BAGGAGE: caller.baggage}
    return {name: value for name, value in found.items() if value}


def from_environment(environ: Mapping[str, str]) -> Caller:
    found = {name: environ.get(variable) or None for name, (_, variable) in KEYS.items()}
    return _make_caller(found, traceparent=environ.get(TRACE, ""), baggage=environ.get(BAGGAGE, ""))


def read_process_limits(environ: Mapping[str, str]) -> Caller:
    """Return the limits of a whole process, without its trace, which a tree joins only on request."""
    if not any(environ.get(variable) for _, variable in KEYS.values()):
        return NOBODY
    return msgspec.structs.replace(from_environment(environ), traceparent="", baggage="")


def to_meta(caller: Caller) -> dict[str, Any]:
    """Return the limits as the `_meta` of a call. Numbers are JSON numbers; money is text, so that it stays exact."""
    found: dict[str, Any] = {}
    for name, (key, _) in KEYS.items():
        value = getattr(caller, name)
        found[key] = _format_value(value) if isinstance(value, Decimal) else value
    found |= {TRACE_KEY: caller.traceparent, BAGGAGE_KEY: caller.baggage}
    found |= {PARENT_KEY: caller.parent_id, ROOT_KEY: caller.root_id}
    return {key: value for key, value in found.items() if value not in (None, "")}


def from_meta(meta: Mapping[str, Any] | None) -> Caller:
    if not isinstance(meta, Mapping):
        return NOBODY
    found = {name: meta.get(key) for name, (key, _) in KEYS.items()}
    words = {name: _check_id(meta.get(key)) for name, key in (("parent_id", PARENT_KEY), ("root_id", ROOT_KEY))}
    trace, baggage = (text if isinstance(text := meta.get(key), str) else "" for key in (TRACE_KEY, BAGGAGE_KEY))
    return _make_caller(found, traceparent=trace, baggage=baggage, **words)


def _make_caller(found: Mapping[str, Any], *, traceparent: str, baggage: str, **words: Any) -> Caller:
    limits: dict[str, Any] = {
        name: None if found[name] is None else parse(found[name]) for name, parse in _PARSERS.items()
    }
    return Caller(**limits, traceparent=traceparent_of(traceparent), baggage=baggage_of(baggage), **words)


def _parse_whole(value: Any) -> int:
    """Return a whole number of 0 or more; 0 for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(0, value)
    return int(value) if isinstance(value, str) and _WHOLE.fullmatch(value) else 0


def _parse_number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0


def _parse_amount(value: Any) -> Decimal:
    try:
        amount = Decimal(str(value)) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except (InvalidOperation, ValueError):
        amount = None
    is_usual = amount is not None and amount.is_finite() and amount > 0 and abs(amount.adjusted()) < MAX_DIGITS
    return amount if amount is not None and is_usual else Decimal(0)


_PARSERS = {"depth": _parse_whole, "deadline": _parse_number, "tokens": _parse_whole, "cost": _parse_amount}


def _check_id(value: Any) -> str:
    return value if isinstance(value, str) and 0 < len(value) <= LONGEST_ID else ""


def _format_value(value: Any) -> str:
    return "" if value is None else f"{value:f}" if isinstance(value, Decimal | float) else str(value)
