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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retinue.config.located import Node
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
    Section,
    Setting,
    choice,
    list_of,
    list_settings,
    setting,
    text_for,
    trust_for,
    trust_none,
)
from retinue.core.errors import ConfigError
from retinue.core.limits import MODEL_ASKED_SECONDS, SPAWNED_SECONDS
from retinue.core.profiles import DEFAULT_RUNTIME, NAME_PATTERN, RUNTIMES, RuntimeName, check_name
from retinue.core.rounds import CATEGORIES, PRESSURES, Criterion, Pressure, Rounds
from retinue.core.team_members import ROUND_EVALUATOR, TeamSettings
from retinue.core.teams import MEMBERS_MAX, STRATEGIES, Member, name_agent

CHECKLIST_GATED = "checklist_gated"
ROUNDS = "round_evaluator_before_checklist"
MANAGED = "orchestrator_managed_round_evaluator"
PROVIDER_PATTERN = r"^[^\s:]+$(?!\n)"
NO_EFFECT = "has no effect while '{switch}' is false: set it to true, or leave this out"
TEAM_KEYS = ("orchestrator", "coordination", "subagent_orchestrator")
ENABLED = f"{'.'.join(TEAM_KEYS)}.enabled"
_FIRST, _SECOND = PROVIDERS[0].default, PROVIDERS[1].default
_BACKEND_EXAMPLE = "{{type: {0}, model: {2}}}".format(*_FIRST.partition(":"))
MEMBERS_EXAMPLE = f"[{{backend: {_BACKEND_EXAMPLE}}}, {{id: second, model: '{_SECOND}'}}]"


def _check_provider(text: str) -> str:
    if not text or ":" in text or any(char.isspace() for char in text):
        raise ConfigError(f"expected the name of a provider, such as {_FIRST.partition(':')[0]}, got {text!r}")
    return text


BACKEND = Section(
    "A model in two parts",
    "{type}:{model}".format,
    {
        "type": Setting(
            text_for(_check_provider, PROVIDER_PATTERN),
            "the provider",
            example=_FIRST.partition(":")[0],
            null="refused",
        ),
        "model": Setting(WORD, "the name of the model", example=_FIRST.partition(":")[2], null="refused"),
    },
    required=("type", "model"),
)
MEMBER = Section(
    "One member of a team",
    Member,
    {
        "id": Setting(
            text_for(lambda text: check_name(text, what="id"), NAME_PATTERN),
            "its name for people; agent1, agent2, ... in order, unless given",
            example="careful",
        ),
        "backend": Setting(
            BACKEND.value_kind,
            "its model in two parts, as in MassGen",
            example=_BACKEND_EXAMPLE,
        ),
        "model": Setting(WORD, "its model, instead of `backend`", example=_SECOND),
        "profile": Setting(WORD, "the active profile it runs, instead of that of the subagent", example="critic"),
    },
)


def _read_members(node: Node) -> tuple[Member, ...]:
    items = node.items(what="a list of members")
    if len(items) > MEMBERS_MAX:
        raise node.error(f"has {len(items)} members; the maximum is {MEMBERS_MAX}")
    found: dict[str, Member] = {}
    for number, item in enumerate(items, 1):
        member = _read_member(item, number)
        if found.setdefault(member.id.casefold(), member) is not member:
            other = list(found).index(member.id.casefold()) + 1
            raise item.error(f"the id '{member.id}' is the same name as that of member {other}")
    return tuple(found.values())


def _read_member(node: Node, number: int) -> Member:
    """Read a member. Without an id it is called after its `number` in the list, from 1."""
    given = MEMBER.read(node)
    if ("backend" in given) == ("model" in given):
        both = ", not both" if "model" in given else ""
        raise node.error(f"give it a 'model', or a 'backend' with type and model{both}")
    if "backend" in given:
        given["model"] = given.pop("backend")
    return Member(**{"id": name_agent(number), **given})


_ONE_MODEL = [
    {"required": ["model"], "properties": {"model": {"type": "string"}}},
    {"required": ["backend"], "properties": {"backend": {"type": "object"}}},
]
MEMBERS = Kind(
    _read_members,
    lambda: {
        "type": "array",
        "maxItems": MEMBERS_MAX,
        "items": {**MEMBER.make_schema(), "oneOf": _ONE_MODEL},
    },
)


def _describe_members(members: tuple[Member, ...]) -> list[Loosening]:
    """Describe the models of members. Members with the same model are listed once."""
    counts = Counter(str(member.model) for member in members)
    return [Loosening("", model if count == 1 else f"{model} ({count} members)") for model, count in counts.items()]


NEW_MEMBERS = trust_none("any member", _describe_members)  # without trust, a project must not multiply the work


def _make_teams(**given: Any) -> TeamSettings:
    if "max_new_answers" in given:
        given["max_new_answers_per_agent"] = given.pop("max_new_answers")
    return TeamSettings(**given)


TEAMS = Section(
    "Child teams: which agents a subagent is made of, and how they agree",
    _make_teams,
    {
        "enabled": Setting(FLAG, "true: subagents may be teams", default=TeamSettings.enabled, trust=IF_TRUE),
        "agents": Setting(
            MEMBERS,
            f"the shared pool of members, at most {MEMBERS_MAX}",
            default=TeamSettings.agents,
            example=MEMBERS_EXAMPLE,
            trust=NEW_MEMBERS,
        ),
        "shared_child_team_types": Setting(
            list_of(WORD, what="a list of texts"),
            "the types of subagents that take the shared pool first; `*`: all",
            default=TeamSettings.shared_child_team_types,
        ),
        "inherit_spawning_agent_backend": Setting(
            FLAG,
            "true: a subagent without members inherits the model of its spawner, round_evaluator too, and a task may "
            "not name a model",
            default=TeamSettings.inherit_spawning_agent_backend,
        ),
        "final_answer_strategy": Setting(
            choice(STRATEGIES),
            "synthesize: one member makes one answer of all; winner_present: the winner of the vote presents its "
            "answer; winner_reuse: its answer is taken as it is. synthesize unless set; winner_present for a team that "
            "refines",
            example="winner_present",
        ),
        "max_new_answers_per_agent": Setting(
            COUNT,
            "answers that each member of a refining team may give",
            default=TeamSettings.max_new_answers_per_agent,
            trust=ABOVE_DEFAULT,
        ),
        "max_new_answers": Setting(
            COUNT,
            "the same as `max_new_answers_per_agent`",
            default=TeamSettings.max_new_answers_per_agent,
            trust=ABOVE_DEFAULT,
        ),
    },
)
CRITERION = Section(
    "One criterion that the answers of rounds are judged by",
    Criterion,
    {
        "text": Setting(WORD, "the criterion, in your words", example="Every claim has a source.", null="refused"),
        "category": Setting(choice(CATEGORIES), "how much it counts", default=Criterion.category),
    },
    required=("text",),
)
_ROUNDS = Rounds()


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
        default=DEFAULT_RUNTIME,
        trust=trust_for("inherited", "delegated"),
        unset=None,
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
    subagent_orchestrator: TeamSettings = setting(
        TEAMS,
        "subagents that are teams",
        default=TeamSettings(),
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
        FLAG, "true: a `round_evaluator` that is a team refines its answer by votes", default=_ROUNDS.refine
    )
    round_evaluator_transformation_pressure: Pressure = setting(
        choice(PRESSURES), "how large a change the evaluator of a round looks for", default=_ROUNDS.pressure
    )
    checklist_criteria_inline: tuple[Criterion, ...] = setting(
        list_of(CRITERION.value_kind, what="a list of criteria"),
        "what the answers of rounds are judged by; `category` is must, should or could; built-in criteria unless set",
        default=(),
        example="[{text: Every claim has a source., category: must}]",
    )

    @property
    def rounds(self) -> Rounds | None:
        """The rounds of every primary, or None if rounds are off."""
        return self.make_rounds() if self.round_evaluator_before_checklist else None

    def make_rounds(self) -> Rounds:
        """Return the configured rounds, even if rounds are off."""
        return Rounds(
            refine=self.round_evaluator_refine,
            pressure=self.round_evaluator_transformation_pressure,
            criteria=self.checklist_criteria_inline,
        )


COORDINATION = Section("Subagents that a model asks for", CoordinationSettings, list_settings(CoordinationSettings))


@dataclass(frozen=True)
class OrchestratorSettings:
    """Subagents."""

    voting_sensitivity: Literal["checklist_gated"] | None = setting(
        choice((CHECKLIST_GATED,)),
        "checklist_gated: a checklist decides when rounds end; rounds need it",
        example=CHECKLIST_GATED,
    )
    coordination: CoordinationSettings = setting(
        COORDINATION, "how a model may have subagents", default=CoordinationSettings(), example=""
    )


ORCHESTRATOR = Section("Subagents", OrchestratorSettings, list_settings(OrchestratorSettings))


def check_orchestrator(settings: OrchestratorSettings, root: Node) -> None:
    """Raise for keys that contradict each other or have no effect. `root` is the document of the file."""
    given = settings.coordination
    coordination = root.get("orchestrator", "coordination")
    if coordination is None:
        return
    entries = coordination.entries()
    _check_timeouts(given, coordination)
    _check_rounds(settings, entries)
    teams = given.subagent_orchestrator
    if teams.enabled and not given.enable_subagents:
        raise entries["enable_subagents"].error(
            "must be true for teams: set it, or set 'subagent_orchestrator.enabled' to false"
        )
    team = coordination.get("subagent_orchestrator")
    if team is None:
        return
    again = team.get("max_new_answers")
    if again is not None and team.get("max_new_answers_per_agent") is not None:
        raise again.error("is the same as 'max_new_answers_per_agent': give only one")
    for entry in team.entries().values():
        if not teams.enabled and entry.value not in (None, False, ()):
            raise entry.error(NO_EFFECT.format(switch=ENABLED))


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
