"""The settings of retinue.yaml, each declared once. Does not know which profiles exist (`project.py`).

model: scripted:script.yaml
max_depth: 3                     # levels below the primary; 0 disables nesting
max_concurrent: 8                # runs of a tree at once; null is unlimited
max_turns: 100                   # turns of one run; null is unlimited
timeout: 600                     # seconds of the primary; null (the default) is unlimited
max_tokens: 2000000              # tokens a whole tree may spend; null (the default) is unlimited
max_cost: 5.00                   # the same in US dollars; needs models whose price is known
stall: 300                       # seconds without an event in a run and below it; null: no limit
retention_days: 30               # days that `retinue gc` keeps trees
network: [docs.python.org, "*.example.com"]  # reachable hosts, none (the default), or full
telemetry: true                  # send spans and metrics to OTEL_EXPORTER_OTLP_ENDPOINT
workspace_setup: npm ci          # run in each new copy or worktree before its run begins
workspace_setup_timeout: 600     # seconds that workspace_setup may take
workspace_max_mib: 2048          # largest size of a new copy or worktree
resource_limits: {memory_mib: 4096, processes: 512, cpu_seconds: 14400, file_mib: 2048, open_files: 4096,
                  workspace_mib: 8192}
approval_timeout: 600            # seconds until an unanswered question is denied; null (the default) is never
notify_command: [notify-send, Retinue, "A question waits"]  # run for each question; RETINUE_QUESTION describes it
context_paths: [../api-specs]    # files and folders outside the project that every primary may read
expose_paths: [/usr/share]       # paths that sandboxed runs may read besides their own folders
container_image: localhost/retinue:py3.11-x86_64    # for runtime container; never pulled
container_flags: [--cpus=2]      # for podman or docker run; flags of the sandbox come after them
a2a_agents:                      # remote agents: config/remote_agents.py
  argocd: {url: "https://agents.example.com/argocd", auth: {bearer_env: ARGOCD_TOKEN}}
mcp_servers:                     # sources of more tools: config/servers.py
  files: {command: npx, args: [-y, "@modelcontextprotocol/server-filesystem", .]}
approvals:
  mode: ask                      # strict: every tool of the primary asks; sandboxed: none in a sandbox; yes: none
  allow: [shell(git status*)]    # deny wins, then ask, then allow, then the mode
  ask: [edit(docs/**)]
  deny: [shell(git push*)]
subagent_agents:                 # the members of each subagent of the primary: config/coordination.py
  - {model: "openai:NAME"}
orchestrator:                    # config/coordination.py
  voting_sensitivity: checklist_gated            # rounds need it
  coordination:
    enable_subagents: true       # false: no agent gets spawn tools
    subagent_orchestrator: {enabled: true, agents: [{model: "anthropic:NAME"}, {model: "openai:NAME"}]}
    round_evaluator_before_checklist: true       # turns on rounds; needs the keys around it
    orchestrator_managed_round_evaluator: true
    subagent_types: [explorer, round_evaluator]  # null: the default types; []: none
    subagent_default_timeout: 1800
    subagent_min_timeout: 60     # bounds for a timeout that a model asks for
    subagent_max_timeout: 14400
    subagent_runtime_mode: isolated              # where tools run: a sandbox, this process, or the host
    subagent_host_launch_prefix: [nice]          # words before the command that starts a sandbox
    subagent_delegation_directory: /outbox       # in a container, for delegated: the folder shared with its host
    subagent_reports: strict     # a run whose events do not reach the root fails; best_effort: it continues
    subagent_runtime_fallback_mode: inherited    # used if a sandbox cannot be built; without it the run is refused
profiles:
  explorer:
    model: scripted:script.yaml
    tools: [read, grep, glob]
    limits: {turns: 30, seconds: 900, depth: 0, tokens: 200000, cost: 0.50, stall: 120}
    runtime: inherited
    workspace: scratch
    leaf: true
    network: none                # the part of the network above it may reach: hosts, none or full
    approvals: {deny: [shell]}   # in addition to the rules above: stricter, never laxer
  poet:                          # no SUBAGENT.md has this name, so this defines the profile
    description: Writes verse.
    instructions: You write verse.
    skills: [report-writing]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retinue.config.coordination import (
    ENABLED,
    MEMBERS,
    MEMBERS_EXAMPLE,
    NEW_MEMBERS,
    NO_EFFECT,
    ORCHESTRATOR,
    TEAM_KEYS,
    CoordinationSettings,
    OrchestratorSettings,
    check_orchestrator,
)
from retinue.config.files import read_text
from retinue.config.located import Node
from retinue.config.location import SourceLocation
from retinue.config.models import PROVIDERS
from retinue.config.remote_agents import AGENTS, NEW_AGENTS
from retinue.config.sandbox import CONTEXT_PATHS, NETWORK, OPEN_NETWORK, PATHS, RESOURCE_LIMITS
from retinue.config.schema import (
    ABOVE_DEFAULT,
    ANY_COMMAND,
    ANY_VALUE,
    BELOW_DEFAULT,
    COUNT,
    DRAFT,
    FLAG,
    NUMBER,
    POSITIVE,
    TEXT,
    TEXTS,
    WHOLE,
    WORD,
    Given,
    Kind,
    Loosening,
    Restricted,
    Section,
    Setting,
    TrustRule,
    choice,
    limit,
    list_of,
    list_settings,
    make_named_schema,
    nullable,
    setting,
    text_for,
    trust_for,
)
from retinue.config.servers import NEW_SERVERS, SERVERS, TOOL_NAMES, check_tool_servers
from retinue.config.yaml import parse_yaml
from retinue.core.limits import (
    DEFAULT_DEPTH,
    DEFAULT_TURNS,
    LIMIT_KEYS,
    RETENTION_DAYS,
    SETUP_SECONDS,
    SPAWNED_SECONDS,
    WORKSPACE_MIB,
    Limits,
    ResourceLimits,
    parse_amount,
)
from retinue.core.profiles import (
    DEFAULT_RUNTIME,
    NAME_PATTERN,
    RUNTIMES,
    WORKSPACES,
    Profile,
    check_name,
    explain_useless_fallback,
)
from retinue.core.rules import DEFAULT_MODE, MODES, RULE_PATTERN, Rules, parse_rule
from retinue.core.servers import McpServer, server_of
from retinue.core.teams import Member

_RULES = list_of(text_for(parse_rule, RULE_PATTERN), what="a list of rules")
_COST = Kind(lambda node: parse_amount(node.number(minimum=0)), NUMBER.make_schema)
_SERVER_EXAMPLE = '{files: {command: npx, args: [-y, "@modelcontextprotocol/server-filesystem", .]}}'


APPROVALS = Section(
    "Rules for what asks: deny wins, then ask, then allow, then the mode",
    Rules,
    {
        "mode": Setting(
            choice(MODES),
            "ask: before a tool changes something; strict: before every tool of the primary; sandboxed: as ask, but "
            "not for edits, commands and programs in a sandboxed workspace of its own; yes: never",
            default=DEFAULT_MODE,
            trust=trust_for(*(mode for mode in MODES if mode not in ("ask", "strict"))),
        ),
        "allow": Setting(
            _RULES, "calls that run without asking", example="[shell(git status*), edit(docs/**)]", trust=ANY_VALUE
        ),
        "ask": Setting(_RULES, "calls that ask in every mode", example="[read(.env*)]"),
        "deny": Setting(_RULES, "calls that never run", example="[shell(git push*)]"),
    },
)
PROFILE_LIMITS = Section(
    "Limits of each run of this profile",
    Limits,
    {
        "turns": limit(WHOLE, "turns of the run; null is unlimited", default=DEFAULT_TURNS, example="30"),
        "seconds": limit(NUMBER, "how long it may take; null is unlimited", default=SPAWNED_SECONDS, example="900"),
        "depth": limit(WHOLE, "levels of subagents below it", default=DEFAULT_DEPTH, example="0", null="refused"),
        "tokens": limit(WHOLE, "what it and all below it may spend; null is unlimited", example="200000"),
        "cost": limit(_COST, "the same in US dollars; needs models whose price is known", example="0.50"),
        "stall": limit(
            NUMBER,
            "seconds without an event in it and below it before it counts as stalled; null: no limit",
            example="120",
        ),
    },
    hints={"concurrent": "is a limit of the whole tree: 'max_concurrent' at the top of the file"},
)


def _drop_server_tools(tools: tuple[str, ...], _: Setting) -> Restricted:
    """Remove the tools of MCP servers: without trust there are no servers."""
    return tuple(tool for tool in tools if not server_of(tool)), []


# The keys are fields of `Profile`.
PROFILE = Section(
    "Rights and limits of one agent; its SUBAGENT.md, if it has one, says who it is",
    dict,
    {
        "description": Setting(
            WORD, "what it is for; defines a profile that has no SUBAGENT.md", example="Writes verse."
        ),
        "instructions": Setting(TEXT, "its system prompt, if it has no SUBAGENT.md", example="You write verse."),
        "skills": Setting(TEXTS, "the skills it knows of, if it has no SUBAGENT.md", example="[report-writing]"),
        "model": Setting(WORD, "the model it runs on, instead of the one above", example=PROVIDERS[1].default),
        "tools": Setting(
            TOOL_NAMES,
            "its tools; its parent must have them too",
            example="[read, glob, grep]",
            trust=TrustRule("", _drop_server_tools),
        ),
        "limits": Setting(PROFILE_LIMITS, "its limits", example="{turns: 30, seconds: 900}"),
        "runtime": Setting(choice(RUNTIMES), "where its tools run", example="inherited", trust=trust_for("inherited")),
        "workspace": Setting(choice(WORKSPACES), "the kind of its workspace", example="scratch"),
        "leaf": Setting(FLAG, "true: it may not have subagents of its own", default=False, example="true"),
        "network": Setting(
            NETWORK, "the part of the network above that it may reach: hosts, none or full", example="[docs.python.org]"
        ),
        "approvals": Setting(
            APPROVALS.value_kind,
            "additional rules; they can only be stricter",
            example="{deny: [shell]}",
        ),
        "subagent_agents": Setting(
            MEMBERS,
            "the members of each subagent it spawns, where `subagent_orchestrator` is enabled",
            default=(),
            example=MEMBERS_EXAMPLE,
            trust=NEW_MEMBERS,
        ),
    },
)


def _read_profiles(node: Node) -> dict[str, Given]:
    """Read the given keys of each profile, by its name."""
    entries = node.named_entries(check_name)
    return {name: {} if entry.value is None else PROFILE.read(entry) for name, entry in entries.items()}


def _restrict_profiles(profiles: Mapping[str, Given], _: Setting) -> Restricted:
    """Apply the trust rules of each profile's keys."""
    narrow = {name: PROFILE.restrict(given) for name, given in profiles.items()}
    loosened = [each.with_prefix(name) for name, (_, found) in narrow.items() for each in found]
    return {name: given for name, (given, _) in narrow.items()}, loosened


_PROFILES = Kind(_read_profiles, lambda: make_named_schema(NAME_PATTERN, nullable(PROFILE.make_schema())))


@dataclass(frozen=True)
class Settings:
    """The settings in force. `limits` are those of the primary and its tree; one that the file does not set is UNSET.
    `profiles` are the given keys of each profile by name. `given` are the keys of the file, from which the other fields
    were made, and `document` has their places."""

    model: str | None = setting(WORD, "PROVIDER:NAME or scripted:FILE", example=PROVIDERS[0].default)
    subagent_agents: tuple[Member, ...] = setting(
        MEMBERS,
        "the members of each subagent that the primary spawns, where `subagent_orchestrator` is enabled",
        default=(),
        example=MEMBERS_EXAMPLE,
        trust=NEW_MEMBERS,
    )
    approvals: Rules = setting(
        APPROVALS,
        "which calls ask you before they run; deny wins, then ask, then allow",
        default=Rules(),
        example="",
    )
    approval_timeout: float | None = setting(
        NUMBER, "seconds after which a question without an answer is denied; null: never", example="600"
    )
    notify_command: tuple[str, ...] = setting(
        TEXTS,
        "a command run for each question that waits for a person, such as a desktop notification",
        default=(),
        example="[notify-send, Retinue, A question waits]",
        trust=ANY_COMMAND,
    )
    network: tuple[str, ...] | str | None = setting(
        NETWORK,
        "hosts that agents and sandboxed commands may reach: a list, none or full",
        example='[docs.python.org, "*.example.com"]',
        trust=OPEN_NETWORK,
    )
    mcp_servers: tuple[McpServer, ...] = setting(
        SERVERS, "MCP servers whose tools runs may use, by name", default=(), example=_SERVER_EXAMPLE, trust=NEW_SERVERS
    )
    a2a_agents: tuple[Profile, ...] = setting(
        AGENTS,
        "A2A agents that your agents may delegate to, by name",
        default=(),
        example="{argocd: {url: 'https://agents.example.com/argocd', auth: {bearer_env: ARGOCD_TOKEN}}}",
        trust=NEW_AGENTS,
    )
    workspace_setup: str | None = setting(
        WORD, "a command run in each new copy or worktree before its run begins", example="npm ci", trust=ANY_VALUE
    )
    workspace_setup_timeout: float = setting(POSITIVE, "seconds that workspace_setup may take", default=SETUP_SECONDS)
    workspace_max_mib: int = setting(
        COUNT, "largest size of a new copy or worktree, in MiB", default=WORKSPACE_MIB, trust=ABOVE_DEFAULT
    )
    context_paths: tuple[str, ...] = setting(
        CONTEXT_PATHS,
        "files and folders outside the project that every primary may read, and pass on to its subagents",
        default=(),
        example="[../api-specs]",
        trust=ANY_VALUE,
    )
    expose_paths: tuple[str, ...] = setting(
        PATHS,
        "paths that sandboxed runs may read besides their own folders",
        default=(),
        example="[/opt/toolchain]",
        trust=ANY_VALUE,
    )
    container_image: str | None = setting(
        WORD,
        "the image of runtime container; it is never pulled",
        example="localhost/retinue:py3.11-x86_64",
        trust=ANY_VALUE,
    )
    container_flags: tuple[str, ...] = setting(
        TEXTS,
        "flags for podman or docker run; the flags of the sandbox come after them",
        default=(),
        example="[--cpus=2]",
        trust=ANY_VALUE,
    )
    resource_limits: ResourceLimits = setting(
        RESOURCE_LIMITS, "resource limits of each sandboxed run", default=ResourceLimits(), example=""
    )
    telemetry: bool | None = setting(
        FLAG, "true: send spans and metrics to OTEL_EXPORTER_OTLP_ENDPOINT", example="true"
    )
    retention_days: float = setting(
        NUMBER, "days that `retinue gc` keeps trees", default=RETENTION_DAYS, trust=BELOW_DEFAULT
    )
    orchestrator: OrchestratorSettings = setting(
        ORCHESTRATOR, "settings of subagents", default=OrchestratorSettings(), example=""
    )
    profiles: Mapping[str, Given] = setting(
        _PROFILES,
        "tools, limits and rules of each agent; its SUBAGENT.md has its instructions",
        default={},
        trust=TrustRule("", _restrict_profiles),
    )
    limits: Limits = field(default_factory=Limits)
    file: Path | None = None
    given: Given = field(default_factory=dict, compare=False, repr=False)
    document: Node = field(default=Node(SourceLocation("retinue.yaml"), None), compare=False, repr=False)

    @property
    def coordination(self) -> CoordinationSettings:
        return self.orchestrator.coordination


def _declare_limit(name: str, kind: Kind, more: str = "null: no limit", **given: Any) -> Setting:
    """Declare a limit of the primary and its tree by the name of its field in `Limits`."""
    key = LIMIT_KEYS[name]
    return limit(kind, f"{key.help}; {more}", default=key.default, **given)


def _make_settings(**given: Any) -> Settings:
    limits = {name: given.pop(key.name) for name, key in LIMIT_KEYS.items() if key.name in given}
    return Settings(limits=Limits(**limits), **given)


SETTINGS = Section(
    "retinue.yaml: models, rights and limits of the agents in this project",
    _make_settings,
    {
        **list_settings(Settings),
        "max_depth": _declare_limit("depth", WHOLE, "0: none", null="refused"),
        "max_concurrent": _declare_limit("concurrent", WHOLE),
        "max_turns": _declare_limit("turns", WHOLE),
        "timeout": _declare_limit("seconds", NUMBER, example="600"),
        "stall": _declare_limit("stall", NUMBER, example="300"),
        "max_tokens": _declare_limit("tokens", WHOLE, example="2000000"),
        "max_cost": _declare_limit("cost", _COST, example="5.00"),
    },
    hints={
        "agents": "there is exactly one parent agent: give its model as 'model' at the top of the file, its child team "
        "as 'subagent_agents' next to it, and members for all as 'agents' in 'subagent_orchestrator'"
    },
)


def load_settings(path: Path | None) -> Settings:
    """Read the settings of a file, or return the defaults without a file."""
    return Settings() if path is None else parse_settings(read_text(path), path)


def parse_settings(text: str, path: Path) -> Settings:
    """Read the settings from `text`, the content of the file `path`. An empty text sets nothing."""
    node = parse_yaml(text, str(path))
    if node.value is None:
        return Settings(file=path, document=node)
    node.entries(what="'key: value' lines")
    given = SETTINGS.read(node)
    settings: Settings = SETTINGS.make(given, given=given, file=path, document=node)
    check_orchestrator(settings.orchestrator, node)
    _check_members(settings)
    _check_fallback(settings)
    for name in settings.profiles:
        check_tool_servers(node.get("profiles", name, "tools"), settings.mcp_servers)
    return settings


def restrict(settings: Settings) -> tuple[Settings, list[Loosening]]:
    """Return the settings that apply without the user's trust, and the loosenings they leave out."""
    given, loosened = SETTINGS.restrict(settings.given)
    narrow: Settings = SETTINGS.make(given, given=given, file=settings.file, document=settings.document)
    return narrow, list(dict.fromkeys(loosened))


def find_unsandboxed(settings: Settings) -> list[Loosening]:
    """Return the settings that let runs work without a sandbox."""
    keys = ("subagent_runtime_mode", "subagent_runtime_fallback_mode", "runtime")
    return [each for each in restrict(settings)[1] if each.key.rpartition(".")[2] in keys]


def settings_schema() -> dict[str, Any]:
    """Return the JSON schema of retinue.yaml, for editors and other programs."""
    return {"$schema": DRAFT, **nullable(SETTINGS.make_schema())}


def _check_fallback(settings: Settings) -> None:
    """Check that the fallback can take effect, because some run has a stricter runtime."""
    fallback = settings.coordination.subagent_runtime_fallback_mode
    if fallback is None:
        return
    own = [given["runtime"] for given in settings.profiles.values() if "runtime" in given]
    why = explain_useless_fallback(fallback, [settings.coordination.subagent_runtime_mode or DEFAULT_RUNTIME, *own])
    if why:
        raise settings.document.locate("orchestrator", "coordination", "subagent_runtime_fallback_mode").error(why)


def _check_members(settings: Settings) -> None:
    """Check that the members of the primary and of profiles can take effect."""
    teams = settings.coordination.subagent_orchestrator
    for keys, members in list_members(settings):
        node = settings.document.locate(*keys)
        if keys[0] == "profiles" and members and settings.profiles[keys[1]].get("leaf"):
            raise node.error("has no effect with 'leaf: true', which lets it spawn no subagents: leave one of them out")
        if members and not teams.enabled:
            raise node.error(NO_EFFECT.format(switch=ENABLED))


def list_members(settings: Settings) -> Iterator[tuple[tuple[str, ...], tuple[Member, ...]]]:
    """Yield the members of the shared pool, of the primary and of each profile, with the path of their key."""
    yield (*TEAM_KEYS, "agents"), settings.coordination.subagent_orchestrator.agents
    yield ("subagent_agents",), settings.subagent_agents
    for name, given in settings.profiles.items():
        yield ("profiles", name, "subagent_agents"), given.get("subagent_agents", ())
