"""The keys of limits, the same in retinue.yaml and on the command line (`max_turns`, `--max-turns`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retinue.core.limits import Limits

LIMIT_KEYS = {
    "turns": "max_turns",
    "seconds": "timeout",
    "depth": "max_depth",
    "concurrent": "max_concurrent",
    "tokens": "max_tokens",
    "cost": "max_cost",
    "stall": "stall",
}


def make_limits(get: Callable[[str], Any]) -> Limits:
    """Return the limits from `get`, which returns the value of a key: UNSET if the key is not set, None for no
    limit."""
    return Limits(**{limit: get(key) for limit, key in LIMIT_KEYS.items()})
