"""Limits of runs: which are set, which are inherited, and the defaults. The narrower limit always wins."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, NamedTuple

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


class LimitKey(NamedTuple):
    """The key of a limit in retinue.yaml, which is also its option (`max_turns`, `--max-turns`). `default` is None if
    there is no limit."""

    name: str
    help: str
    default: float | None = None


LIMIT_KEYS = {  # by field of Limits; declared here because the command line must not load all settings for its help
    "turns": LimitKey("max_turns", "turns of each run (one turn is one model call)", DEFAULT_TURNS),
    "seconds": LimitKey("timeout", "seconds that the primary may take"),
    "depth": LimitKey("max_depth", "levels of subagents below the primary", DEFAULT_DEPTH),
    "concurrent": LimitKey("max_concurrent", "subagents that run at once in a tree", DEFAULT_CONCURRENT),
    "tokens": LimitKey("max_tokens", "tokens that a whole tree may spend"),
    "cost": LimitKey("max_cost", "US dollars that a whole tree may spend; needs models whose price is known"),
    "stall": LimitKey(
        "stall", "seconds without an event in a run and below it before you are warned; after twice that, the run ends"
    ),
}


class Limits(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Limits of a run and of the runs below it. An unset limit is inherited or has its default; None means unlimited,
    where allowed.

    `turns` and `seconds` bound a single run. `depth` is the number of levels allowed below the run. `concurrent` is
    the number of spawned runs of a tree that may run at once (the primary holds no slot). `tokens` and `cost` (US
    dollars) are the budget of a run and all runs below it. `stall` is the longest time in seconds without activity in
    any of these runs."""

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
        """Return the smaller of each limit in `self` and `base`. An unset limit in `self` keeps the limit of
        `base`."""
        return Limits(*(pick_smaller(getattr(base, name), getattr(self, name)) for name in self.__struct_fields__))

    def override(self, base: Limits) -> Limits:
        """Return these limits, with unset ones taken from `base`."""
        if self == _NOTHING_SET:
            return base
        return Limits(
            *(getattr(base if getattr(self, name) is UNSET else self, name) for name in self.__struct_fields__)
        )


class Timeouts(msgspec.Struct, frozen=True, gc=False):
    """Timeouts of spawned runs, in seconds: the default, and the bounds of a timeout that a model asks for."""

    default: float = SPAWNED_SECONDS
    minimum: float = MODEL_ASKED_SECONDS[0]
    maximum: float = MODEL_ASKED_SECONDS[1]

    def clamp(self, seconds: float) -> float:
        """Return a timeout asked for by a model, clamped to the bounds. Timeouts set by a person are not clamped."""
        return min(max(seconds, self.minimum), self.maximum)


class ResourceLimits(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Resource limits for the processes of one run: bytes of memory, number of processes at once, CPU seconds of each
    process, bytes of one file, open files of each process, and bytes of the whole workspace."""

    memory: int = 4096 * MIB
    processes: int = 512
    cpu_seconds: int = 4 * 3600
    file_bytes: int = 2048 * MIB
    open_files: int = 4096
    workspace_bytes: int = 8192 * MIB


_NOTHING_SET = Limits()


def pick_smaller(own: Any, given: Any) -> Any:
    """Return the smaller of two limits. Unset and None mean no limit; if both are unlimited, return `own`."""
    if given is None or given is UNSET:
        return own
    return given if own is None or own is UNSET else min(own, given)


def parse_amount(value: object) -> Decimal:
    """Return an amount of money exactly as a person wrote it: 0.1 stays 0.1. Raises ConfigError."""
    if isinstance(value, Decimal | int | float) and not isinstance(value, bool):
        exact = Decimal(str(value))
        if exact.is_finite() and exact >= 0:
            return exact
    raise ConfigError(f"limit 'cost' must be an amount of 0 or more, got {value!r}")
