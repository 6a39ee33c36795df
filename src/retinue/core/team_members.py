"""Members of a subagent: which agents, on which models, work on the task of a child. Pure rules; no I/O.

The settings come from `orchestrator.coordination.subagent_orchestrator` in retinue.yaml. A single member is an
ordinary run; several members are a team.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from retinue.core.errors import ConfigError
from retinue.core.teams import MAX_NEW_ANSWERS, Member, Strategy

ROUND_EVALUATOR = "round_evaluator"
UNTYPED = "subagent"  # the profile of a task that names no type
ALL_TYPES = "*"
Step = Literal[0, 1, 2, 3, 4, 5, 6]
INHERITING_STEPS: tuple[Step, ...] = (3, 6)
INHERITED_MODEL = (
    "Cannot set 'model' for subagent '{name}': every subagent inherits its model, because "
    "inherit_spawning_agent_backend is true in retinue.yaml. Leave 'model' out."
)
CONFIGURED_MODEL = (
    "Cannot set 'model' for subagent '{name}': its members have models of their own ({reason}). Leave 'model' out."
)


@dataclass(frozen=True, kw_only=True)
class TeamSettings:
    """Settings of child teams. `agents` is the shared pool. `shared_child_team_types` are the types that take the pool
    first; "*" means all. Unless `enabled`, a subagent is a team only if it is passed as a team by value."""

    enabled: bool = False
    agents: tuple[Member, ...] = ()
    shared_child_team_types: tuple[str, ...] = (ROUND_EVALUATOR,)
    inherit_spawning_agent_backend: bool = False
    final_answer_strategy: Strategy | None = None
    max_new_answers_per_agent: int = MAX_NEW_ANSWERS

    def shares_pool(self, type_name: str) -> bool:
        """Return True if subagents of this type take the shared pool first."""
        wanted = {name.casefold() for name in self.shared_child_team_types}
        return ALL_TYPES in wanted or type_name.casefold() in wanted


@dataclass(frozen=True, kw_only=True)
class MemberChoice:
    """The members of a subagent, the step of `resolve_members` that chose them, and the reason in words. Step 0 has no
    members: teams are off. The only member of steps 3 and 6 represents an inherited model, so a profile's own model
    wins."""

    members: tuple[Member, ...]
    step: Step
    reason: str

    @property
    def is_inherited(self) -> bool:
        """Return True if the only member is a copy of the spawner or of the primary."""
        return self.step in INHERITING_STEPS


def resolve_members(
    settings: TeamSettings,
    type_name: str,
    *,
    local_members: Sequence[Member],
    spawner_model: str | None,
    primary_model: str | None,
) -> MemberChoice:
    """Return the members of a subagent of this type, by the steps of MassGen. For round_evaluator, step 4 goes before
    step 3.

    1. the shared pool, for the types that `shared_child_team_types` lists
    2. the spawner's own `subagent_agents` (`local_members`)
    3. one copy of the spawner; for round_evaluator only with `inherit_spawning_agent_backend`
    4. the spawner's own `subagent_agents` for round_evaluator
    5. the shared pool, for all but round_evaluator, if the spawner has no model of its own: a client, a program
    6. the primary's model"""
    if not settings.enabled:
        return MemberChoice(members=(), step=0, reason="subagent_orchestrator.enabled is false")
    is_evaluator = type_name.casefold() == ROUND_EVALUATOR
    if settings.agents and settings.shares_pool(type_name):
        return MemberChoice(
            members=settings.agents, step=1, reason="the shared pool, which shared_child_team_types gives to this type"
        )
    if local_members:
        return MemberChoice(
            members=tuple(local_members), step=4 if is_evaluator else 2, reason="the subagent_agents of the spawner"
        )
    if spawner_model and (settings.inherit_spawning_agent_backend or not is_evaluator):
        return MemberChoice(members=(_copy_agent(spawner_model),), step=3, reason="the model of the spawner")
    if settings.agents and not is_evaluator:
        return MemberChoice(members=settings.agents, step=5, reason="the shared pool, because the spawner has no model")
    copies = (_copy_agent(primary_model),) if primary_model else ()
    return MemberChoice(members=copies, step=6, reason="the model of the primary, because nothing else is set")


def check_task_model(settings: TeamSettings, name: str, resolution: MemberChoice) -> None:
    """Raise ConfigError if a task names a model for a subagent whose model is already decided."""
    if not settings.enabled:
        return
    if settings.inherit_spawning_agent_backend:
        raise ConfigError(INHERITED_MODEL.format(name=name))
    if not resolution.is_inherited:
        raise ConfigError(CONFIGURED_MODEL.format(name=name, reason=resolution.reason))


def _copy_agent(model: str) -> Member:
    return Member(id="agent1", model=model)
