"""The composition root: the only place that names concrete backends. Each is loaded when it is asked for.

Gets values (a folder, profiles, a model name) and gives back a Supervisor that owns what was built; closing it
tears everything down. Reads no file unless a name or a project says so.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from retinue.agent.plans import GENERIC, ProfilePlanner
from retinue.core.errors import ConfigError, NotFound
from retinue.core.limits import Caps, Limits
from retinue.core.plans import Runtime
from retinue.core.ports import Approver, Clock, Log, Model, Policy, Prices, RuleBook
from retinue.core.profiles import Profile, RuntimeName
from retinue.core.rules import MODES, NO_WALLS, Mode, Rules, parse_rule
from retinue.core.usage import NoPrices, Usage
from retinue.runtime.folders import StateFolder, private_folder
from retinue.runtime.inherited import Inherited
from retinue.runtime.placement import Placement
from retinue.supervisor.approvals import Terms
from retinue.supervisor.clock import SystemClock
from retinue.supervisor.policy import RulePolicy
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.timeouts import Timeouts

MAIN = Profile(
    "main",
    "You are the primary agent. Do the task yourself or delegate parts of it to subagents, and end with the answer.",
    description="The primary agent of `retinue run`",
    workspace="shared",
)
OUTBOX_VARIABLE = "RETINUE_DELEGATION_DIRECTORY"
NO_OUTBOX = (
    "'delegated' needs the folder shared with the host: --delegation-directory, RETINUE_DELEGATION_DIRECTORY, or "
    "subagent_delegation_directory in retinue.yaml"
)


@dataclass(frozen=True)
class Parts:
    """What a supervisor is built from. `state` None keeps everything in memory; `policy` goes before `mode` and
    `rules`, and `mode` before that of the rules. `rules_file` is where a rule for the whole project is written.
    `wait_approvals` is how many seconds a question waits for somebody when no approver is attached. `runtime` is where
    runs live whose profile does not say; `fallback` the laxer one they get where that cannot be had. `expose` are paths
    that walled runs may read beside their folders, `caps` what each of them may use of the machine. `outbox` is the
    folder through which delegated runs are asked for."""

    project: Path
    state: Path | None = None
    profiles: Sequence[Profile] = ()
    model: str | Model | None = None
    approver: Approver | None = None
    mode: Mode | None = None
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    rules_file: Path | None = None
    policy: Policy | None = None
    approval_timeout: float | None = None
    wait_approvals: float | None = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    skills: Callable[[Profile], str] = lambda _: ""
    clock: Clock | None = None
    prices: Prices | None = None
    runtime: RuntimeName = "inherited"
    fallback: RuntimeName | None = None
    expose: Sequence[str] = ()
    caps: Caps = Caps()  # noqa: RUF009 - frozen
    outbox: Path | None = None


def supervisor(parts: Parts) -> Supervisor:
    """Must be called in the event loop the runs will live in."""
    clock = parts.clock or SystemClock()
    models = ModelSource(parts.project, clock)
    policy, book = _approvals(parts)
    return Supervisor(
        log(parts.state),
        planner=ProfilePlanner(
            parts.profiles,
            models=models,
            runtimes=placement(parts),
            default_model=parts.model,
            skills=parts.skills,
        ),
        state=StateFolder(parts.state, project=parts.project),
        clock=clock,
        policy=policy,
        approver=parts.approver,
        terms=Terms(parts.approval_timeout, parts.wait_approvals),
        book=book,
        limits=parts.limits,
        timeouts=parts.timeouts,
        prices=parts.prices or LatePrices(),
        on_close=models.close,
    )


def placement(parts: Parts) -> Placement:
    """The runtimes there are. A wall is probed when the first run wants it, before any model is called."""

    def isolated() -> Runtime:
        """Raises ConfigError with what to install or set."""
        folder = Path(tempfile.mkdtemp(prefix="retinue-probe-"))
        try:
            wall = importlib.import_module("retinue.runtime.walls.bubblewrap").probe(
                folder / "wall", expose=parts.expose
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        made: Runtime = importlib.import_module("retinue.runtime.isolated").Isolated(wall, caps=parts.caps)
        return made

    def delegated() -> Runtime:
        if parts.outbox is None:
            raise ConfigError(NO_OUTBOX)
        made: Runtime = importlib.import_module("retinue.runtime.delegated").Delegated(parts.outbox)
        return made

    makers: dict[RuntimeName, Callable[[], Runtime]] = {
        "inherited": Inherited,
        "isolated": isolated,
        "delegated": delegated,
    }
    return Placement(makers, mode=parts.runtime, fallback=parts.fallback)


def _approvals(parts: Parts) -> tuple[Policy, RuleBook | None]:
    """The policy, and who writes down what a person adds to its rules."""
    mode = parts.mode or parts.rules.mode or "ask"
    if mode not in MODES:
        raise ConfigError(f"unknown approval mode {mode!r}; there is {', '.join(MODES)}")
    if mode == "walled":
        raise ConfigError(NO_WALLS)
    file = parts.rules_file
    policy = RulePolicy(parts.rules, mode=mode, project=str(parts.project), config=str(file or ""))
    return parts.policy or policy, None if file is None else _Book(file, policy)


class _Book:
    """Rules for the project: in its retinue.yaml, and in force at once."""

    def __init__(self, file: Path, policy: RulePolicy) -> None:
        self._file = file
        self._policy = policy

    def keep(self, rule: str) -> None:
        importlib.import_module("retinue.config.rulefile").add_allowed(self._file, rule)
        self._policy.learn(parse_rule(rule))


def log(state: Path | None) -> Log:
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
    durable: Log = importlib.import_module("retinue.log.sqlite").SqliteLog(state / "logs")
    return durable


class ModelSource:
    """Finds models by name: `scripted:FILE`, relative to the project, or PROVIDER:NAME. Each is made once, so that all
    runs on it share its connections and its back-off; `close` ends the connections."""

    def __init__(self, project: Path, clock: Clock) -> None:
        self._project = project
        self._clock = clock
        self._made: dict[str, Model] = {}

    def __call__(self, name: str) -> Model:
        if name not in self._made:
            self._made[name] = _make_model(name, self._project, self._clock)
        return self._made[name]

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
    outbox = _outbox(given.pop("outbox", None), settings, project.folder)
    parts = Parts(
        project=project.folder,
        **{
            "state": project.folder / ".retinue",
            "profiles": project.profiles,
            "model": settings.model or default_model(os.environ),
            "limits": limits.over(settings.limits),
            "rules": _merged(given.pop("rules", None), settings.rules),
            "rules_file": settings.file or project.folder / "retinue.yaml",
            "approval_timeout": settings.approval_timeout,
            "timeouts": Timeouts(
                settings.subagent_default_timeout, settings.subagent_min_timeout, settings.subagent_max_timeout
            ),
            "runtime": settings.subagent_runtime_mode or _detected(settings, outbox),
            "outbox": outbox,
            "fallback": settings.subagent_runtime_fallback_mode,
            "expose": settings.expose_paths,
            "skills": lambda profile: skill_prompt(profile.skills, project.skills),
            **given,
        },
    )
    return parts, project


def _outbox(given: Path | None, settings: Any, project: Path) -> Path | None:
    """The folder shared with the host: what was given, else the environment's, else the project's."""
    named = given or os.environ.get(OUTBOX_VARIABLE)
    if named:
        return Path(named).absolute()
    return None if settings.subagent_delegation_directory is None else project / settings.subagent_delegation_directory


def _detected(settings: Any, outbox: Path | None) -> RuntimeName:
    """Where nobody has said it: inside a container with a way to ask its host, the host."""
    inside = "container" in os.environ or any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
    return (
        "delegated"
        if inside and outbox is not None and settings.subagent_runtime_fallback_mode is None
        else "inherited"
    )


def hosted(parts: Parts) -> Parts:
    """The parts of a process on the host: what asks to be delegated is already where it should be, behind a wall."""
    profiles = [replace(each, runtime="isolated") if each.runtime == "delegated" else each for each in parts.profiles]
    runtime: RuntimeName = "isolated" if parts.runtime == "delegated" else parts.runtime
    return replace(parts, profiles=profiles, runtime=runtime, outbox=None)


def named_profile(parts: Parts, name: str) -> Profile:
    """The active profile of that name, or the one for tasks that name none; raises NotFound."""
    for profile in (*parts.profiles, GENERIC):
        if profile.name.casefold() == name.casefold():
            return profile
    there = ", ".join(sorted(profile.name for profile in (*parts.profiles, GENERIC)))
    raise NotFound(f"unknown profile {name!r}; there is {there}")


def _merged(given: Rules | None, base: Rules) -> Rules:
    """Both sets of rules; the mode is that of the first which has one."""
    if given is None:
        return base
    return Rules(given.mode or base.mode, base.allow + given.allow, base.ask + given.ask, base.deny + given.deny)


def with_profiles(parts: Parts, profiles: Sequence[Profile]) -> Parts:
    """The parts with these profiles beside (and, by name, instead of) those they have."""
    merged = {profile.name.lower(): profile for profile in (*parts.profiles, *profiles)}
    return replace(parts, profiles=list(merged.values()))
