"""The state of rounds, as a fold of the events in the thread of their run. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from retinue.core.events import (
    Body,
    ChecklistAccepted,
    ImprovementsProposed,
    RoundAnswered,
    RoundEvaluated,
    RoundVoted,
    Warned,
)
from retinue.core.rounds import Basis, make_own_plan

AGENT = "agent1"  # the only parent agent; its answers are agent1.1, agent1.2


class RoundState(msgspec.Struct, gc=False):
    """The rounds of a run so far. `evaluated` maps each round to the evaluation that opened it. `missed` counts the
    reminders since the newest answer. `warned` are the warnings since the first event of a round."""

    answers: tuple[RoundAnswered, ...] = ()
    evaluated: dict[int, RoundEvaluated] = {}
    checked: ChecklistAccepted | None = None
    proposed: ImprovementsProposed | None = None
    voted: RoundVoted | None = None
    missed: int = 0
    warned: set[str] = set()

    def apply(self, body: Body) -> None:
        match body:
            case RoundAnswered():
                self.answers += (body,)
                self.checked, self.proposed, self.missed = None, None, 0
            case RoundEvaluated():
                self.evaluated[body.round] = body
            case ChecklistAccepted():
                self.checked, self.proposed = body, None
            case ImprovementsProposed():
                self.proposed = body
            case RoundVoted():
                self.voted = body
            case Warned(text=text):
                self.warned.add(text)

    def count_reminder(self) -> None:
        self.missed += 1

    @property
    def number(self) -> int:
        """The number of the current round, from 1."""
        return len(self.answers) + 1

    @property
    def basis(self) -> Basis | None:
        """The basis of the current round, or None for the first round."""
        opened = self.evaluated.get(self.number)
        return None if opened is None else opened.basis

    @property
    def plan(self) -> dict[str, Any] | None:
        """The plan of the current round: the evaluator's, or the improvements that the run proposed itself."""
        opened = self.evaluated.get(self.number)
        if opened is not None and opened.tasks is not None:
            return opened.tasks
        return None if self.proposed is None else make_own_plan(self.proposed.improvements)

    def find_answer(self, call_id: str) -> RoundAnswered | None:
        """Return the answer given by this call, or None. After a crash the same call is made again."""
        return next((answer for answer in self.answers if answer.call_id == call_id), None)

    def find_choice(self, wanted: str) -> RoundAnswered | None:
        """Return the answer that a vote for `wanted` means: `agent1.2`, or `agent1` for the newest."""
        if wanted == AGENT and self.answers:
            return self.answers[-1]
        return next((answer for answer in self.answers if answer.label == wanted), None)
