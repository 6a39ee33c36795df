"""The composition root: the only place that names concrete backends. Each is loaded when it is asked for.

Gets values (a folder, profiles, a model name) and gives back a Supervisor that owns what was built; closing it
tears everything down. Reads no file unless a name or a project says so.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retinue.agent.plans import GENERIC, ProfilePlanner
from retinue.build.sources import LatePrices, ModelSource, reporting, servers_of, walled_runtime
from retinue.config.resolve import detected, merged, outbox_of, setup_of
from retinue.core import secrets
from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import Event
from retinue.core.limits import WORKSPACE_MIB, Caps, Limits, Timeouts
from retinue.core.network import parse_hosts
from retinue.core.plans import Runtime, Setup
from retinue.core.ports import Approver, Clock, Log, Model, Policy, Prices, RuleBook
from retinue.core.profiles import Profile, RuntimeName
from retinue.core.rules import MODES, Mode, Rules, parse_rule
from retinue.core.servers import McpServer
from retinue.core.traces import Telemetry, traceparent_of
from retinue.sandbox.inherited import Inherited
from retinue.sandbox.placement import Placement
from retinue.supervisor.approvals import Terms
from retinue.supervisor.places import lasting_path
from retinue.supervisor.policy import RulePolicy
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.timers import SystemClock
from retinue.tools.dialer import Dialer, SystemDialer
from retinue.workspaces.run_folders import StateFolder, private_folder
from retinue.workspaces.tree_workspaces import Spaces
from retinue.workspaces.workspace_runtime import Spaced

if TYPE_CHECKING:
    from retinue.core.messages import RunRef
    from retinue.models.cassettes import Cassette

OTEL = "retinue.telemetry"
MAIN = Profile(
    "main",
    "You are the primary agent. Do the task yourself or delegate parts of it to subagents, and end with the answer.",
    description="The primary agent of `retinue run`",
)
NO_OUTBOX = (
    "'delegated' needs the folder shared with the host: --delegation-directory, RETINUE_DELEGATION_DIRECTORY, or "
    "subagent_delegation_directory in retinue.yaml"
)


cassette: Cassette | None = None  # set by the pytest plugin while a test of its own runs


@dataclass(frozen=True)
class Parts:
    """What a supervisor is built from. `state` None keeps everything in memory; `policy` goes before `mode` and
    `rules`, and `mode` before that of the rules. `rules_file` is where a rule for the whole project is written;
    `trusting` says that it is the project's own, which stays trusted then. `setup` is run in every new copied
    workspace. `wait_approvals` is how many seconds a question waits for somebody when no approver is attached.
    `log_file` is the one to write, where that is not just any free one. `telemetry` True sends what happens as
    OpenTelemetry's variables say; `traced` makes new trees part of the trace in TRACEPARENT. `network` is what may
    be reached (hosts, "none" or "full"), hosts through `dialer` (which no file can name). `runtime` is where runs live
    whose profile does not say; `fallback` the laxer one they get where that cannot be had. `expose` are paths that
    walled runs may read beside their folders, `launch_prefix` the words before the command that starts one of them,
    `image` and `container_flags` what containers are made of, `caps` what each may use of the machine. `outbox` is the
    folder through which delegated runs are asked for. `mcp_servers` are those that runs may have tools from;
    `best_effort`: in such a server, runs go on whose events do not arrive."""

    project: Path
    state: Path | None = None
    profiles: Sequence[Profile] = ()
    model: str | Model | None = None
    approver: Approver | None = None
    mode: Mode | None = None
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    rules_file: Path | None = None
    trusting: bool = False
    policy: Policy | None = None
    approval_timeout: float | None = None
    wait_approvals: float | None = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    skills: Callable[[Profile], str] = lambda _: ""
    setup: Setup | None = None
    workspace_max_mib: int | None = None
    clock: Clock | None = None
    prices: Prices | None = None
    log_file: Path | None = None
    telemetry: bool | Telemetry = False
    traced: bool = False
    network: Sequence[str] | None = None
    dialer: Dialer | None = None
    runtime: RuntimeName = "inherited"
    fallback: RuntimeName | None = None
    expose: Sequence[str] = ()
    launch_prefix: Sequence[str] = ()
    image: str | None = None
    container_flags: Sequence[str] = ()
    caps: Caps = Caps()  # noqa: RUF009 - frozen
    outbox: Path | None = None
    mcp_servers: Sequence[McpServer] = ()
    best_effort: bool = False


def supervisor(parts: Parts) -> Supervisor:
    """Must be called in the event loop the runs will live in."""
    secrets.learn(os.environ)
    clock = parts.clock or SystemClock()
    state = StateFolder(parts.state, project=parts.project)
    models = ModelSource(parts.project, clock)
    policy, book = _approvals(parts)
    kept, trace = _observed(parts)
    collects, strict = bool(parts.mcp_servers), not parts.best_effort
    reports = reporting(collects=collects, strict=strict, limits=parts.limits, clock=clock)
    spaces = Spaces(max_mib=parts.workspace_max_mib or WORKSPACE_MIB)
    servers = servers_of(parts.mcp_servers, parts.project, parts.state, reports.collector)

    async def close() -> None:
        for each in (servers, reports, spaces, models):
            if each is not None:
                await each.close()

    made = Supervisor(
        reports.over(kept),
        planner=ProfilePlanner(
            parts.profiles,
            models=models,
            runtimes=placement(parts, spaces),
            default_model=parts.model,
            skills=parts.skills,
            network=None if parts.network is None else parse_hosts(parts.network),
            dialer=parts.dialer or SystemDialer(),
            servers=servers,
        ),
        state=state,
        clock=clock,
        policy=policy,
        approver=parts.approver,
        terms=Terms(parts.approval_timeout, parts.wait_approvals),
        book=book,
        limits=parts.limits,
        timeouts=parts.timeouts,
        prices=parts.prices or LatePrices(),
        trace=trace,
        on_close=close,
    )
    made.servers = servers
    reports.attach(made)
    if cassette is not None:
        models.wrap = _taping(cassette, made, state)
    return made


def _taping(tape: Cassette, made: Supervisor, state: StateFolder) -> Callable[[str, Callable[[], Model]], Model]:
    def place(ref: RunRef) -> str:
        return lasting_path(made.trees[ref.tree].nodes[ref.run])

    where = importlib.import_module("retinue.models.cassettes").Where(place, state.project, str(state.folder))
    return partial(tape.model, where=where)


def _observed(parts: Parts) -> tuple[Log, Callable[[], str] | None]:
    """The log, looked over by telemetry if there is to be any, and what says which trace a new tree belongs to."""
    kept = _with_failpoint(log(parts.state, parts.log_file))
    environment = _environment_trace if parts.traced else None
    if not parts.telemetry or importlib.import_module(f"{OTEL}.providers").disabled(os.environ):
        return kept, environment
    wish = parts.telemetry if isinstance(parts.telemetry, Telemetry) else Telemetry()
    providers = importlib.import_module(f"{OTEL}.providers").providers_of(wish)
    module = importlib.import_module(f"{OTEL}.observed")
    return module.Observed(kept, providers), module.current_trace


def _environment_trace() -> str:
    return traceparent_of(os.environ.get("TRACEPARENT", ""))


def placement(parts: Parts, spaces: Spaces | None = None) -> Placement:
    """The runtimes there are. A wall is probed when the first run wants it, before any model is called."""

    def walled(name: str, reach: str = "none", **options: Any) -> Runtime:
        dialer = parts.dialer or SystemDialer()
        return spaced(walled_runtime(name, reach, dialer=dialer, caps=parts.caps, expose=parts.expose, **options))

    def delegated() -> Runtime:
        if parts.outbox is None:
            raise ConfigError(NO_OUTBOX)
        made: Runtime = importlib.import_module("retinue.remote.outbox").Delegated(parts.outbox)
        return made

    spaced = partial(Spaced, setup=parts.setup, spaces=spaces or Spaces())
    makers: dict[RuntimeName, Callable[..., Runtime]] = {
        "inherited": lambda: spaced(Inherited()),
        "isolated": partial(walled, "isolated", prefix=parts.launch_prefix),
        "container": partial(walled, "container", image=parts.image, flags=parts.container_flags),
        "delegated": delegated,
    }
    return Placement(makers, mode=parts.runtime, fallback=parts.fallback)


def attempts() -> Any:
    """What `retinue doctor --escape` tries against a wall."""
    return importlib.import_module("retinue.sandbox.escape_attempts")


def container_engine() -> str | None:
    """podman or docker, whichever is here."""
    try:
        return Path(importlib.import_module("retinue.sandbox.container").engine().argv[0]).name
    except ConfigError:
        return None


def exposing() -> Any:
    """What `retinue init` proposes to show behind walls."""
    return importlib.import_module("retinue.sandbox.exposed_paths")


def run_as_ordinary(argv: Sequence[str], *, seconds: float) -> subprocess.CompletedProcess[str]:
    """Started by root: runs a command as somebody else, who can reach this Python and package."""
    done: subprocess.CompletedProcess[str] = importlib.import_module("retinue.sandbox.ordinary_user").run(
        argv, seconds=seconds
    )
    return done


def image() -> str:
    """Makes the default image of runtime `container`, and says what it is; raises ConfigError."""
    engine = importlib.import_module("retinue.sandbox.container").engine()
    said: str = importlib.import_module("retinue.sandbox.container_image").build(engine.argv)
    return said


def _approvals(parts: Parts) -> tuple[Policy, RuleBook | None]:
    """The policy, and who writes down what a person adds to its rules."""
    mode = parts.mode or parts.rules.mode or "ask"
    if mode not in MODES:
        raise ConfigError(f"unknown approval mode {mode!r}; there is {', '.join(MODES)}")
    file = parts.rules_file
    policy = RulePolicy(parts.rules, mode=mode, project=str(parts.project), config=str(file or ""))
    return parts.policy or policy, None if file is None else _Book(file, policy, trusting=parts.trusting)


class _Book:
    """Rules for the project: in its retinue.yaml, and in force at once."""

    def __init__(self, file: Path, policy: RulePolicy, *, trusting: bool) -> None:
        self._file = file
        self._policy = policy
        self._trusting = trusting

    def keep(self, rule: str) -> None:
        before, after = importlib.import_module("retinue.config.edit").add_allowed(self._file, rule)
        self._policy.learn(parse_rule(rule))
        if self._trusting:
            importlib.import_module("retinue.config.trust").follow(self._file, before, after)


def _with_failpoint(made: Log) -> Log:
    """The log, or for a test of crashes one that kills this process at the named point."""
    point = os.environ.get("RETINUE_FAILPOINT")
    if not point or point.startswith("outbox_"):  # those are the mailbox's own
        return made
    failing: Log = importlib.import_module("retinue.log.failpoints").FailingLog(made, point)
    return failing


def log(state: Path | None, file: Path | None = None) -> Log:
    """The log in memory, or the durable one in a state folder, which ignores itself in git."""
    if state is None:
        made: Log = importlib.import_module("retinue.log.memory").MemoryLog()
        return made
    private_folder(importlib.import_module("retinue.log.archive").unlinked(state))
    ignore = state / ".gitignore"
    try:
        if not ignore.exists():
            ignore.write_text("*\n")
    except OSError as error:
        raise ConfigError(f"cannot write {ignore}: {error.strerror or error}") from None
    durable: Log = importlib.import_module("retinue.log.sqlite").SqliteLog(state / "logs", file)
    return durable


def reader(state: Path) -> Callable[[str], Sequence[Event]]:
    """Gives the events of any tree of that state folder, in whatever file and of whatever process."""
    read: Callable[[str], Sequence[Event]] = importlib.import_module("retinue.log.archive").Archive(state).read
    return read


def log_with(state: Path, tree: str) -> Log:
    """The log of that state folder that has the tree, which no other process may be writing."""
    archive = importlib.import_module("retinue.log.archive").Archive(state)
    for stored in archive.trees():
        if stored.tree == tree:
            return log(state, stored.file)
    raise NotFound(f"there is no tree '{tree}' in {state}")


def project_parts(
    start: Path, *, config: Path | None = None, default_runtime: RuntimeName = "inherited", **changes: Any
) -> tuple[Parts, Any]:
    """The parts a project's files ask for, and the project itself; `changes` are what the caller was given."""
    project = importlib.import_module("retinue.config.project").load_project(start, config=config)
    default_model = importlib.import_module("retinue.config.models").default_model
    skill_prompt = importlib.import_module("retinue.config.skills").skill_prompt
    settings = project.settings
    given = {name: value for name, value in changes.items() if value is not None}
    limits: Limits = given.pop("limits", Limits())
    outbox = outbox_of(given.pop("outbox", None), settings, project.folder)
    parts = Parts(
        project=project.folder,
        **{
            "state": project.folder / ".retinue",
            "profiles": project.profiles,
            "model": settings.model or default_model(os.environ),
            "limits": limits.over(settings.limits),
            "rules": merged(given.pop("rules", None), settings.rules),
            "rules_file": settings.file or project.folder / "retinue.yaml",
            "trusting": config is None,
            "approval_timeout": settings.approval_timeout,
            "setup": setup_of(settings),
            "workspace_max_mib": settings.workspace_max_mib,
            "caps": settings.caps,
            "timeouts": Timeouts(
                settings.subagent_default_timeout, settings.subagent_min_timeout, settings.subagent_max_timeout
            ),
            "runtime": settings.subagent_runtime_mode or detected(settings, outbox) or default_runtime,
            "outbox": outbox,
            "best_effort": settings.subagent_reports == "best_effort",
            "fallback": settings.subagent_runtime_fallback_mode,
            "expose": settings.expose_paths,
            "launch_prefix": settings.subagent_host_launch_prefix,
            "image": settings.container_image,
            "container_flags": settings.container_flags,
            "skills": lambda profile: skill_prompt(profile.skills, project.skills),
            "telemetry": _wants_telemetry(settings.telemetry),
            "network": settings.network,
            "mcp_servers": settings.mcp_servers,
            **given,
        },
    )
    return parts, project


def _wants_telemetry(said: bool | None) -> bool:
    """What retinue.yaml says; where it says nothing, whether the environment names a collector."""
    if said is None and any(name.startswith("OTEL_EXPORTER_") for name in os.environ):
        return bool(importlib.import_module(f"{OTEL}.providers").asked_for(os.environ))
    return bool(said)


def hosted(parts: Parts) -> Parts:
    """The parts of a process on the host: what asks to be delegated is already where it should be, behind a wall; and a
    profile has no less of one than the process says, as it is a container that names it."""
    runtime: RuntimeName = "isolated" if parts.runtime == "delegated" else parts.runtime
    mode: dict[str | None, RuntimeName] = {"delegated": "isolated", "inherited": runtime}
    profiles = [replace(each, runtime=mode.get(each.runtime, each.runtime)) for each in parts.profiles]
    return replace(parts, profiles=profiles, runtime=runtime, outbox=None)


def named_profile(parts: Parts, name: str) -> Profile:
    """The active profile of that name, or the one for tasks that name none; raises NotFound."""
    for profile in (*parts.profiles, GENERIC):
        if profile.name.casefold() == name.casefold():
            return profile
    there = ", ".join(sorted(profile.name for profile in (*parts.profiles, GENERIC)))
    raise NotFound(f"unknown profile {name!r}; there is {there}")


def with_profiles(parts: Parts, profiles: Sequence[Profile]) -> Parts:
    """The parts with these profiles beside (and, by name, instead of) those they have."""
    merged = {profile.name.lower(): profile for profile in (*parts.profiles, *profiles)}
    return replace(parts, profiles=list(merged.values()))
