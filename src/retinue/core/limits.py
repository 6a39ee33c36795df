"""Limits: what is set, what is inherited, what the defaults are. Narrower always wins."""

from __future__ import annotations

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


class Limits(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """`None` means unlimited where it is allowed; what is not set is inherited or the default.

    `turns` and `seconds` bound one run; `depth` is how many levels may stand below it;
    `concurrent` is how many spawned runs of a tree may run at once (the primary holds no slot).
    """

    turns: int | UnsetType | None = UNSET
    seconds: float | UnsetType | None = UNSET
    depth: int | UnsetType = UNSET
    concurrent: int | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        for name in ("turns", "depth", "concurrent"):
            value = getattr(self, name)
            if value is UNSET or (value is None and name != "depth"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"limit {name!r} must be a whole number of 0 or more, got {value!r}")
        seconds = self.seconds
        if seconds is UNSET or seconds is None:
            return
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
            raise ConfigError(f"limit 'seconds' must be a number of 0 or more, got {seconds!r}")

    def over(self, base: Limits) -> Limits:
        """These limits, and those of `base` where these say nothing."""
        return Limits(
            base.turns if self.turns is UNSET else self.turns,
            base.seconds if self.seconds is UNSET else self.seconds,
            base.depth if self.depth is UNSET else self.depth,
            base.concurrent if self.concurrent is UNSET else self.concurrent,
        )


def clamp_asked(seconds: float, bounds: tuple[float, float] = MODEL_ASKED_SECONDS) -> float:
    """A timeout asked by a model, inside the bounds; one set by a person never comes here."""
    return min(max(seconds, bounds[0]), bounds[1])
