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
network: [docs.python.org, "*.example.com"]  # what may be reached: hosts, none (and the default), or full
telemetry: true                  # spans and metrics to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names
workspace_setup: npm ci          # run in each new copy or worktree before its run begins
workspace_setup_timeout: 600     # its seconds
workspace_max_mib: 2048          # how large a copy or worktree may be when it is made
caps: {memory_mib: 4096, processes: 512, cpu_seconds: 14400, file_mib: 2048, open_files: 4096, workspace_mib: 8192}
approval_timeout: 600            # seconds a question waits, then it is a no; null (and the default) is for ever
expose_paths: [/usr/share]       # what walled runs may read beside their own folders
container_image: localhost/retinue:py3.11-x86_64    # of runtime container; it is never pulled
container_flags: [--cpus=2]      # for podman or docker run; the flags of the wall come after them
mcp_servers:                     # where tools come from beside our own: config/servers.py
  files: {command: npx, args: [-y, "@modelcontextprotocol/server-filesystem", .]}
approvals:
  mode: ask                      # strict: every tool of the primary asks; walled: nothing inside a wall; yes: nothing
  allow: [shell(git status*)]    # deny wins, then ask, then allow, then the mode
  ask: [edit(docs/**)]
  deny: [shell(git push*)]
orchestrator:
  coordination:
    subagent_types: [explorer]   # null: the default ones; []: none
    subagent_default_timeout: 1800
    subagent_min_timeout: 60     # bounds for a timeout that a model asks for
    subagent_max_timeout: 14400
    subagent_runtime_mode: isolated              # where runs live: isolated or container (walls), inherited, delegated
    subagent_host_launch_prefix: [nice]          # words before the command that starts a walled run
    subagent_delegation_directory: /outbox       # in a container, for delegated: the folder shared with its host
    subagent_reports: strict     # a run whose events do not reach the root fails; best_effort: it goes on unseen
    subagent_runtime_fallback_mode: inherited    # where a wall cannot be built; without it such a run is refused
profiles:
  explorer:
    model: scripted:script.yaml
    tools: [read, grep, glob]
    limits: {turns: 30, seconds: 900, depth: 0, tokens: 200000, cost: 0.50, stall: 120}
    runtime: inherited
    workspace: scratch
    leaf: true
    network: none                # of what is said above: hosts, none or full
    approvals: {deny: [shell]}   # on top of the rules above: stricter, never laxer
  poet:                          # a name that no SUBAGENT.md has: this defines it
    description: Writes verse.
    instructions: You write verse.
    skills: [report-writing]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from retinue.config.exposed_paths import PATH_PATTERN, shown_path
from retinue.config.files import read_text
from retinue.config.located import Node, Section
from retinue.config.location import Place
from retinue.config.models import PROVIDERS
from retinue.config.sandbox import CAPS, REACH
from retinue.config.schema import (
    COUNT,
    DRAFT,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    TEXTS,
    WHOLE,
    WORD,
    Key,
    Kind,
    Shape,
    choice,
    mapping,
    nullable,
    texts_like,
)
from retinue.config.servers import SERVERS, TOOL_NAMES, check_tools
from retinue.config.yaml import parse_yaml
from retinue.core.limits import (
    MODEL_ASKED_SECONDS,
    RETENTION_DAYS,
    SETUP_SECONDS,
    SPAWNED_SECONDS,
    Caps,
    Limits,
    amount,
)
from retinue.core.profiles import NAME_PATTERN, RUNTIMES, WORKSPACES, RuntimeName, WorkspaceName, check_name
from retinue.core.rules import MODES, RULE_PATTERN, Rules, parse_rule
from retinue.core.servers import McpServer


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
    network: tuple[str, ...] | str | None = None


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
    subagent_host_launch_prefix: tuple[str, ...] = ()
    subagent_delegation_directory: str | None = None
    subagent_reports: Literal["strict", "best_effort"] = "strict"
    expose_paths: tuple[str, ...] = ()
    container_image: str | None = None
    container_flags: tuple[str, ...] = ()
    retention_days: float = RETENTION_DAYS
    telemetry: bool | None = None
    network: tuple[str, ...] | str | None = None
    workspace_setup: str | None = None
    workspace_setup_timeout: float = SETUP_SECONDS
    workspace_max_mib: int | None = None
    caps: Caps = Caps()  # noqa: RUF009 - frozen
    mcp_servers: tuple[McpServer, ...] = ()
    profiles: Mapping[str, ProfileSettings] = field(default_factory=dict)
    file: Path | None = None


def load_settings(path: Path | None) -> Settings:
    """The settings of a file; without one the defaults. An empty file says nothing."""
    return Settings() if path is None else parse_settings(read_text(path), path)


def parse_settings(text: str, path: Path) -> Settings:
    """The settings of a text that stands in that file."""
    node = parse_yaml(text, str(path))
    if node.value is None:
        return Settings(file=path)
    return _settings(node.section(what="'key: value' lines"), path)


def schema() -> dict[str, Any]:
    """What a retinue.yaml may hold, for editors and other programs."""
    return {"$schema": DRAFT, **nullable(SETTINGS.schema())}


def _rules(found: dict[str, Any]) -> Rules:
    return Rules(found.get("mode"), *(found.get(kind) or () for kind in ("allow", "ask", "deny")))


def _limits(found: dict[str, Any], names: Mapping[str, str]) -> Limits:
    """`names` gives the key of each limit. A cost is exactly what a person wrote."""
    values = {limit: found[key] for limit, key in names.items() if key in found}
    if values.get("cost") is not None:
        values["cost"] = amount(values["cost"])
    return Limits(**values)


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
    found = PROFILE.read(section)
    found["limits"] = found.get("limits") or Limits()
    return ProfileSettings(name, node.place, {key: entry.place for key, entry in section.entries.items()}, **found)


_RULE_LIST = texts_like(lambda node: node.checked(parse_rule), RULE_PATTERN, what="a list of rules")
RULES = Shape(
    "Rules for what asks: deny wins, then ask, then allow, then the mode",
    (
        Key(
            "mode",
            choice(MODES),
            "ask: before what changes something; strict: before every tool of the primary; walled: as ask, but not "
            "for edit, write and shell in a walled workspace of its own; yes: never",
            "ask",
        ),
        Key("allow", _RULE_LIST, "what may run without asking", "[shell(git status*), edit(docs/**)]"),
        Key("ask", _RULE_LIST, "what asks whatever the mode says", "[read(.env*)]"),
        Key("deny", _RULE_LIST, "what never runs", "[shell(git push*)]"),
    ),
)
_PATHS = texts_like(lambda node: node.checked(shown_path), PATH_PATTERN, what="a list of paths")
LIMITS = Shape(
    "Limits of each run of this profile",
    (
        Key("turns", WHOLE, "turns of the run; null is unlimited", "30"),
        Key("seconds", NUMBER, "how long it may take; null is unlimited", "900"),
        Key("depth", WHOLE, "levels of subagents below it", "0", null=False),
        Key("tokens", WHOLE, "what it and all below it may spend; null is unlimited", "200000"),
        Key("cost", NUMBER, "the same in US dollars; needs models whose price is known", "0.50"),
        Key("stall", NUMBER, "seconds in which nothing may happen in it and below it; null is none", "120"),
    ),
    {"concurrent": "is a limit of the whole tree: 'max_concurrent' at the top of the file"},
)
_OF_A_RUN = {name: name for name in ("turns", "seconds", "depth", "tokens", "cost", "stall")}
_OF_THE_TREE = {
    "turns": "max_turns",
    "seconds": "timeout",
    "depth": "max_depth",
    "concurrent": "max_concurrent",
    "tokens": "max_tokens",
    "cost": "max_cost",
    "stall": "stall",
}
PROFILE = Shape(
    "What one agent may do; who it is stands in its SUBAGENT.md, if it has one",
    (
        Key("description", WORD, "what it is for; defines a profile that has no SUBAGENT.md", "Writes verse."),
        Key("instructions", TEXT, "its system prompt, where there is no SUBAGENT.md", "You write verse."),
        Key("skills", TEXTS, "skills it knows of, where there is no SUBAGENT.md", "[report-writing]"),
        Key("model", WORD, "the model it runs on, instead of the one above", PROVIDERS[1].default),
        Key("tools", TOOL_NAMES, "the tools it has, of those its parent has", "[read, glob, grep]"),
        Key(
            "limits",
            mapping(LIMITS, lambda found: _limits(found, _OF_A_RUN)),
            "its limits",
            "{turns: 30, seconds: 900}",
        ),
        Key("runtime", choice(RUNTIMES), "where it runs", "inherited"),
        Key("workspace", choice(WORKSPACES), "the folder it writes: its own, or its parent's", "scratch"),
        Key("leaf", FLAG, "true: it may not have subagents of its own", "true"),
        Key("network", REACH, "what it may reach of what is said above: hosts, none or full", "[docs.python.org]"),
        Key(
            "approvals", mapping(RULES, _rules), "rules on top of those above: stricter, never laxer", "{deny: [shell]}"
        ),
    ),
)
_PROFILES = Kind(
    lambda node: _profiles(node.section()),
    {
        "type": "object",
        "propertyNames": {"pattern": NAME_PATTERN},
        "additionalProperties": nullable(PROFILE.schema()),
    },
)
COORDINATION = Shape(
    "Subagents that a model asks for",
    (
        Key("subagent_types", TEXTS, "the profiles a model may name; null: the default ones; []: none", "[explorer]"),
        Key("subagent_default_timeout", NUMBER, "seconds of a subagent, unless it says otherwise", "1800"),
        Key("subagent_min_timeout", NUMBER, "the least that a model may ask for", "60"),
        Key("subagent_max_timeout", NUMBER, "the most that a model may ask for", "14400"),
        Key(
            "subagent_runtime_mode", choice(RUNTIMES), "where runs live: behind a wall, or in this process", "isolated"
        ),
        Key("subagent_delegation_directory", WORD, "in a container: the folder shared with `retinue watch`", "/outbox"),
        Key(
            "subagent_reports",
            choice(("strict", "best_effort")),
            "in an MCP server: what becomes of a run whose events do not reach the process that started the server; "
            "strict: it fails; best_effort: it goes on",
            "strict",
        ),
        Key("subagent_runtime_fallback_mode", choice(RUNTIMES), "what they get where no wall stands", "inherited"),
        Key(
            "subagent_host_launch_prefix", TEXTS, "words before the command that starts a walled run", "[nice, -n, '5']"
        ),
    ),
)
ORCHESTRATOR = Shape("Subagents", (Key("coordination", mapping(COORDINATION), "how a model may have subagents"),))
_SERVER_EXAMPLE = '{files: {command: npx, args: [-y, "@modelcontextprotocol/server-filesystem", .]}}'
SETTINGS = Shape(
    "retinue.yaml: what agents in this project run on and what they may do",
    (
        Key("model", WORD, "PROVIDER:NAME or scripted:FILE", PROVIDERS[0].default),
        Key("max_depth", WHOLE, "levels of subagents below the primary; 0: none", "3", null=False),
        Key("max_concurrent", WHOLE, "subagents of a tree at once; null is unlimited", "8"),
        Key("max_turns", WHOLE, "turns of one run; null is unlimited", "100"),
        Key("timeout", NUMBER, "seconds of the primary; null is unlimited", "600"),
        Key("max_tokens", WHOLE, "what a whole tree may spend; null is unlimited", "2000000"),
        Key("max_cost", NUMBER, "the same in US dollars; needs models whose price is known", "5.00"),
        Key("stall", NUMBER, "seconds in which nothing may happen in a run and below it; null is none", "300"),
        Key("retention_days", NUMBER, "what `retinue gc` keeps", "30"),
        Key("workspace_setup", WORD, "a command run in each new copy or worktree before its run begins", "npm ci"),
        Key("workspace_setup_timeout", POSITIVE, "its seconds", "600"),
        Key("workspace_max_mib", COUNT, "how large a copy or worktree may be when it is made", "2048"),
        Key("caps", CAPS, "what each run behind a wall may use of the machine"),
        Key(
            "network",
            REACH,
            "what may be reached: hosts, none, or full (commands behind a wall too)",
            '[docs.python.org, "*.example.com"]',
        ),
        Key("mcp_servers", SERVERS, "MCP servers that runs may have tools from, by name", _SERVER_EXAMPLE),
        Key("expose_paths", _PATHS, "what walled runs may read beside their own folders", "[/opt/toolchain]"),
        Key("container_image", WORD, "of runtime container; it is never pulled", "localhost/retinue:py3.11-x86_64"),
        Key("container_flags", TEXTS, "for podman or docker run; those of the wall come after them", "[--cpus=2]"),
        Key("telemetry", FLAG, "spans and metrics to the collector that OTEL_EXPORTER_OTLP_ENDPOINT names", "true"),
        Key("approval_timeout", NUMBER, "seconds a question waits, then it is a no; null is for ever", "600"),
        Key("approvals", mapping(RULES, _rules), "what asks you before it runs; deny wins, then ask, then allow"),
        Key("orchestrator", mapping(ORCHESTRATOR), "subagents that a model asks for"),
        Key("profiles", _PROFILES, "what each agent may do; who it is stands in its SUBAGENT.md"),
    ),
)


def _settings(section: Section, path: Path) -> Settings:
    found = SETTINGS.read(section)
    coordination = (found.get("orchestrator") or {}).get("coordination") or {}
    given = {key: value for key, value in coordination.items() if value is not None}
    retention, timeout = found.get("retention_days"), found.get("workspace_setup_timeout")
    settings = Settings(
        model=found.get("model"),
        limits=_limits(found, _OF_THE_TREE),
        rules=found.get("approvals") or Rules(),
        approval_timeout=found.get("approval_timeout"),
        retention_days=RETENTION_DAYS if retention is None else retention,
        workspace_setup=found.get("workspace_setup"),
        workspace_setup_timeout=SETUP_SECONDS if timeout is None else timeout,
        workspace_max_mib=found.get("workspace_max_mib"),
        caps=found.get("caps") or Caps(),
        telemetry=found.get("telemetry"),
        network=found.get("network"),
        mcp_servers=found.get("mcp_servers") or (),
        expose_paths=found.get("expose_paths") or (),
        container_image=found.get("container_image"),
        container_flags=found.get("container_flags") or (),
        profiles=found.get("profiles") or {},
        file=path,
        **given,
    )
    _check_bounds(settings, section)
    for each in section.need("profiles").section().entries.values() if settings.profiles else ():
        check_tools(None if each.value is None else each.section().entry("tools"), settings.mcp_servers)
    return settings


def _check_bounds(settings: Settings, section: Section) -> None:
    """A default outside the bounds stands: a person set it."""
    low, high = settings.subagent_min_timeout, settings.subagent_max_timeout
    if low > high:
        coordination = section.need("orchestrator").section().need("coordination").section()
        node = coordination.given("subagent_max_timeout") or coordination.need("subagent_min_timeout")
        raise node.error(f"subagent_min_timeout ({low:g}) is more than subagent_max_timeout ({high:g})")
