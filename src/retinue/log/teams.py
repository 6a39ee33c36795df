"""A team for screens: one line about where it is, and a row for each member. Text is left as it came."""

from __future__ import annotations

from decimal import Decimal

import msgspec

from retinue.core.events import decode_raw
from retinue.core.teams import TeamState
from retinue.log.blocks import format_count
from retinue.log.runs import RunView

ABSTAINED = "abstained"


class MemberRow(msgspec.Struct, frozen=True):
    """One member of a team: its run, what it answered and voted for, and what it used. `id` is its label for people,
    `role` says whether the team decided for it."""

    run: int
    agent: str
    id: str
    model: str
    state: str
    answers: tuple[str, ...]
    vote: str
    reason: str
    role: str
    tokens: int
    cost: Decimal
    unpriced: int


def list_members(team: RunView) -> list[MemberRow]:
    """Return the rows of a team's members, in its order."""
    state = team.team or TeamState()
    given = [(answer.run, answer.label) for answer in state.all_answers]
    return [
        MemberRow(
            run=member.number,
            agent=member.agent,
            id=_read_nickname(member),
            model=member.spawned.model,
            state=member.state,
            answers=tuple(label for run, label in given if run == member.number),
            vote=_describe_vote(state, member.agent),
            reason=state.votes[member.agent].reason if member.agent in state.votes else "",
            role=_describe_role(state, member),
            tokens=member.usage.total_tokens,
            cost=member.cost,
            unpriced=member.unpriced,
        )
        for member in team.members
    ]


def _read_nickname(member: RunView) -> str:
    nickname = decode_raw(member.spawned.profile).get("nickname")
    return nickname if isinstance(nickname, str) else ""


def _describe_vote(state: TeamState, agent: str) -> str:
    vote = state.votes.get(agent)
    return "" if vote is None else vote.choice or ABSTAINED


def _describe_role(state: TeamState, member: RunView) -> str:
    if member.agent in state.lost:
        return "lost"
    if state.decided is None or state.decided.run != member.number:
        return ""
    return "winner" if state.decided.presenter is None else "presenter"


def describe_team(team: RunView) -> str:
    """Say where a team is: `team of 3: 2 answered, 1 at work`."""
    size = f"team of {len(team.members)}"
    state = team.team or TeamState()
    lost = [f"{len(state.lost)} lost"] if state.lost else []
    decided = state.decided
    if decided is not None:
        presents = decided.presenter is not None and team.ended is None
        after = [f"{decided.agent} presents"] if presents else []
        return f"{size}: {', '.join([f'decided for {decided.winner}', *after, *lost])}"
    if team.ended is not None:
        return f"{size}: {', '.join([format_count(len(state.all_answers), 'answer'), *lost])}"
    active = [member.agent for member in team.members if member.agent not in state.lost]
    answered = [agent for agent in active if agent in state.answers]
    if len(answered) < len(active):
        done = [f"{len(answered)} answered", f"{len(active) - len(answered)} at work"]
    else:
        voted = [agent for agent in active if agent in state.votes]
        done = ["all answered", f"{len(voted)} voted", f"{len(active) - len(voted)} at work"]
    return f"{size}: {', '.join([*done, *lost])}"
