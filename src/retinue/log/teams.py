"""One line about a team: its progress, or its outcome."""

from __future__ import annotations

from retinue.core.events import TeamDecided
from retinue.core.teams import TeamState
from retinue.log.blocks import format_count
from retinue.log.runs import RunView


def describe_team(team: RunView) -> str:
    """Describe the progress or outcome of a team, such as `team of 3: 2 answered, 1 at work`."""
    size = f"team of {len(team.members)}"
    state = team.team or TeamState()
    lost = [f"{len(state.lost)} lost"] if state.lost else []
    decided = state.decided
    if decided is not None:
        return f"{size}: {', '.join([*_describe_decision(decided, is_over=team.ended is not None), *lost])}"
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


def _describe_decision(decided: TeamDecided, *, is_over: bool) -> list[str]:
    if decided.strategy == "synthesize":
        return [f"{decided.member} {'made' if is_over else 'makes'} one answer of all"]
    if is_over:
        return [f"decided for {decided.winner}", decided.reason]
    presents = [] if decided.presenter is None else [f"{decided.member} presents"]
    return [f"decided for {decided.winner}", *presents]
