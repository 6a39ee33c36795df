"""retinue.yaml: limits, defaults, and what each profile may do. Does not know which profiles there are (`project.py`).

model: scripted:script.yaml
max_depth: 3                     # levels below the primary; 0 disables nesting
max_concurrent: 8                # runs of a tree at once; null is unlimited
max_turns: 100                   # turns of one run; null is unlimited
timeout: 600                     # seconds of the primary; null (and the default) is none
max_tokens: 2000000              # what a whole tree may spend; null (and the default) is unlimited
max_cost: 5.00                   # the same in US dollars; needs models whose price is known
stall: 300                       # seconds in which nothing may happen in a run and below it; null is none
retention_days: 30               # what `retinue gc` keeps
approval_timeout: 600            # seconds a question waits, then it is a no; null (and the default) is for ever
expose_paths: [/usr/share]      # what walled runs may read beside their own folders
approvals:
  mode: ask                      # strict: every tool of the primary asks; yes: nothing asks
  allow: [shell(git status*)]    # deny wins, then ask, then allow, then the mode
  ask: [edit(docs/**)]
  deny: [shell(git push*)]
orchestrator:
  coordination:
    subagent_types: [explorer]   # null: the default ones; []: none
    subagent_default_timeout: 1800
    subagent_min_timeout: 60     # bounds for a timeout that a model asks for
    subagent_max_timeout: 14400
    subagent_runtime_mode: isolated              # where runs live: isolated (behind a wall), inherited or delegated
    subagent_delegation_directory: /outbox       # in a container, for delegated: the folder shared with its host
    subagent_runtime_fallback_mode: inherited    # where a wall cannot be built; without it such a run is refused
profiles:
  explorer:
    model: scripted:script.yaml
    tools: [read, grep, glob]
    limits: {turns: 30, seconds: 900, depth: 0, tokens: 200000, cost: 0.50, stall: 120}
    runtime: inherited
    workspace: scratch
    leaf: true
    approvals: {deny: [shell]}   # on top of the rules above: stricter, never laxer
  poet:                          # a name that no SUBAGENT.md has: this defines it
    description: Writes verse.
    instructions: You write verse.
    skills: [report-writing]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from msgspec import UNSET, UnsetType

from retinue.config.places import Place
from retinue.config.values import Node, Section
from retinue.config.yaml import read_yaml
from retinue.core.errors import ConfigError
from retinue.core.limits import MODEL_ASKED_SECONDS, RETENTION_DAYS, SPAWNED_SECONDS, Limits, amount
from retinue.core.profiles import RUNTIMES, WORKSPACES, RuntimeName, WorkspaceName, check_name
from retinue.core.rules import MODES, NO_WALLS, Rule, Rules, parse_rule


@dataclass(frozen=True)
class ProfileSettings:
    """What retinue.yaml says of one profile; None where it says nothing. `places` has the keys that were given."""

    name: str
    place: Place
    places: Mapping[str, Place] = field(default_factory=dict)
    description: str | None = None
    instructions: str | None = None
    skills: tuple[str, ...] | None = None
    model: str | None = None
    tools: tuple[str, ...] | None = None
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    runtime: RuntimeName | None = None
    workspace: WorkspaceName | None = None
    leaf: bool | None = None
    approvals: Rules | None = None


@dataclass(frozen=True)
class Settings:
    """What retinue.yaml says. `limits` are those of the primary and its tree; what it does not say is not set.

    The subagent timeouts are seconds; min and max bound only what a model asks for."""

    model: str | None = None
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    approval_timeout: float | None = None
    subagent_types: tuple[str, ...] | None = None
    subagent_default_timeout: float = SPAWNED_SECONDS
    subagent_min_timeout: float = MODEL_ASKED_SECONDS[0]
    subagent_max_timeout: float = MODEL_ASKED_SECONDS[1]
    subagent_runtime_mode: RuntimeName | None = None
    subagent_runtime_fallback_mode: RuntimeName | None = None
    subagent_delegation_directory: str | None = None
    expose_paths: tuple[str, ...] = ()
    retention_days: float = RETENTION_DAYS
    profiles: Mapping[str, ProfileSettings] = field(default_factory=dict)
    file: Path | None = None


def load_settings(path: Path | None) -> Settings:
    """The settings of a file; without one the defaults. An empty file says nothing."""
    if path is None:
        return Settings()
    node = read_yaml(path)
    if node.value is None:
        return Settings(file=path)
    return _settings(node.section(what="'key: value' lines"), path)


def _settings(section: Section, path: Path) -> Settings:
    model = section.given("model")
    limits = Limits(
        turns=_whole(section.entry("max_turns")),
        seconds=_seconds(section.entry("timeout")),
        depth=_depth(section.entry("max_depth")),
        concurrent=_whole(section.entry("max_concurrent")),
        tokens=_whole(section.entry("max_tokens")),
        cost=_cost(section.entry("max_cost")),
        stall=_seconds(section.entry("stall")),
    )
    retention = section.number("retention_days", minimum=0)
    profiles = section.section("profiles")
    rules = _rules(section.section("approvals"))
    approval_timeout = section.number("approval_timeout", minimum=0)
    coordination = _coordination(section.section("orchestrator"))
    exposed = section.given("expose_paths")
    section.finish()
    minimum, default, maximum = _timeouts(coordination)
    settings = Settings(
        model=None if model is None else model.word(),
        limits=limits,
        rules=rules or Rules(),
        approval_timeout=approval_timeout,
        subagent_types=None if coordination is None else coordination.texts("subagent_types"),
        subagent_default_timeout=default,
        subagent_min_timeout=minimum,
        subagent_max_timeout=maximum,
        subagent_runtime_mode=_runtime(coordination, "subagent_runtime_mode"),
        subagent_runtime_fallback_mode=_runtime(coordination, "subagent_runtime_fallback_mode"),
        subagent_delegation_directory=None
        if coordination is None
        else coordination.text("subagent_delegation_directory"),
        expose_paths=() if exposed is None else _paths(exposed),
        retention_days=RETENTION_DAYS if retention is None else retention,
        profiles={} if profiles is None else _profiles(profiles),
        file=path,
    )
    if coordination is not None:
        coordination.finish()
    return settings


def _coordination(orchestrator: Section | None) -> Section | None:
    if orchestrator is None:
        return None
    coordination = orchestrator.section("coordination")
    orchestrator.finish()
    return coordination


def _runtime(section: Section | None, key: str) -> RuntimeName | None:
    node = None if section is None else section.given(key)
    return None if node is None else node.choice(RUNTIMES)


def _paths(node: Node) -> tuple[str, ...]:
    return tuple(item.checked(_absolute) for item in node.items(what="a list of paths"))


def _absolute(path: object) -> str:
    """A path that walled runs are to see, as it is on this machine."""
    if not isinstance(path, str) or not path.startswith(("/", "~")):
        raise ConfigError(f"must be an absolute path, got {path!r}")
    found = Path(path).expanduser()
    if not found.exists():
        raise ConfigError(f"{path} does not exist")
    if str(found) == "/":
        raise ConfigError("/ cannot be shown behind a wall: it has everything in it")
    return str(found)


def _timeouts(section: Section | None) -> tuple[float, float, float]:
    """Minimum, default and maximum. A default outside the bounds stands: a person set it."""
    low, high = MODEL_ASKED_SECONDS
    if section is None:
        return low, SPAWNED_SECONDS, high
    default = section.number("subagent_default_timeout", minimum=0)
    minimum = section.number("subagent_min_timeout", minimum=0)
    maximum = section.number("subagent_max_timeout", minimum=0)
    low, high = low if minimum is None else minimum, high if maximum is None else maximum
    if low > high:
        node = section.given("subagent_max_timeout") or section.need("subagent_min_timeout")
        raise node.error(f"subagent_min_timeout ({low:g}) is more than subagent_max_timeout ({high:g})")
    return low, SPAWNED_SECONDS if default is None else default, high


def _profiles(section: Section) -> dict[str, ProfileSettings]:
    """By name in lower case."""
    found: dict[str, ProfileSettings] = {}
    for name, node in section.entries.items():
        Node(node.place, name).checked(check_name)
        other = found.get(name.casefold())
        if other is not None:
            raise node.error(f"is the same name as '{other.name}' on line {other.place.line}")
        found[name.casefold()] = _profile(name, node)
    return found


def _profile(name: str, node: Node) -> ProfileSettings:
    if node.value is None:
        return ProfileSettings(name, node.place)
    section = node.section()
    description, model = section.given("description"), section.given("model")
    runtime, workspace = section.given("runtime"), section.given("workspace")
    settings = ProfileSettings(
        name,
        node.place,
        {key: entry.place for key, entry in section.entries.items()},
        description=None if description is None else description.word(),
        instructions=section.text("instructions"),
        skills=section.texts("skills"),
        model=None if model is None else model.word(),
        tools=section.texts("tools"),
        limits=_limits(section.section("limits")),
        runtime=None if runtime is None else runtime.choice(RUNTIMES),
        workspace=None if workspace is None else workspace.choice(WORKSPACES),
        leaf=section.flag("leaf"),
        approvals=_rules(section.section("approvals")),
    )
    section.finish()
    return settings


def _rules(section: Section | None) -> Rules | None:
    if section is None:
        return None
    mode = section.given("mode")
    chosen = None if mode is None else mode.choice(MODES)
    if mode is not None and chosen == "walled":
        raise mode.error(NO_WALLS)
    kinds = (section.given(kind) for kind in ("allow", "ask", "deny"))
    rules = Rules(chosen, *(() if node is None else _rule_list(node) for node in kinds))
    section.finish()
    return rules


def _rule_list(node: Node) -> tuple[Rule, ...]:
    return tuple(item.checked(parse_rule) for item in node.items(what="a list of rules"))


def _limits(section: Section | None) -> Limits:
    if section is None:
        return Limits()
    limits = Limits(
        turns=_whole(section.entry("turns")),
        seconds=_seconds(section.entry("seconds")),
        depth=_depth(section.entry("depth")),
        tokens=_whole(section.entry("tokens")),
        cost=_cost(section.entry("cost")),
        stall=_seconds(section.entry("stall")),
    )
    section.finish({"concurrent": "is a limit of the whole tree: 'max_concurrent' at the top of the file"})
    return limits


def _whole(node: Node | None) -> int | UnsetType | None:
    if node is None:
        return UNSET
    return None if node.value is None else node.integer(minimum=0)


def _cost(node: Node | None) -> Decimal | UnsetType | None:
    if node is None:
        return UNSET
    return None if node.value is None else amount(node.number(minimum=0))


def _depth(node: Node | None) -> int | UnsetType:
    return UNSET if node is None else node.integer(minimum=0)


def _seconds(node: Node | None) -> float | UnsetType | None:
    if node is None:
        return UNSET
    return None if node.value is None else node.number(minimum=0)
