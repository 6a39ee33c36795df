"""Teams: several members at work on the same task, and the rules for turning their answers and votes into a single
answer. Values and pure rules; no I/O.

Members are named agent1, agent2 and so on, in the order of the team; the answers of agent1 are agent1.1, agent1.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec

from retinue.core.events import AnswerGiven, AnswersShown, Body, MemberLost, TeamDecided, ToolCall, VoteCast, Warned
from retinue.core.messages import Model

Strategy = Literal["synthesize", "winner_present", "winner_reuse"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
MEMBERS_MAX = 10
NEW_ANSWER, VOTE = "new_answer", "vote"
TEAM_TOOL_NAMES = (NEW_ANSWER, VOTE)
MAX_NEW_ANSWERS = 3
REMINDERS = 2
ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Member:
    """One agent of a team. `id` is its label for people. `model` is a name such as "anthropic:NAME", or a model as a
    value. `profile` is the name of its profile; None means the profile of the subagent type that the team stands
    for."""

    id: str = ""
    model: str | Model = ""
    profile: str | None = None


class TeamPlan(msgspec.Struct, frozen=True):
    """The way in which a team reaches its answer. With `refine` its members continue until all have voted; otherwise
    each answers once."""

    strategy: Strategy
    refine: bool = False
    max_new_answers: int = MAX_NEW_ANSWERS

    @property
    def votes(self) -> bool:
        """Return True if the members vote."""
        return self.refine or self.strategy != "synthesize"

    @property
    def presents(self) -> bool:
        """Return True if a member presents the final answer."""
        return self.strategy != "winner_reuse"

    @property
    def answers_each(self) -> int:
        return self.max_new_answers if self.refine else 1


def is_team_call(call: ToolCall) -> bool:
    """Return True if the call is a team member's answer or vote, and not another tool of the same name."""
    return call.waits and call.name in TEAM_TOOL_NAMES


def choose_strategy(wanted: Strategy | None, *, refine: bool, evaluates_rounds: bool = False) -> Strategy:
    """Return the strategy of a team: `wanted`, or the default for its kind."""
    return wanted or ("winner_present" if refine and not evaluates_rounds else "synthesize")


class TeamState(msgspec.Struct, gc=False):
    """The state of a team, as a fold of the events in its thread. `answers` are the answers of members that are not
    lost. A new answer voids all votes; the loss of a member voids its vote and the votes for its answers. `shown` are
    the answers that each member was last asked to vote on; `missed` are the calls or turns in which each member has
    not voted since."""

    answers: dict[str, tuple[AnswerGiven, ...]] = {}
    votes: dict[str, VoteCast] = {}
    lost: dict[str, MemberLost] = {}
    shown: dict[str, tuple[str, ...]] = {}
    missed: dict[str, tuple[str, ...]] = {}
    decided: TeamDecided | None = None
    calls: set[str] = set()
    all_answers: tuple[AnswerGiven, ...] = ()
    warned: set[str] = set()

    def apply(self, body: Body) -> None:
        match body:
            case AnswerGiven():
                self.answers[body.member] = (*self.answers.get(body.member, ()), body)
                self.all_answers += (body,)
                self.calls.add(_name_call(body.member_run, body.call_id))
                self.votes, self.missed = {}, {}
            case AnswersShown():
                self.shown[body.member] = body.answers
                if body.missed:
                    self.missed[body.member] = (*self.missed.get(body.member, ()), body.missed)
            case VoteCast():
                self.votes[body.member] = body
                self.calls.add(_name_call(body.member_run, body.call_id))
            case MemberLost():
                self.lost[body.member] = body
                labels = {answer.label for answer in self.answers.pop(body.member, ())}
                self.votes = {agent: vote for agent, vote in self.votes.items() if vote.choice not in labels}
                self.votes.pop(body.member, None)
            case TeamDecided():
                self.decided = body
            case Warned(text=text):
                self.warned.add(text)

    def has_call(self, run: int, call_id: str) -> bool:
        """Return True if the answer or vote of this call is already known. After a crash the same call is made
        again."""
        return _name_call(run, call_id) in self.calls

    def list_current(self, order: Sequence[str]) -> list[AnswerGiven]:
        """Return the newest answer of each member, in the order of the team."""
        return [self.answers[agent][-1] for agent in order if agent in self.answers]

    def list_active(self, order: Sequence[str]) -> list[str]:
        return [agent for agent in order if agent not in self.lost]

    def find_choice(self, wanted: str) -> AnswerGiven | None:
        """Return the answer that a vote for `wanted` means: `agent2.1`, or `agent2` for its newest."""
        for given in self.answers.values():
            for answer in given:
                if wanted == answer.label:
                    return answer
            if wanted == given[-1].member:
                return given[-1]
        return None

    def is_ready(self, plan: TeamPlan, order: Sequence[str]) -> bool:
        """Return True if the team can decide: all active members have answered and, if they vote, voted."""
        active = self.list_active(order)
        if self.decided is not None or not active or any(agent not in self.answers for agent in active):
            return False
        return not plan.votes or len(self.answers) == 1 or all(agent in self.votes for agent in active)

    def count_votes(self, order: Sequence[str]) -> Mapping[str, int]:
        """Return the number of votes for each current answer, in the order of the team."""
        choices = [vote.choice for vote in self.votes.values()]
        return {answer.label: choices.count(answer.label) for answer in self.list_current(order)}

    def find_leader(self, order: Sequence[str]) -> AnswerGiven:
        """Return the leading answer: the decided winner, else the answer with the most votes, else the first."""
        votes = self.count_votes(order)
        decided = None if self.decided is None else self.decided.winner
        return max(self.list_current(order), key=lambda answer: (answer.label == decided, votes[answer.label]))

    def find_winner(self, plan: TeamPlan, order: Sequence[str]) -> tuple[AnswerGiven, str]:
        """Return the winning answer of the team, and the reason. A tie goes to the member that comes first."""
        current = self.list_current(order)
        if len(current) == 1 and len(order) > 1:
            return current[0], "the only answer left"
        if not plan.votes:
            return current[0], "the first member that answered"
        votes = self.count_votes(order)
        most = max(votes.values())
        best = [answer for answer in current if votes[answer.label] == most]
        if most == 0:
            return best[0], "nobody voted: the first member"
        count = f"{most} of {len(self.list_active(order))} votes"
        return best[0], count if len(best) == 1 else f"{count}, a tie: the first member"


def name_agent(number: int) -> str:
    """Return the name of the member at position `number`, counted from 1."""
    return f"agent{number}"


def _name_call(run: int, call_id: str) -> str:
    return f"{run} {call_id}"
