"""The composition root: the only place that names concrete backends. Each is loaded when it is asked for.

Gets values (a folder, profiles, a model name) and gives back a Supervisor that owns what was built; closing it
tears everything down. Reads no file unless a name or a project says so.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retinue.agent.plans import ProfilePlanner
from retinue.core import secrets
from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import Event
from retinue.core.limits import Limits
from retinue.core.network import parse_hosts
from retinue.core.plans import Setup
from retinue.core.ports import Approver, Clock, Log, Model, Policy, Prices, RuleBook
from retinue.core.profiles import Profile
from retinue.core.rules import MODES, NO_WALLS, Mode, Rules, parse_rule
from retinue.core.traces import Telemetry, traceparent_of
from retinue.core.usage import NoPrices, Usage
from retinue.runtime.folders import StateFolder, private_folder
from retinue.runtime.inherited import Inherited
from retinue.runtime.spaced import Spaced
from retinue.runtime.spaces.spaces import MAX_MIB, Spaces
from retinue.supervisor.approvals import Terms
from retinue.supervisor.clock import SystemClock
from retinue.supervisor.places import lasting_path
from retinue.supervisor.policy import RulePolicy
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.timeouts import Timeouts
from retinue.tools.dialing import Dialer, SystemDialer

if TYPE_CHECKING:
    from retinue.core.messages import RunRef
    from retinue.core.records import RunRecord
    from retinue.models.cassettes import Cassette

OTEL = "retinue.surfaces.otel"
MAIN = Profile(
    "main",
    "You are the primary agent. Do the task yourself or delegate parts of it to subagents, and end with the answer.",
    description="The primary agent of `retinue run`",
    workspace="shared",
)


cassette: Cassette | None = None  # set by the pytest plugin while a test of its own runs


@dataclass(frozen=True)
class Parts:
    """What a supervisor is built from. `state` None keeps everything in memory; `policy` goes before `mode` and
    `rules`, and `mode` before that of the rules. `rules_file` is where a rule for the whole project is written;
    `trusting` says that it is the project's own, which stays trusted then. `setup` is run in every new copied
    workspace. `wait_approvals` is how many seconds a question waits for somebody when no approver is attached.
    `log_file` is the one to write, where that is not just any free one. `telemetry` True sends what happens as
    OpenTelemetry's variables say; `traced` makes new trees part of the trace in TRACEPARENT. `network` are the hosts
    that may be fetched from, reached through `dialer` (which no file can name)."""

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
    network: Sequence[str] = ()
    dialer: Dialer | None = None


def supervisor(parts: Parts) -> Supervisor:
    """Must be called in the event loop the runs will live in."""
    secrets.learn(os.environ)
    clock = parts.clock or SystemClock()
    state = StateFolder(parts.state, project=parts.project)
    models = ModelSource(parts.project, clock)
    policy, book = _approvals(parts)
    kept, trace = _observed(parts)
    made = Supervisor(
        kept,
        planner=ProfilePlanner(
            parts.profiles,
            models=models,
            default_model=parts.model,
            skills=parts.skills,
            network=parse_hosts(parts.network),
            dialer=parts.dialer or SystemDialer(),
        ),
        runtime=Spaced(Inherited(), setup=parts.setup, spaces=Spaces(max_mib=parts.workspace_max_mib or MAX_MIB)),
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
        on_close=models.close,
    )
    if cassette is not None:
        models.wrap = _taping(cassette, made, state)
    return made


def _taping(tape: Cassette, made: Supervisor, state: StateFolder) -> Callable[[str, Callable[[], Model]], Model]:
    def place(ref: RunRef) -> str:
        return lasting_path(made.trees[ref.tree].nodes[ref.run])

    where = importlib.import_module("retinue.models.cassettes").Where(place, state.project, str(state.folder))
    return partial(tape.model, where=where)


def stage(records: dict[int, RunRecord], parts: Parts | None = None, first: Profile | None = None) -> Any:
    """What plays a recorded tree. With `parts`, the words and tools of their profiles (for the primary, of `first`)
    take the place of the recorded ones."""
    room = importlib.import_module("retinue.agent.replay")
    now = None
    if parts is not None:
        silent = room.Unasked()
        now = ProfilePlanner(
            parts.profiles,
            models=lambda _: silent,
            default_model=silent,
            skills=parts.skills,
            network=parse_hosts(parts.network),
            dialer=SystemDialer(),
        )
    return room.Stage(records, now=now, first=first)


def replayer(played: Any, project: Path) -> Supervisor:
    """A supervisor of what is played: its log is in memory, and it calls no model and no tool."""
    made = Supervisor(
        log(None),
        planner=played,
        runtime=importlib.import_module("retinue.runtime.replayed").Replayed(played),
        state=StateFolder(None, project=project),
        clock=SystemClock(),
        policy=played,
        approver=played,
        terms=Terms(),
        book=None,
        limits=played.limits,
        timeouts=Timeouts(),
        prices=LatePrices(),
    )
    played.answer = made.answer
    return made


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


def _approvals(parts: Parts) -> tuple[Policy, RuleBook | None]:
    """The policy, and who writes down what a person adds to its rules."""
    mode = parts.mode or parts.rules.mode or "ask"
    if mode not in MODES:
        raise ConfigError(f"unknown approval mode {mode!r}; there is {', '.join(MODES)}")
    if mode == "walled":
        raise ConfigError(NO_WALLS)
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
        before, after = importlib.import_module("retinue.config.rulefile").add_allowed(self._file, rule)
        self._policy.learn(parse_rule(rule))
        if self._trusting:
            importlib.import_module("retinue.config.trust").follow(self._file, before, after)


def _with_failpoint(made: Log) -> Log:
    """The log, or for a test of crashes one that kills this process at the named point."""
    point = os.environ.get("RETINUE_FAILPOINT")
    if not point:
        return made
    failing: Log = importlib.import_module("retinue.log.failpoints").FailingLog(made, point)
    return failing


def log(state: Path | None, file: Path | None = None) -> Log:
    """The log in memory, or the durable one in a state folder, which ignores itself in git."""
    if state is None:
        made: Log = importlib.import_module("retinue.log.memory").MemoryLog()
        return made
    private_folder(state)
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


class ModelSource:
    """Finds models by name: `scripted:FILE`, relative to the project, or PROVIDER:NAME. Each is made once, so that all
    runs on it share its connections and its back-off; `close` ends the connections. `wrap` puts something before every
    model, also one that is given as it is."""

    def __init__(self, project: Path, clock: Clock) -> None:
        self._project = project
        self._clock = clock
        self._made: dict[str, Model] = {}
        self.wrap: Callable[[str, Callable[[], Model]], Model] | None = None

    def __call__(self, wanted: str | Model) -> Model:
        if not isinstance(wanted, str):
            return wanted if self.wrap is None else self.wrap(type(wanted).__name__, lambda: wanted)
        if wanted not in self._made:
            make = partial(_make_model, wanted, self._project, self._clock)
            self._made[wanted] = make() if self.wrap is None else self.wrap(wanted, make)
        return self._made[wanted]

    async def close(self) -> None:
        made, self._made = self._made, {}
        for model in made.values():
            if hasattr(model, "aclose"):
                await model.aclose()


def _make_model(name: str, project: Path, clock: Clock) -> Model:
    provider, _, rest = name.partition(":")
    if provider != "scripted":
        return _provider_model(name, clock)
    if not rest:
        raise ConfigError("model 'scripted:' names no file: write scripted:FILE")
    script = importlib.import_module("retinue.config.scripts").load_script(project / Path(rest).expanduser())
    model: Model = importlib.import_module("retinue.models.scripted").ScriptedModel(script, clock)
    return model


class LatePrices:
    """The price library, loaded when a model that could be in it is first asked about; without it no price is known."""

    def __init__(self) -> None:
        self._prices: Prices | None = None

    def price(self, model: str, usage: Usage) -> Decimal | None:
        if ":" not in model or model.startswith("scripted:"):
            return None
        if self._prices is None:
            try:
                self._prices = importlib.import_module("retinue.models.prices").LibraryPrices()
            except ModuleNotFoundError:
                self._prices = NoPrices()
        return self._prices.price(model, usage)


def _provider_model(name: str, clock: Clock) -> Model:
    """Loads the provider's library, which takes a second or two, when the first run wants it."""
    provider, _, rest = name.partition(":")
    if not provider or not rest:
        raise NotFound(
            f"unknown model {name!r}: write anthropic:NAME, openai:NAME, another PROVIDER:NAME, or scripted:FILE"
        )
    command = importlib.import_module("retinue.config.models").install_command(name)
    if command:
        raise ConfigError(f"model {name!r} needs a package that is not installed: {command}")
    made = importlib.import_module("retinue.models.providers").ProviderModel(name, clock=clock)
    model: Model = importlib.import_module("retinue.models.retries").Retrying(made, clock)
    return model


def project_parts(start: Path, *, config: Path | None = None, **changes: Any) -> tuple[Parts, Any]:
    """The parts a project's files ask for, and the project itself; `changes` are what the caller was given."""
    project = importlib.import_module("retinue.config.project").load_project(start, config=config)
    default_model = importlib.import_module("retinue.config.models").default_model
    skill_prompt = importlib.import_module("retinue.config.skills").skill_prompt
    settings = project.settings
    given = {name: value for name, value in changes.items() if value is not None}
    limits: Limits = given.pop("limits", Limits())
    parts = Parts(
        project=project.folder,
        **{
            "state": project.folder / ".retinue",
            "profiles": project.profiles,
            "model": settings.model or default_model(os.environ),
            "limits": limits.over(settings.limits),
            "rules": _merged(given.pop("rules", None), settings.rules),
            "rules_file": settings.file or project.folder / "retinue.yaml",
            "trusting": config is None,
            "approval_timeout": settings.approval_timeout,
            "setup": _setup(settings),
            "workspace_max_mib": settings.workspace_max_mib,
            "timeouts": Timeouts(
                settings.subagent_default_timeout, settings.subagent_min_timeout, settings.subagent_max_timeout
            ),
            "skills": lambda profile: skill_prompt(profile.skills, project.skills),
            "telemetry": _wants_telemetry(settings.telemetry),
            "network": settings.network,
            **given,
        },
    )
    return parts, project


def _wants_telemetry(said: bool | None) -> bool:
    """What retinue.yaml says; where it says nothing, whether the environment names a collector."""
    if said is None and any(name.startswith("OTEL_EXPORTER_") for name in os.environ):
        return bool(importlib.import_module(f"{OTEL}.providers").asked_for(os.environ))
    return bool(said)


def _setup(settings: Any) -> Setup | None:
    command = settings.workspace_setup
    return None if command is None else Setup(command, settings.workspace_setup_timeout)


def _merged(given: Rules | None, base: Rules) -> Rules:
    """Both sets of rules; the mode is that of the first which has one."""
    if given is None:
        return base
    return Rules(given.mode or base.mode, base.allow + given.allow, base.ask + given.ask, base.deny + given.deny)


def with_profiles(parts: Parts, profiles: Sequence[Profile]) -> Parts:
    """The parts with these profiles beside (and, by name, instead of) those they have."""
    merged = {profile.name.lower(): profile for profile in (*parts.profiles, *profiles)}
    return replace(parts, profiles=list(merged.values()))
