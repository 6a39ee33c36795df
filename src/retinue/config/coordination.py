"""Settings of teams, rounds, and subagents that a model asks for. The keys are those of MassGen.

subagent_orchestrator:
  enabled: true
  agents:
    - {id: careful, backend: {type: anthropic, model: NAME}}
    - {model: "openai:NAME", profile: critic}

Also checks keys against each other: a key without an effect is an error that says which other key to set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from retinue.config.located import Node
from retinue.config.location import SourceLocation
from retinue.config.models import PROVIDERS
from retinue.config.schema import (
    ABOVE_DEFAULT,
    ANY_COMMAND,
    ANY_VALUE,
    COUNT,
    FLAG,
    IF_TRUE,
    NUMBER,
    TEXTS,
    WORD,
    Kind,
    Loosening,
    Setting,
    TrustRule,
    choice,
    list_of,
    list_settings,
    read_section,
    section,
    section_schema,
    setting,
    text_for,
    trust_for,
)
from retinue.core.errors import ConfigError
from retinue.core.limits import MODEL_ASKED_SECONDS, SPAWNED_SECONDS
from retinue.core.profiles import NAME_PATTERN, RUNTIMES, RuntimeName, check_name
from retinue.core.rounds import CATEGORIES, PRESSURES, Category, Criterion, Pressure, Rounds
from retinue.core.team_members import ROUND_EVALUATOR, TeamSettings
from retinue.core.teams import MAX_NEW_ANSWERS, MEMBERS_MAX, STRATEGIES, Member, Strategy

CHECKLIST_GATED = "checklist_gated"
ROUNDS = "round_evaluator_before_checklist"
MANAGED = "orchestrator_managed_round_evaluator"
PROVIDER_PATTERN = r"^[^\s:]+$(?!\n)"
NO_EFFECT = "has no effect while '{switch}' is false: set it to true, or leave this out"
ENABLED = "orchestrator.coordination.subagent_orchestrator.enabled"
_FIRST, _SECOND = PROVIDERS[0].default, PROVIDERS[1].default
_BACKEND_EXAMPLE = "{{type: {0}, model: {2}}}".format(*_FIRST.partition(":"))
MEMBERS_EXAMPLE = f"[{{backend: {_BACKEND_EXAMPLE}}}, {{id: second, model: '{_SECOND}'}}]"


def _check_provider(text: str) -> str:
    if not text or ":" in text or any(char.isspace() for char in text):
        raise ConfigError(f"expected the name of a provider, such as {_FIRST.partition(':')[0]}, got {text!r}")
    return text


@dataclass(frozen=True)
class BackendSettings:
    """A model in two parts."""

    type: str = setting(
        text_for(_check_provider, PROVIDER_PATTERN),
        "the provider",
        default="",
        example=_FIRST.partition(":")[0],
        null="refused",
    )
    model: str = setting(WORD, "the name of the model", default="", example=_FIRST.partition(":")[2], null="refused")


def _read_backend(node: Node) -> BackendSettings:
    for key in ("type", "model"):
        node.require(key)
    return read_section(BackendSettings, node)


@dataclass(frozen=True)
class MemberSettings:
    """One member of a team."""

    place: SourceLocation
    id: str | None = setting(
        text_for(lambda text: check_name(text, what="id"), NAME_PATTERN),
        "its name for people; agent1, agent2, ... in order, unless given",
        example="careful",
    )
    backend: BackendSettings | None = setting(
        Kind(_read_backend, {**section_schema(BackendSettings), "required": ["type", "model"]}),
        "its model in two parts, as in MassGen",
        example=_BACKEND_EXAMPLE,
    )
    model: str | None = setting(WORD, "its model, instead of `backend`", example=_SECOND)
    profile: str | None = setting(WORD, "the active profile it runs, instead of that of the subagent", example="critic")

    def to_member(self, number: int) -> Member:
        """Return the member. `number` is its position in the list, from 1."""
        model = self.model if self.backend is None else f"{self.backend.type}:{self.backend.model}"
        return Member(id=self.id or f"agent{number}", model=model or "", profile=self.profile)


def to_members(members: Sequence[MemberSettings]) -> tuple[Member, ...]:
    """Return the members of a list, each with an id."""
    return tuple(member.to_member(number) for number, member in enumerate(members, 1))


def _read_members(node: Node) -> tuple[MemberSettings, ...]:
    items = node.items(what="a list of members")
    if len(items) > MEMBERS_MAX:
        raise node.error(f"has {len(items)} members; the maximum is {MEMBERS_MAX}")
    found = tuple(map(_read_member, items))
    seen: dict[str, int] = {}
    for number, member in enumerate(to_members(found), 1):
        other = seen.setdefault(member.id.casefold(), number)
        if other != number:
            raise items[number - 1].error(f"the id '{member.id}' is the same name as that of member {other}")
    return found


def _read_member(node: Node) -> MemberSettings:
    member = read_section(MemberSettings, node, place=node.place)
    if (member.backend is None) == (member.model is None):
        both = "" if member.model is None else ", not both"
        raise node.error(f"give it a 'model', or a 'backend' with type and model{both}")
    return member


_ONE_MODEL = [
    {"required": ["model"], "properties": {"model": {"type": "string"}}},
    {"required": ["backend"], "properties": {"backend": {"type": "object"}}},
]
MEMBERS = Kind(
    _read_members,
    {
        "type": "array",
        "maxItems": MEMBERS_MAX,
        "items": {**section_schema(MemberSettings), "oneOf": _ONE_MODEL},
    },
)


def _drop_members(
    members: tuple[MemberSettings, ...], _: Setting
) -> tuple[tuple[MemberSettings, ...], list[Loosening]]:
    """Drop all members: without trust, a project must not multiply the work. Members with the same model are listed
    once."""
    counts = Counter(str(member.model) for member in to_members(members))
    return (), [Loosening("", model if count == 1 else f"{model} ({count} members)") for model, count in counts.items()]


NEW_MEMBERS = TrustRule("any member", _drop_members)


@dataclass(frozen=True)
class SubagentOrchestratorSettings:
    """Child teams: which agents a subagent is made of, and how they agree."""

    enabled: bool = setting(FLAG, "true: subagents may be teams", default=False, trust=IF_TRUE)
    agents: tuple[MemberSettings, ...] = setting(
        MEMBERS,
        f"the shared pool of members, at most {MEMBERS_MAX}",
        default=(),
        example=MEMBERS_EXAMPLE,
        trust=NEW_MEMBERS,
    )
    shared_child_team_types: tuple[str, ...] = setting(
        list_of(WORD, what="a list of texts"),
        "the types of subagents that take the shared pool first; `*`: all",
        default=(ROUND_EVALUATOR,),
    )
    inherit_spawning_agent_backend: bool = setting(
        FLAG,
        "true: a subagent without members inherits the model of its spawner, round_evaluator too, and a task may not "
        "name a model",
        default=False,
    )
    final_answer_strategy: Strategy | None = setting(
        choice(STRATEGIES),
        "synthesize: one member makes one answer of all; winner_present: the winner of the vote presents its answer; "
        "winner_reuse: its answer is taken as it is. synthesize unless set; winner_present for a team that refines",
        example="winner_present",
    )
    max_new_answers_per_agent: int | None = setting(
        COUNT,
        "answers that each member of a refining team may give",
        default=MAX_NEW_ANSWERS,
        unset=None,
        trust=ABOVE_DEFAULT,
    )
    max_new_answers: int | None = setting(
        COUNT, "the same as `max_new_answers_per_agent`", default=MAX_NEW_ANSWERS, unset=None, trust=ABOVE_DEFAULT
    )

    def to_settings(self) -> TeamSettings:
        return TeamSettings(
            enabled=self.enabled,
            agents=to_members(self.agents),
            shared_child_team_types=self.shared_child_team_types,
            inherit_spawning_agent_backend=self.inherit_spawning_agent_backend,
            final_answer_strategy=self.final_answer_strategy,
            max_new_answers_per_agent=self.max_new_answers_per_agent or self.max_new_answers or MAX_NEW_ANSWERS,
        )

    def check_keys(self, node: Node) -> None:
        """Raise for keys of this section that contradict each other or have no effect."""
        if self.max_new_answers is not None and self.max_new_answers_per_agent is not None:
            raise node.entries()["max_new_answers"].error("is the same as 'max_new_answers_per_agent': give only one")
        for each in list_settings(type(self)):
            if not self.enabled and getattr(self, each.name) != each.unset:
                raise node.entries()[each.name].error(NO_EFFECT.format(switch=ENABLED))


@dataclass(frozen=True)
class CriterionSettings:
    """One criterion that the answers of rounds are judged by."""

    text: str = setting(
        WORD, "the criterion, in your words", default="", example="Every claim has a source.", null="refused"
    )
    category: Category = setting(choice(CATEGORIES), "how much it counts", default="must")


def _read_criterion(node: Node) -> Criterion:
    node.require("text")
    values = read_section(CriterionSettings, node)
    return Criterion(text=values.text, category=values.category)


_CRITERION = Kind(_read_criterion, {**section_schema(CriterionSettings), "required": ["text"]})


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
        trust=ANY_COMMAND,
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
        list_of(_CRITERION, what="a list of criteria"),
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
        """Return the rounds of every primary, or None if rounds are off."""
        return self.describe_rounds() if self.coordination.round_evaluator_before_checklist else None

    def describe_rounds(self) -> Rounds:
        """Return the configured rounds, even if rounds are off."""
        given = self.coordination
        return Rounds(
            refine=given.round_evaluator_refine,
            pressure=given.round_evaluator_transformation_pressure,
            criteria=given.checklist_criteria_inline,
        )


def check_orchestrator(settings: OrchestratorSettings, root: Node) -> None:
    """Raise for keys that contradict each other or have no effect. `root` is the document of the file."""
    given = settings.coordination
    coordination = root.get("orchestrator", "coordination")
    if coordination is None:
        return
    entries = coordination.entries()
    _check_timeouts(given, coordination)
    _check_rounds(settings, entries)
    if given.subagent_orchestrator.enabled and not given.enable_subagents:
        raise entries["enable_subagents"].error(
            "must be true for teams: set it, or set 'subagent_orchestrator.enabled' to false"
        )
    team = coordination.get("subagent_orchestrator")
    if team is not None:
        given.subagent_orchestrator.check_keys(team)


def _check_rounds(settings: OrchestratorSettings, entries: Mapping[str, Node]) -> None:
    """Check the settings that rounds require. A run always has exactly one parent agent, so the number of parents
    needs no check."""
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


def _check_timeouts(settings: CoordinationSettings, node: Node) -> None:
    """Check the bounds for timeouts that a model asks for. A default outside the bounds is the user's choice and stays
    valid."""
    low, high = settings.subagent_min_timeout, settings.subagent_max_timeout
    if low > high:
        given = node.get("subagent_max_timeout") or node.require("subagent_min_timeout")
        raise given.error(f"subagent_min_timeout ({low:g}) is more than subagent_max_timeout ({high:g})")
