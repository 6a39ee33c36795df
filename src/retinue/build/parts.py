"""The values a supervisor is built from. Knows no files and builds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from retinue.core.errors import NotFound
from retinue.core.limits import Caps, Limits, Timeouts
from retinue.core.messages import Model
from retinue.core.ports import Approver, Clock, Policy, Prices, Setup
from retinue.core.profiles import Profile, RuntimeName
from retinue.core.rules import Mode, Rules
from retinue.core.servers import McpServer
from retinue.core.traces import Telemetry
from retinue.remote.port import RemoteAdapter
from retinue.tools.dialer import Dialer
from retinue.tools.subagents import GENERIC

MAIN = Profile(
    "main",
    "You are the primary agent. Do the task yourself or delegate parts of it to subagents, and end with the answer.",
    description="The primary agent of `retinue run`",
)


@dataclass(frozen=True)
class Parts:
    """Everything a supervisor is built from.

    project             the folder that agents work on
    state               the state folder; None keeps everything in memory
    profiles            the subagents a model may name
    model               the model of runs whose profile names none
    approver            answers approvals; None: nobody does, unless `wait_approvals` is set
    mode, rules, policy which calls ask first: `policy` wins over `mode`, `mode` over the mode of `rules`
    rules_file          the file that a rule for the whole project is written to
    keeps_trust         `rules_file` is the project's own retinue.yaml, which stays trusted when we write to it
    approval_timeout    seconds after which an approval is denied
    notify_command      a command run for each question that waits for a person
    wait_approvals      seconds to wait for an answer when no approver is attached
    limits, timeouts    limits of the primary and its tree; bounds for what a model asks for
    skills              returns the part of a profile's system prompt that lists its skills
    setup               the command that prepares each new copied workspace
    telemetry           True sends spans as OpenTelemetry's variables say
    traced              puts new trees into the trace that TRACEPARENT names
    network             reachable hosts, "none" or "full"; `dialer` connects to them (no file can name it)
    runtime, fallback   where runs live whose profile does not say; what they get where that cannot be had
    context_paths       files and folders that every primary may read beside its own; absolute
    expose              paths that sandboxed runs may read beside their folders
    launch_prefix       words before the command that starts a bubblewrap sandbox
    image               the container image; `container_flags` are added to podman or docker run
    caps                what each sandboxed run may use of the machine
    outbox              the folder through which delegated runs are requested
    adapter             what starts delegated runs instead of the outbox (no file can name it)
    mcp_servers         the MCP servers that runs may have tools from
    serves_requests     primaries are delegated by other processes: `retinue watch`
    best_effort         in an MCP server: runs continue although their events do not reach the collector
    total               what all trees of the process together may spend
    is_mcp_server       this process serves as an MCP server: it opens no collector of its own
    """

    project: Path
    state: Path | None = None
    profiles: Sequence[Profile] = ()
    model: str | Model | None = None
    approver: Approver | None = None
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
    caps: Caps = Caps()  # noqa: RUF009 - frozen
    outbox: Path | None = None
    adapter: RemoteAdapter | None = None
    mcp_servers: Sequence[McpServer] = ()
    serves_requests: bool = False
    best_effort: bool = False
    total: Limits = Limits()  # noqa: RUF009 - frozen
    is_mcp_server: bool = False

    @property
    def is_unattended(self) -> bool:
        """True if nothing asks: the approval mode is `yes`."""
        return self.policy is None and (self.mode or self.rules.mode) == "yes"


def find_profile(parts: Parts, name: str) -> Profile:
    """Return the active profile of that name, or the generic one; raises NotFound."""
    for profile in (*parts.profiles, GENERIC):
        if profile.name.casefold() == name.casefold():
            return profile
    there = ", ".join(sorted(profile.name for profile in (*parts.profiles, GENERIC)))
    raise NotFound(f"unknown profile {name!r}; available: {there}")


def add_profiles(parts: Parts, profiles: Sequence[Profile]) -> Parts:
    """Return the parts with these profiles added; they replace profiles of the same name."""
    by_name = {profile.name.lower(): profile for profile in (*parts.profiles, *profiles)}
    return replace(parts, profiles=list(by_name.values()))


def adapt_to_watcher(parts: Parts) -> Parts:
    """Return the parts of `retinue watch`, which runs on the host what a container asks for.

    `delegated` becomes `isolated`, because the request has arrived where it should run. A profile cannot be less
    sandboxed than the process says, because the container chooses the profile. The host's context paths are granted to
    its own primaries, not to a container's."""
    runtime: RuntimeName = "isolated" if parts.runtime == "delegated" else parts.runtime
    mode: dict[str | None, RuntimeName] = {"delegated": "isolated", "inherited": runtime}
    profiles = [replace(each, runtime=mode.get(each.runtime, each.runtime)) for each in parts.profiles]
    return replace(parts, profiles=profiles, runtime=runtime, outbox=None, context_paths=(), serves_requests=True)
