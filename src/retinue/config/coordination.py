"""Settings of subagents that a model asks for, and of teams and rounds, with the keys of MassGen.

Checks what belongs together: a key that could have no effect is an error that says what to set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from retinue.config.located import Node, Section
from retinue.config.schema import (
    ABOVE_DEFAULT,
    ANY_VALUE,
    FLAG,
    IF_TRUE,
    NUMBER,
    TEXTS,
    WORD,
    Kind,
    Loosening,
    TrustRule,
    choice,
    read_section,
    section,
    section_schema,
    setting,
    trust_for,
)
from retinue.config.teams import MEMBERS_EXAMPLE, SubagentOrchestratorSettings
from retinue.core.limits import MODEL_ASKED_SECONDS, SPAWNED_SECONDS
from retinue.core.profiles import RUNTIMES, RuntimeName
from retinue.core.rounds import CATEGORIES, PRESSURES, Category, Criterion, Pressure, Rounds
from retinue.core.team_members import ROUND_EVALUATOR

CHECKLIST_GATED = "checklist_gated"
ROUNDS = "round_evaluator_before_checklist"
MANAGED = "orchestrator_managed_round_evaluator"


@dataclass(frozen=True)
class CriterionSettings:
    """One criterion that the answers of rounds are judged by."""

    text: str = setting(WORD, "the criterion, in your words", default="", example="Every claim has a source.")
    category: Category = setting(choice(CATEGORIES), "how much it counts", default="must")


def _read_criteria(node: Node) -> tuple[Criterion, ...]:
    return tuple(_read_criterion(item) for item in node.items(what="a list of criteria"))


def _read_criterion(node: Node) -> Criterion:
    section = node.section()
    section.require("text")
    values = read_section(CriterionSettings, section)
    return Criterion(text=values.text, category=values.category)


_CRITERION = section_schema(CriterionSettings)
_CRITERIA = Kind(
    _read_criteria,
    {
        "type": "array",
        "items": {
            **_CRITERION,
            "properties": {**_CRITERION["properties"], "text": WORD.schema},
            "required": ["text"],
        },
    },
)


@dataclass(frozen=True)
class CoordinationSettings:
    """Subagents that a model asks for."""

    enable_subagents: bool = setting(FLAG, "false: no agent gets a tool to spawn subagents with", default=True)
    subagent_types: tuple[str, ...] | None = setting(
        TEXTS, "the profiles a model may name; null: the default ones; []: none", example="[explorer]"
    )
    subagent_default_timeout: float = setting(
        NUMBER,
        "seconds of a subagent, unless its profile or its parent says otherwise",
        default=SPAWNED_SECONDS,
        trust=ABOVE_DEFAULT,
    )
    subagent_min_timeout: float = setting(
        NUMBER,
        "the shortest timeout that a model may ask for, in seconds",
        default=MODEL_ASKED_SECONDS[0],
        trust=ABOVE_DEFAULT,
    )
    subagent_max_timeout: float = setting(
        NUMBER,
        "the longest timeout that a model may ask for, in seconds",
        default=MODEL_ASKED_SECONDS[1],
        trust=ABOVE_DEFAULT,
    )
    subagent_runtime_mode: RuntimeName | None = setting(
        choice(RUNTIMES),
        "where tools run: isolated or container (a sandbox), inherited (this process), delegated (the host)",
        default="isolated",
        unset=None,
        trust=trust_for("inherited", "delegated"),
    )
    subagent_runtime_fallback_mode: RuntimeName | None = setting(
        choice(RUNTIMES[:-1]),
        "the laxer runtime to use if that sandbox cannot be built; without it, such a run is refused",
        example="inherited",
        trust=ANY_VALUE,
    )
    subagent_delegation_directory: str | None = setting(
        WORD, "in a container: the folder shared with `retinue watch`", example="/outbox", trust=ANY_VALUE
    )
    subagent_host_launch_prefix: tuple[str, ...] = setting(
        TEXTS,
        "a command to put before the one that starts a sandbox",
        default=(),
        example="[nice, -n, '5']",
        trust=TrustRule("any value", lambda value, _: ((), [Loosening("", " ".join(value))])),
    )
    subagent_reports: Literal["strict", "best_effort"] = setting(
        choice(("strict", "best_effort")),
        "in an MCP server: what happens to a run whose events do not reach the process that started the server; "
        "strict: it fails; best_effort: it continues",
        default="strict",
        trust=trust_for("best_effort"),
    )
    subagent_orchestrator: SubagentOrchestratorSettings = section(
        SubagentOrchestratorSettings,
        "subagents that are teams",
        example=f"{{enabled: true, agents: {MEMBERS_EXAMPLE}}}",
    )
    round_evaluator_before_checklist: bool = setting(
        FLAG,
        "true: a primary works in rounds, and from the second one on a `round_evaluator` judges its answer first",
        default=False,
        trust=IF_TRUE,
    )
    orchestrator_managed_round_evaluator: bool = setting(
        FLAG,
        "true: Retinue starts the `round_evaluator` of each round, and no model may; rounds need it",
        default=False,
    )
    round_evaluator_refine: bool = setting(
        FLAG, "true: a `round_evaluator` that is a team refines its answer by votes", default=False
    )
    round_evaluator_transformation_pressure: Pressure = setting(
        choice(PRESSURES), "how large a change the evaluator of a round looks for", default="balanced"
    )
    checklist_criteria_inline: tuple[Criterion, ...] = setting(
        _CRITERIA,
        "what the answers of rounds are judged by; `category` is must, should or could; built-in criteria unless set",
        default=(),
        example="[{text: Every claim has a source., category: must}]",
    )


@dataclass(frozen=True)
class OrchestratorSettings:
    """Subagents."""

    voting_sensitivity: Literal["checklist_gated"] | None = setting(
        choice((CHECKLIST_GATED,)),
        "checklist_gated: a checklist decides when rounds end; rounds need it",
        example=CHECKLIST_GATED,
    )
    coordination: CoordinationSettings = section(CoordinationSettings, "how a model may have subagents")

    def to_rounds(self) -> Rounds | None:
        """Return the rounds of every primary; None if they are off."""
        return self.describe_rounds() if self.coordination.round_evaluator_before_checklist else None

    def describe_rounds(self) -> Rounds:
        """Return rounds as the settings want them, on or off."""
        given = self.coordination
        return Rounds(
            refine=given.round_evaluator_refine,
            pressure=given.round_evaluator_transformation_pressure,
            criteria=given.checklist_criteria_inline,
        )


def check_orchestrator(settings: OrchestratorSettings, keys: Section) -> None:
    """Raise for keys that contradict each other, or that have no effect. `keys` are those of the file."""
    given = settings.coordination
    orchestrator = keys.get("orchestrator")
    coordination = None if orchestrator is None else orchestrator.section().get("coordination")
    if coordination is None:
        return
    entries = coordination.section().entries
    _check_timeouts(given, entries)
    _check_rounds(settings, entries)
    if given.subagent_orchestrator.enabled and not given.enable_subagents:
        raise entries["enable_subagents"].error(
            "must be true for teams: set it, or set 'subagent_orchestrator.enabled' to false"
        )
    team = entries.get("subagent_orchestrator")
    if team is not None and team.value is not None:
        given.subagent_orchestrator.check_keys(team.section())


def _check_rounds(settings: OrchestratorSettings, entries: Mapping[str, Node]) -> None:
    """Check the settings that rounds need; a run has one parent agent in any case."""
    given = settings.coordination
    if not given.round_evaluator_before_checklist:
        for key in (MANAGED, "round_evaluator_refine"):
            if getattr(given, key):
                raise entries[key].error(f"has no effect without '{ROUNDS}: true': set it too, or leave this out")
        return
    active = [name.casefold() for name in given.subagent_types or ()]
    needs = {
        f"'orchestrator.voting_sensitivity: {CHECKLIST_GATED}'": settings.voting_sensitivity == CHECKLIST_GATED,
        "'enable_subagents: true'": given.enable_subagents,
        "'subagent_orchestrator.enabled: true'": given.subagent_orchestrator.enabled,
        f"'{ROUND_EVALUATOR}' in 'subagent_types'": ROUND_EVALUATOR in active,
        f"'{MANAGED}: true'": given.orchestrator_managed_round_evaluator,
    }
    missing = [need for need, is_met in needs.items() if not is_met]
    if missing:
        raise entries[ROUNDS].error(f"rounds need {', '.join(missing)}: set this too, or leave '{ROUNDS}' out")


def _check_timeouts(settings: CoordinationSettings, entries: Mapping[str, Node]) -> None:
    """Check the bounds for what a model asks for. A default outside them is a person's choice and stands."""
    low, high = settings.subagent_min_timeout, settings.subagent_max_timeout
    if low > high:
        node = entries.get("subagent_max_timeout")
        node = entries["subagent_min_timeout"] if node is None or node.value is None else node
        raise node.error(f"subagent_min_timeout ({low:g}) is more than subagent_max_timeout ({high:g})")
