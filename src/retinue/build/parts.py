"""The values from which a supervisor is built. Reads no files and builds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from retinue.core.errors import NotFound
from retinue.core.limits import Limits, ResourceLimits, Timeouts
from retinue.core.messages import Model
from retinue.core.ports import AttachedApprover, Clock, Policy, Prices, Setup
from retinue.core.profiles import Profile, RuntimeName
from retinue.core.rounds import Rounds
from retinue.core.rules import Mode, Rules
from retinue.core.servers import McpServer
from retinue.core.team_members import TeamSettings
from retinue.core.teams import Member
from retinue.core.traces import Telemetry
from retinue.tools.dialer import Dialer
from retinue.tools.subagents import GENERIC

MAIN = Profile(
    "main",
    "You are the primary agent. Do the task yourself or delegate parts of it to subagents, and end with the answer.",
    description="The primary agent of `retinue run`",
)


@dataclass(frozen=True)
class Parts:
    """Everything from which a supervisor is built.

    project             the folder that agents work on
    state               the state folder; None keeps everything in memory
    profiles            the subagents that a model may name
    model               the model of runs whose profile names none
    approver            answers approvals; None: nobody answers, unless `wait_approvals` is set
    mode, rules, policy decide which calls need approval: `policy` overrides `mode`, `mode` the mode of `rules`
    rules_file          the file for new rules of the whole project
    keeps_trust         `rules_file` is the project's own retinue.yaml, which stays trusted when we write to it
    approval_timeout    seconds after which an approval is denied
    notify_command      the command to run for each question that waits for a person
    wait_approvals      seconds to wait for an answer when no approver is attached
    limits, timeouts    limits of the primary and its tree; bounds for the timeouts that models request
    skills              returns the part of a profile's system prompt that lists its skills
    setup               the command that prepares each new copied workspace
    workspace_max_mib   the largest size in MiB of a new copied workspace
    clock, prices       replace the system clock and the price library
    telemetry           True sends spans as the OpenTelemetry variables say
    traced              puts new trees into the trace of the TRACEPARENT variable
    network             reachable hosts, "none" or "full"; `dialer` connects to them (no file can set it)
    runtime, fallback   the runtime of runs whose profile names none; the runtime to use if that is not available
    context_paths       absolute paths of files and folders that every primary may read besides its own
    expose              paths that sandboxed runs may read besides their folders
    launch_prefix       words before the command that starts a bubblewrap sandbox
    image               the container image; `container_flags` are added to podman or docker run
    resource_limits     the resource limits of each sandboxed run
    outbox              the folder for the requests of delegated runs
    mcp_servers         the MCP servers whose tools runs may use
    serves_requests     other processes delegate the primaries: `retinue watch`
    best_effort         in an MCP server: runs continue even if their events do not reach the collector
    total               the budget of all trees of the process together
    is_mcp_server       this process serves as an MCP server and opens no collector of its own
    teams               the members of subagents that are teams, and how the members agree
    subagent_agents     the members of subagents that a primary spawns, if its profile names none
    rounds              rounds of every primary, judged by an evaluator; None: a primary answers once
    enable_subagents    False: no run gets a tool to spawn subagents
    """

    project: Path
    state: Path | None = None
    profiles: Sequence[Profile] = ()
    model: str | Model | None = None
    approver: AttachedApprover | None = None
    mode: Mode | None = None
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    rules_file: Path | None = None
    keeps_trust: bool = False
    policy: Policy | None = None
    approval_timeout: float | None = None
    notify_command: Sequence[str] = ()
    wait_approvals: float | None = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    skills: Callable[[Profile], str] = lambda _: ""
    setup: Setup | None = None
    workspace_max_mib: int | None = None
    clock: Clock | None = None
    prices: Prices | None = None
    telemetry: bool | Telemetry = False
    traced: bool = False
    network: Sequence[str] | None = None
    dialer: Dialer | None = None
    runtime: RuntimeName = "inherited"
    fallback: RuntimeName | None = None
    context_paths: Sequence[str] = ()
    expose: Sequence[str] = ()
    launch_prefix: Sequence[str] = ()
    image: str | None = None
    container_flags: Sequence[str] = ()
    resource_limits: ResourceLimits = ResourceLimits()  # noqa: RUF009 - frozen
    outbox: Path | None = None
    mcp_servers: Sequence[McpServer] = ()
    serves_requests: bool = False
    best_effort: bool = False
    total: Limits = Limits()  # noqa: RUF009 - frozen
    is_mcp_server: bool = False
    teams: TeamSettings = TeamSettings()  # noqa: RUF009 - frozen
    subagent_agents: Sequence[Member] = ()
    rounds: Rounds | None = None
    enable_subagents: bool = True

    @property
    def is_unattended(self) -> bool:
        """Return True if the approval mode is `yes`, so that nobody is asked."""
        return self.policy is None and (self.mode or self.rules.mode) == "yes"


def find_profile(parts: Parts, name: str) -> Profile:
    """Return the profile named `name`; the generic profile counts too. Raises NotFound."""
    for profile in (*parts.profiles, GENERIC):
        if profile.name.casefold() == name.casefold():
            return profile
    there = ", ".join(sorted(profile.name for profile in (*parts.profiles, GENERIC)))
    raise NotFound(f"unknown profile {name!r}; available: {there}")


def add_profiles(parts: Parts, profiles: Sequence[Profile]) -> Parts:
    """Return `parts` with these profiles added. They replace profiles of the same name."""
    by_name = {profile.name.lower(): profile for profile in (*parts.profiles, *profiles)}
    return replace(parts, profiles=list(by_name.values()))


def adapt_to_watcher(parts: Parts) -> Parts:
    """Return the parts for `retinue watch`, which runs the requests of a container on the host.

    `delegated` becomes `isolated`, because the request has arrived where it should run. A profile cannot be less
    sandboxed than the process, because the container chooses the profile. The host's context paths and rounds are for
    its own primaries, not for the runs that a container requests."""
    runtime: RuntimeName = "isolated" if parts.runtime == "delegated" else parts.runtime
    mode: dict[str | None, RuntimeName] = {"delegated": "isolated", "inherited": runtime}
    profiles = [replace(each, runtime=mode.get(each.runtime, each.runtime)) for each in parts.profiles]
    return replace(
        parts, profiles=profiles, runtime=runtime, outbox=None, context_paths=(), serves_requests=True, rounds=None
    )
