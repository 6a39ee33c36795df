"""How long a spawned run may take. What a person sets is exact; what a model asks for is kept within bounds."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from retinue.core.limits import MODEL_ASKED_SECONDS, SPAWNED_SECONDS, Limits, clamp_asked
from retinue.core.ports import Order


class Timeouts(msgspec.Struct, frozen=True):
    """Seconds for spawned runs: the default, and the bounds of what a model may ask for."""

    default: float = SPAWNED_SECONDS
    minimum: float = MODEL_ASKED_SECONDS[0]
    maximum: float = MODEL_ASKED_SECONDS[1]


def child_seconds(order: Order, limits: Limits, timeouts: Timeouts) -> float | None:
    """The seconds of a child: those asked for, or its profile's, or the default; a profile's bound a model's wish."""
    own = timeouts.default if limits.seconds is UNSET else limits.seconds
    asked = order.task.timeout_seconds
    if asked is None:
        return own
    if not order.asked_by_model:
        return asked
    asked = clamp_asked(asked, (timeouts.minimum, timeouts.maximum))
    return asked if own is None or limits.seconds is UNSET else min(asked, own)


def known(value: Any) -> Any:
    """A limit after all defaults are applied."""
    assert value is not UNSET
    return value
