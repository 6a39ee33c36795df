"""Limits: what is set, what is inherited, what the defaults are. Narrower always wins."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from retinue.core.errors import ConfigError

DEFAULT_DEPTH = 3
DEFAULT_CONCURRENT = 8
DEFAULT_TURNS = 100
SPAWNED_SECONDS = 1800.0
MODEL_ASKED_SECONDS = (60.0, 4 * 3600.0)
MAX_TASKS_PER_SPAWN = 32
CANCEL_ASK_SECONDS = 10.0
TERM_SECONDS = 5.0
INLINE_BYTES = 50 * 1024
EVENT_BYTES = 4 * 1024 * 1024
OUTPUT_TOKENS = 16_384
MIB = 1024**2
WORKSPACE_MIB = 2048
RETENTION_DAYS = 30.0
SETUP_SECONDS = 600.0


class Limits(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`None` means unlimited where it is allowed; what is not set is inherited or the default.

    `turns` and `seconds` bound one run; `depth` is how many levels may stand below it;
    `concurrent` is how many spawned runs of a tree may run at once (the primary holds no slot).
    `tokens` and `cost` (US dollars) are what a run and everything below it may spend; `stall` is for how many
    seconds nothing at all may happen there.
    """

    turns: int | UnsetType | None = UNSET
    seconds: float | UnsetType | None = UNSET
    depth: int | UnsetType = UNSET
    concurrent: int | UnsetType | None = UNSET
    tokens: int | UnsetType | None = UNSET
    cost: Decimal | UnsetType | None = UNSET
    stall: float | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        for name in ("turns", "depth", "concurrent", "tokens"):
            value = getattr(self, name)
            if value is UNSET or (value is None and name != "depth"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"limit {name!r} must be a whole number of 0 or more, got {value!r}")
        for name in ("seconds", "stall"):
            value = getattr(self, name)
            if value is UNSET or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ConfigError(f"limit {name!r} must be a number of 0 or more, got {value!r}")
        if self.cost is not UNSET and self.cost is not None:
            msgspec.structs.force_setattr(self, "cost", parse_amount(self.cost))

    def narrow(self, base: Limits) -> Limits:
        """Return the limits of `base`, each narrowed to the one of these where this is smaller."""
        return Limits(*(pick_smaller(getattr(base, name), getattr(self, name)) for name in self.__struct_fields__))

    def override(self, base: Limits) -> Limits:
        """Return these limits, and those of `base` where these say nothing."""
        if self == _NOTHING_SET:
            return base
        return Limits(
            *(getattr(base if getattr(self, name) is UNSET else self, name) for name in self.__struct_fields__)
        )


class Timeouts(msgspec.Struct, frozen=True, gc=False):
    """Seconds of spawned runs: the default, and the bounds of a timeout that a model asks for."""

    default: float = SPAWNED_SECONDS
    minimum: float = MODEL_ASKED_SECONDS[0]
    maximum: float = MODEL_ASKED_SECONDS[1]

    def clamp(self, seconds: float) -> float:
        """Return a timeout asked by a model, inside the bounds; one set by a person never comes here."""
        return min(max(seconds, self.minimum), self.maximum)


class Caps(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Caps of one run's processes: bytes of memory, how many at once, seconds of CPU each, bytes of one file, how many
    files each has open, and bytes of its whole workspace."""

    memory: int = 4096 * MIB
    processes: int = 512
    cpu_seconds: int = 4 * 3600
    file_bytes: int = 2048 * MIB
    open_files: int = 4096
    workspace_bytes: int = 8192 * MIB


_NOTHING_SET = Limits()


def pick_smaller(own: Any, given: Any) -> Any:
    """Return the smaller of two limits, where unset and None are no limit; `own` if both are none."""
    if given is None or given is UNSET:
        return own
    return given if own is None or own is UNSET else min(own, given)


def parse_amount(value: object) -> Decimal:
    """Return an amount of money, exactly as a person wrote it: 0.1 is 0.1."""
    if isinstance(value, Decimal | int | float) and not isinstance(value, bool):
        exact = Decimal(str(value))
        if exact.is_finite() and exact >= 0:
            return exact
    raise ConfigError(f"limit 'cost' must be an amount of 0 or more, got {value!r}")
