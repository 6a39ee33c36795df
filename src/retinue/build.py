"""The composition root: the only place that names concrete backends. Each is loaded when it is asked for.

Gets values (a folder, profiles, a model name) and gives back a Supervisor that owns what was built; closing it
tears everything down. Reads no file unless a name or a project says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retinue.agent.plans import ProfilePlanner
from retinue.core.errors import ConfigError, NotFound
from retinue.core.limits import Limits
from retinue.core.ports import Approver, Clock, Log, Model, Policy
from retinue.core.profiles import Profile
from retinue.runtime.folders import StateFolder, private_folder
from retinue.runtime.inherited import Inherited
from retinue.supervisor.clock import SystemClock
from retinue.supervisor.policy import MODES, Mode, ModePolicy
from retinue.supervisor.supervisor import Supervisor, Timeouts

MAIN = Profile(
    "main",
    "You are the primary agent. Do the task yourself or delegate parts of it to subagents, and end with the answer.",
    description="The primary agent of `retinue run`",
    workspace="shared",
)


@dataclass(frozen=True)
class Parts:
    """What a supervisor is built from. `state` None keeps everything in memory; `policy` goes before `mode`;
    `wait_approvals` is how many seconds a question waits for somebody when no approver is attached."""

    project: Path
    state: Path | None = None
    profiles: Sequence[Profile] = ()
    model: str | Model | None = None
    approver: Approver | None = None
    mode: Mode = "ask"
    policy: Policy | None = None
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)
    skills: Callable[[Profile], str] = lambda _: ""
    clock: Clock | None = None
    wait_approvals: float | None = None


def supervisor(parts: Parts) -> Supervisor:
    """Must be called in the event loop the runs will live in."""
    if parts.mode not in MODES:
        raise ConfigError(f"unknown approval mode {parts.mode!r}; there is {', '.join(MODES)}")
    clock = parts.clock or SystemClock()
    return Supervisor(
        log(parts.state),
        planner=ProfilePlanner(
            parts.profiles,
            models=model_source(parts.project, clock),
            default_model=parts.model,
            skills=parts.skills,
        ),
        runtime=Inherited(),
        state=StateFolder(parts.state, project=parts.project),
        clock=clock,
        policy=parts.policy or ModePolicy(parts.mode),
        approver=parts.approver,
        limits=parts.limits,
        timeouts=parts.timeouts,
        wait_approvals=parts.wait_approvals,
    )


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


def model_source(project: Path, clock: Clock) -> Callable[[str], Model]:
    """Finds models by name: `scripted:FILE`, relative to the project. Each is made once."""
    made: dict[str, Model] = {}

    def find(name: str) -> Model:
        if name not in made:
            made[name] = _make_model(name, project, clock)
        return made[name]

    return find


def _make_model(name: str, project: Path, clock: Clock) -> Model:
    provider, _, rest = name.partition(":")
    if provider != "scripted":
        raise NotFound(f"unknown model {name!r}: this version runs scripted:FILE")
    if not rest:
        raise ConfigError("model 'scripted:' names no file: write scripted:FILE")
    script = importlib.import_module("retinue.config.scripts").load_script(project / Path(rest).expanduser())
    model: Model = importlib.import_module("retinue.models.scripted").ScriptedModel(script, clock)
    return model


def project_parts(start: Path, *, config: Path | None = None, **changes: Any) -> tuple[Parts, Any]:
    """The parts a project's files ask for, and the project itself; `changes` are what the caller was given."""
    project = importlib.import_module("retinue.config.project").load_project(start, config=config)
    skill_prompt = importlib.import_module("retinue.config.skills").skill_prompt
    settings = project.settings
    given = {name: value for name, value in changes.items() if value is not None}
    limits: Limits = given.pop("limits", Limits())
    parts = Parts(
        project=project.folder,
        **{
            "state": project.folder / ".retinue",
            "profiles": project.profiles,
            "model": settings.model,
            "limits": limits.over(settings.limits),
            "timeouts": Timeouts(
                settings.subagent_default_timeout, settings.subagent_min_timeout, settings.subagent_max_timeout
            ),
            "skills": lambda profile: skill_prompt(profile.skills, project.skills),
            **given,
        },
    )
    return parts, project


def with_profiles(parts: Parts, profiles: Sequence[Profile]) -> Parts:
    """The parts with these profiles beside (and, by name, instead of) those they have."""
    merged = {profile.name.lower(): profile for profile in (*parts.profiles, *profiles)}
    return replace(parts, profiles=list(merged.values()))
