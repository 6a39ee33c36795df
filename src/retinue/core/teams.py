"""Teams: several members that work on one task. Values and pure rules; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from retinue.core.messages import Model

Strategy = Literal["synthesize", "winner_present", "winner_reuse"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
MEMBERS_MAX = 10


@dataclass(frozen=True, kw_only=True)
class Member:
    """One agent of a team. `id` is its label for people; `model` is a name such as "anthropic:NAME", or a model as a
    value. `profile` is the name of the profile it runs; None: that of the subagent type the team stands for."""

    id: str
    model: str | Model
    profile: str | None = None
