"""Settings of child teams: the members of a team, and `subagent_orchestrator`, with the keys of MassGen.

subagent_orchestrator:
  enabled: true
  agents:
    - {id: careful, backend: {type: anthropic, model: NAME}}
    - {model: "openai:NAME", profile: critic}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from retinue.config.located import Node, Section
from retinue.config.location import Place
from retinue.config.models import PROVIDERS
from retinue.config.schema import (
    ABOVE_DEFAULT,
    COUNT,
    FLAG,
    IF_TRUE,
    WORD,
    Kind,
    Loosening,
    Setting,
    TrustRule,
    choice,
    list_of,
    list_settings,
    read_section,
    section_schema,
    setting,
)
from retinue.core.errors import ConfigError
from retinue.core.profiles import NAME_PATTERN, check_name
from retinue.core.team_members import ROUND_EVALUATOR, TeamSettings
from retinue.core.teams import MAX_NEW_ANSWERS, MEMBERS_MAX, STRATEGIES, Member, Strategy

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
        Kind(lambda node: node.parse(_check_provider), {"type": "string", "pattern": PROVIDER_PATTERN}),
        "the provider",
        default="",
        example=_FIRST.partition(":")[0],
        null="refused",
    )
    model: str = setting(WORD, "the name of the model", default="", example=_FIRST.partition(":")[2], null="refused")


def _read_backend(node: Node) -> BackendSettings:
    section = node.section()
    for key in ("type", "model"):
        section.require(key)
    return read_section(BackendSettings, section)


@dataclass(frozen=True)
class MemberSettings:
    """One member of a team."""

    place: Place
    id: str | None = setting(
        Kind(
            lambda node: node.parse(lambda text: check_name(text, what="id")),
            {"type": "string", "pattern": NAME_PATTERN},
        ),
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
        """Return the member; `number` is its place in the list, from 1."""
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
    member = read_section(MemberSettings, node.section(), place=node.place)
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
    """Drop all members: a project multiplies no work by itself. Members with the same model are named once."""
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
        list_of(Node.word, r"\S", what="a list of texts"),
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

    def check_keys(self, keys: Section) -> None:
        """Raise for keys of this section that contradict each other, or that have no effect."""
        if self.max_new_answers is not None and self.max_new_answers_per_agent is not None:
            raise keys.entries["max_new_answers"].error("is the same as 'max_new_answers_per_agent': give only one")
        for each in list_settings(type(self)):
            if not self.enabled and getattr(self, each.name) != each.unset:
                raise keys.entries[each.name].error(NO_EFFECT.format(switch=ENABLED))
