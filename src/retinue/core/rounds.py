"""Rounds of a primary: an evaluator criticises each answer, and the next round makes it better. Values; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from retinue.core.teams import MAX_NEW_ANSWERS

Category = Literal["must", "should", "could"]
Pressure = Literal["gentle", "balanced", "aggressive"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
PRESSURES: tuple[Pressure, ...] = get_args(Pressure)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One criterion that answers are judged by."""

    text: str
    category: Category = "must"


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """Settings of rounds. `refine` lets an evaluator that is a team refine its packet; `pressure` is how large a change
    the evaluator looks for; without `criteria` the built-in ones hold. After `max_answers` the run ends."""

    enabled: bool = False
    refine: bool = False
    pressure: Pressure = "balanced"
    criteria: tuple[Criterion, ...] = ()
    max_answers: int = MAX_NEW_ANSWERS
