"""Turning a profile into a plan: which model, which tools, which words. Never wider than what the parent has.

A child chosen by a model has at most its parent's tools. A profile that a person put among the parent's tools, or a
program spawns, by value brings its own: giving it was the permission. Plans are cached, so that a thousand runs of one
profile share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from retinue.agent.local_tools import SandboxedTool, offer_tools_to_programs
from retinue.core import secrets
from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import Warned
from retinue.core.messages import Model
from retinue.core.network import Hosts, intersect_hosts, is_full, parse_hosts
from retinue.core.plans import HostTool, Plan, Runtime
from retinue.core.ports import Tool, ToolServers
from retinue.core.profiles import Profile, RuntimeName, Task
from retinue.core.rules import CODE_MODE
from retinue.core.servers import PREFIX
from retinue.models.wrappers import RedactingModel
from retinue.protocol import subagent_tools
from retinue.tools import answer, web
from retinue.tools.dialer import Dialer
from retinue.tools.functions import FunctionTool, HostedTool
from retinue.tools.local import LOCAL
from retinue.tools.subagents import (
    GENERIC,
    ApplySubagent,
    GetAgent,
    ListAgents,
    SpawnAgent,
    SpawnSubagents,
    SubagentControlTool,
    SubagentTool,
)

SPAWNING: dict[str, Callable[[], Tool]] = {
    "spawn_subagents": SpawnSubagents, "spawn_agent": SpawnAgent, "list_agents": ListAgents, "get_agent": GetAgent,
    "apply_subagent": ApplySubagent,
    **{name: partial(SubagentControlTool, name) for name in subagent_tools.TOOLS},
}  # fmt: skip
WEB = {web.FETCH.name: web.FETCH, web.SEARCH.name: web.SEARCH}
CACHED_PLANS = 4096
_LOGGED_FIELDS = (
    "name", "instructions", "description", "workspace", "limits", "skills", "leaf", "nickname", "source",
)  # fmt: skip
NO_HOSTS = "{tool} is not available: no host may be fetched (`network:` in retinue.yaml names them)."
NO_SEARCH = "web_search is not available: the provider of this model has none that can be bound to the allowed hosts."
NOT_BOUND = (
    "the network setting does not hold for commands of this run: it has no sandbox (runtime '{runtime}'), so its shell "
    "reaches whatever you can"
)
NONE_OF = "neither {tools} is available here: only what is on this machine can be used."

Models = Callable[[str | Model], Model]
Runtimes = Callable[[Profile, Plan | None, Hosts], tuple[Runtime, RuntimeName, Sequence[Warned]]]


class ProfilePlanner:
    """Holds the profiles there are and makes plans of them. `network` is what primaries may reach; None: nobody has
    said it, and it is nothing."""

    def __init__(
        self,
        profiles: Sequence[Profile],
        *,
        models: Models,
        runtimes: Runtimes,
        default_model: str | Model | None,
        skills: Callable[[Profile], str],
        network: Hosts | None,
        dialer: Dialer,
        servers: ToolServers | None = None,
    ) -> None:
        self._profiles = {profile.name.lower(): profile for profile in profiles}
        self._models = models
        self._runtimes = runtimes
        self._default_model = default_model
        self._skills = skills
        self._network = network
        self._dialer = dialer
        self._servers = servers
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def plan(
        self,
        profile: Profile | str,
        *,
        task: Task,
        parent: Plan | None,
        given: bool = False,
        can_spawn: bool = True,
    ) -> Plan:
        if isinstance(profile, str):
            profile, given = self._find_profile(profile, parent), False
        given = given or parent is None or profile in (parent.profile.tools or ())
        key = (profile, parent, task.model, given, can_spawn, 0 if self._servers is None else self._servers.version)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= CACHED_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make_plan(profile, task, parent, given=given, can_spawn=can_spawn)
        return plan

    def _find_profile(self, name: str, parent: Plan | None) -> Profile:
        if name == GENERIC.name and name not in self._profiles:
            return GENERIC
        known = {**self._profiles, **{child.name.lower(): child for child in (parent.children if parent else ())}}
        found = known.get(name.lower())
        if found is None:
            raise NotFound(f"unknown profile {name!r}; available: {', '.join(sorted(known)) or 'none'}")
        return found

    def _make_plan(self, profile: Profile, task: Task, parent: Plan | None, *, given: bool, can_spawn: bool) -> Plan:
        tools, host = self._make_tools(profile, parent, given=given)
        children = self._list_children(tools)
        _bind_subagent_tools(tools, children, can_spawn=can_spawn)
        output = None if profile.output is None else answer.make_output(profile.output)
        if output is not None and profile.has_model:
            tools[answer.NAME] = answer.FinalAnswer(output)
        network = self._network or () if parent is None else parent.network
        if profile.network is not None:
            network = intersect_hosts(network, parse_hosts(profile.network))
        runtime, floor, fallback = self._runtimes(profile, parent, network)
        model, model_name = self._choose_model(profile, task, parent) if profile.has_model else (None, "")
        notes = self._bind_web_tools(profile, tools, host, network, model)
        offer_tools_to_programs(tools, host, named=CODE_MODE in (profile.tools or ()))
        lacks = self._find_missing_tools(profile, parent)
        specs = tuple(tool.spec for tool in tools.values())
        if secrets.has_secrets() and model is not None and not isinstance(model, RedactingModel):
            model = RedactingModel(model)
        words = (profile.instructions, self._skills(profile), *notes, *(ours for ours, _ in lacks))
        system = "\n\n".join(part for part in words if part)
        warnings = [*fallback, *(Warned(note, code="lacks_tools") for note in (*notes, *(why for _, why in lacks)))]
        said = profile.network is not None or (parent is None and self._network is not None)
        if said and "shell" in tools and not is_full(network) and runtime.name == "inherited":
            warnings.append(Warned(NOT_BOUND.format(runtime=runtime.name), code="network"))
        return Plan(
            profile=profile,
            system=system,
            model=model,
            model_name=model_name,
            specs=specs,
            tools=tools,
            host=host,
            children=children,
            profile_json=secrets.clean_value(
                msgspec.Raw(msgspec.json.encode(_describe_profile(profile, system, runtime.name)))
            ),
            tools_json=secrets.clean_value(msgspec.Raw(msgspec.json.encode(specs))),
            runtime=runtime,
            floor=floor,
            parse=None if output is None else output.parse,
            network=network,
            notes=tuple(warnings),
            explain_missing=None if self._servers is None else self._servers.explain_missing,
        )

    def _choose_model(self, profile: Profile, task: Task, parent: Plan | None) -> tuple[Model, str]:
        wanted: str | Model | None = task.model or profile.model
        if wanted is None and parent is not None and parent.model is not None:
            return parent.model, parent.model_name
        wanted = self._default_model if wanted is None else wanted
        if wanted is None:
            raise ConfigError(f"profile {profile.name!r} has no model: give one, such as model='anthropic:NAME'")
        if isinstance(wanted, str):
            chosen = wanted == self._default_model or (parent is not None and _reads_files(parent.model_name))
            if task.model and parent is not None and _reads_files(wanted) and not chosen:
                raise ConfigError(
                    f"a subagent may not be given the model {wanted!r}: it would read a file of its choice"
                )
            return self._models(wanted), wanted
        return self._models(wanted), getattr(wanted, "name", type(wanted).__name__)

    def _make_tools(
        self, profile: Profile, parent: Plan | None, *, given: bool
    ) -> tuple[dict[str, Tool], dict[str, HostTool]]:
        host: dict[str, HostTool] = {}
        tools: dict[str, Tool] = {}
        if profile.tools is None:
            tools |= {name: SandboxedTool(LOCAL[name]()) for name in LOCAL}
            tools |= {name: HostedTool(spec) for name, spec in WEB.items()}
            tools |= {name: make() for name, make in SPAWNING.items()}
            tools |= {f"subagent_{child.name}": SubagentTool(child) for child in self._profiles.values()}
            if parent is None:
                self._add_server_tools(None, tools, host)
            else:
                host |= parent.host
                tools |= {name: parent.tools[name] for name in parent.host}
        for entry in profile.tools or ():
            self._add_tool(profile, entry, tools, host)
        if parent is not None and not given:
            tools, host = _narrow_to_parent(parent, tools, host)
        if profile.leaf:
            tools = {n: t for n, t in tools.items() if n not in SPAWNING and not isinstance(t, SubagentTool)}
        return tools, host

    def _add_tool(self, profile: Profile, entry: Any, tools: dict[str, Tool], host: dict[str, HostTool]) -> None:
        if isinstance(entry, Profile):
            made = SubagentTool(entry)
            tools[made.spec.name] = made
        elif isinstance(entry, FunctionTool):
            tools[entry.spec.name] = HostedTool(entry.spec)
            host[entry.spec.name] = entry.run
        elif not isinstance(entry, str):
            raise ConfigError(f"profile {profile.name!r}: tool {entry!r} must be a name, a @tool function or a Profile")
        elif entry.startswith(PREFIX) and self._servers is not None:
            self._add_server_tools(entry, tools, host)
        elif entry in WEB:
            tools[entry] = HostedTool(WEB[entry])
        elif entry in LOCAL:
            tools[entry] = SandboxedTool(LOCAL[entry]())
        elif entry in SPAWNING:
            tools[entry] = SPAWNING[entry]()
        elif entry.startswith("subagent_"):
            tools[entry] = SubagentTool(self._find_profile(entry.removeprefix("subagent_"), None))
        else:
            known = ", ".join([*LOCAL, *WEB, *SPAWNING, "subagent_NAME", f"{PREFIX}SERVER__TOOL"])
            raise NotFound(f"profile {profile.name!r}: unknown tool {entry!r}; available: {known}")

    def _add_server_tools(self, entry: str | None, tools: dict[str, Tool], host: dict[str, HostTool]) -> None:
        """The tools of MCP servers that an entry means; all there are for None."""
        for name, served in self._servers.find(entry).items() if self._servers is not None else ():
            tools[name] = HostedTool(served.spec)
            host[name] = served

    def _find_missing_tools(self, profile: Profile, parent: Plan | None) -> Sequence[tuple[str, str]]:
        """Return the tools of MCP servers that the profile names and that are not there. A run that has its parent's
        tools was told at its parent."""
        if self._servers is None or (profile.tools is None and parent is not None):
            return ()
        return self._servers.lacks(profile.tools)

    def _bind_web_tools(
        self, profile: Profile, tools: dict[str, Tool], host: dict[str, HostTool], network: Hosts, model: Model | None
    ) -> tuple[str, ...]:
        """Binds the web tools to what this run may reach, takes away what cannot work, and says what it lacks."""
        notes = []
        for name in [name for name, tool in tools.items() if _is_web(tool)]:
            search = web.bind_search(model, network) if name == web.SEARCH.name else None
            if search is not None:
                tools[name] = HostedTool(search)
            elif name == web.FETCH.name and network:
                host[name] = web.WebFetch(network, self._dialer).run
            else:
                del tools[name]
                host.pop(name, None)
                if name in (profile.tools or ()):
                    notes.append((NO_SEARCH if network else NO_HOSTS).format(tool=name))
        if profile.wants and not any(name in tools for name in profile.wants):
            notes.append(NONE_OF.format(tools=" nor ".join(profile.wants)))
        return tuple(notes)

    def _list_children(self, tools: Mapping[str, Tool]) -> Sequence[Profile]:
        """The profiles `spawn_subagents` may name: the active ones and those given by value."""
        if not any(name in SPAWNING or isinstance(tool, SubagentTool) for name, tool in tools.items()):
            return ()
        given = [
            tool.profile
            for tool in tools.values()
            if isinstance(tool, SubagentTool) and not isinstance(tool, SpawnAgent)
        ]
        return list({child.name.lower(): child for child in (*self._profiles.values(), *given)}.values())


def _bind_subagent_tools(tools: dict[str, Tool], children: Sequence[Profile], *, can_spawn: bool) -> None:
    """Tell the spawn tool which profiles there are. Give whoever can spawn the tools by which it has its subagents
    afterwards, and nobody else: they would cost a prompt and have nothing to do."""
    if "spawn_subagents" in tools:
        tools["spawn_subagents"] = SpawnSubagents(children)
    if not can_spawn:
        for name in subagent_tools.TOOLS:
            tools.pop(name, None)
    elif any(isinstance(tool, SpawnSubagents | SubagentTool) for tool in tools.values()):
        tools |= {name: tools.get(name) or SubagentControlTool(name) for name in subagent_tools.TOOLS}


def _reads_files(model: str) -> bool:
    return model.startswith("scripted:")


def _is_web(tool: Tool) -> bool:
    """Tell whether a tool is one of our web tools, and not a function with the same name."""
    return tool.spec is web.FETCH or tool.spec.tier == web.SEARCH.tier


def _narrow_to_parent(
    parent: Plan, tools: dict[str, Tool], host: dict[str, HostTool]
) -> tuple[dict[str, Tool], dict[str, HostTool]]:
    """Keep the tools that the parent has too. A name alone does not make a tool the same: those of the host are the
    parent's own."""
    kept: dict[str, Tool] = {}
    for name, tool in tools.items():
        if _is_web(tool):
            if name in parent.tools and _is_web(parent.tools[name]):
                kept[name] = tool
        elif name in host:
            if name in parent.host:
                kept[name] = parent.tools[name]
        elif name not in LOCAL or (name in parent.tools and name not in parent.host):
            kept[name] = tool
    return kept, {name: parent.host[name] for name in kept if name in host}


def _describe_profile(profile: Profile, system: str, runtime: str) -> dict[str, Any]:
    """Return what the log keeps of a profile, with its system prompt where that is more than its instructions."""
    described = {name: getattr(profile, name) for name in _LOGGED_FIELDS} | {"runtime": runtime}
    if profile.approvals is not None:
        described["approvals"] = profile.approvals
    if profile.network is not None:
        described["network"] = profile.network
    if profile.a2a is not None:
        described["a2a"] = profile.a2a
    return described if system == profile.instructions else described | {"system": system}
