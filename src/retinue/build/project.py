"""The parts that a project's files ask for, merged with the settings of the caller and the environment."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retinue.build.logs import is_telemetry_wanted
from retinue.build.parts import Parts, add_profiles
from retinue.core.errors import NotFound
from retinue.core.limits import Limits, Timeouts
from retinue.core.ports import Setup
from retinue.core.profiles import Profile, RuntimeName
from retinue.core.rounds import Rounds
from retinue.core.rules import Rules
from retinue.core.team_members import ROUND_EVALUATOR

if TYPE_CHECKING:
    from retinue.config.project import Project
    from retinue.config.settings import Settings

OUTBOX_VARIABLE = "RETINUE_DELEGATION_DIRECTORY"
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def load_project_parts(
    start: Path, *, config: Path | None = None, default_runtime: RuntimeName = "inherited", **changes: Any
) -> tuple[Parts, Project]:
    """Read the project around `start`. Return the parts that its files ask for, and the project.

    `changes` are fields of Parts that the caller sets; None means unset. They override the files, except that limits,
    rules and context paths are merged."""
    from retinue.config.models import find_default_model
    from retinue.config.project import SETTINGS_FILE, load_project
    from retinue.config.skills import render_skill_prompt

    project = load_project(start, config=config)
    settings = project.settings
    given = {name: value for name, value in changes.items() if value is not None}
    limits: Limits = given.pop("limits", Limits())
    setup = settings.workspace_setup
    context_paths = (str(project.folder / path) for path in settings.context_paths)
    outbox = _resolve_outbox(given.pop("outbox", None), settings, project.folder)
    values: dict[str, Any] = {
        "state": project.state,
        "profiles": project.profiles,
        "model": given.get("model") or settings.model or find_default_model(os.environ),
        "limits": limits.override(settings.limits),
        "rules": _merge_rules(given.pop("rules", Rules()), settings.approvals),
        "rules_file": settings.file or project.folder / SETTINGS_FILE,
        "keeps_trust": config is None,
        "approval_timeout": settings.approval_timeout,
        "notify_command": settings.notify_command,
        "setup": None if setup is None else Setup(setup, settings.workspace_setup_timeout),
        "workspace_max_mib": settings.workspace_max_mib,
        "resource_limits": settings.resource_limits,
        "timeouts": Timeouts(
            settings.coordination.subagent_default_timeout,
            settings.coordination.subagent_min_timeout,
            settings.coordination.subagent_max_timeout,
        ),
        "runtime": _resolve_runtime(settings, outbox, default=default_runtime),
        "outbox": outbox,
        "best_effort": settings.coordination.subagent_reports == "best_effort",
        "fallback": settings.coordination.subagent_runtime_fallback_mode,
        "context_paths": (*context_paths, *given.pop("context_paths", ())),
        "expose": settings.expose_paths,
        "launch_prefix": settings.coordination.subagent_host_launch_prefix,
        "image": settings.container_image,
        "container_flags": settings.container_flags,
        "skills": lambda profile: render_skill_prompt(profile.skills, project.skills),
        "telemetry": is_telemetry_wanted(settings.telemetry),
        "network": settings.network,
        "mcp_servers": settings.mcp_servers,
        "teams": settings.coordination.subagent_orchestrator,
        "subagent_agents": settings.subagent_agents,
        "enable_subagents": settings.coordination.enable_subagents,
        "rounds": settings.coordination.rounds,
    }
    return Parts(project=project.folder, **{**values, **given}), project


def load_profile(name: str) -> Profile[str]:
    """Return a built-in profile, such as `explorer`. Reads no file of the project. Raises ConfigError for an unknown
    name.

    Use `dataclasses.replace` to give the profile another model, tools or limits."""
    from retinue.config.location import show_text, suggest

    built_in = find_built_in_profiles()
    if name.casefold() not in built_in:
        there = ", ".join(built_in)
        raise NotFound(f"unknown built-in profile '{show_text(name, 80)}'; available: {there}{suggest(name, built_in)}")
    return built_in[name.casefold()]


def find_built_in_profiles() -> dict[str, Profile[str]]:
    """Return the built-in profiles by name."""
    from retinue.config.profiles import find_profiles

    return {each.profile.name.casefold(): each.profile for each in find_profiles(None)}


def find_evaluator() -> Profile[str]:
    """Return the built-in profile that judges the answers of rounds."""
    return find_built_in_profiles()[ROUND_EVALUATOR]


def enable_rounds(parts: Parts, rounds: Rounds) -> Parts:
    """Return `parts` with every setting that rounds need, whatever the files say."""
    has_evaluator = any(profile.name.casefold() == ROUND_EVALUATOR for profile in parts.profiles)
    return replace(
        parts if has_evaluator else add_profiles(parts, [find_evaluator()]),
        rounds=rounds,
        teams=replace(parts.teams, enabled=True),
        enable_subagents=True,
    )


def render_built_in_skills(profile: Profile) -> str:
    """Return the part of the profile's system prompt that lists its built-in skills. Raises ConfigError for an unknown
    one."""
    from retinue.config.skills import find_skills, render_skill_prompt

    return render_skill_prompt(profile.skills, find_skills(None)) if profile.skills else ""


def _merge_rules(option: Rules, base: Rules) -> Rules:
    """Return both sets of rules together. The mode of `option` wins."""
    return Rules(option.mode or base.mode, base.allow + option.allow, base.ask + option.ask, base.deny + option.deny)


def _resolve_outbox(option: Path | None, settings: Settings, project: Path) -> Path | None:
    """Return the outbox, a folder shared with the host: the option, else the environment, else retinue.yaml."""
    named = option or os.environ.get(OUTBOX_VARIABLE)
    if named:
        return Path(named).absolute()
    setting = settings.coordination.subagent_delegation_directory
    return None if setting is None else project / setting


def _resolve_runtime(settings: Settings, outbox: Path | None, *, default: RuntimeName) -> RuntimeName:
    """Return the runtime of retinue.yaml, else `delegated` in a container with an outbox, else `default`.

    `delegated` is not chosen if retinue.yaml has a fallback or a launch prefix."""
    coordination = settings.coordination
    if coordination.subagent_runtime_mode is not None:
        return coordination.subagent_runtime_mode
    has_sandbox = coordination.subagent_runtime_fallback_mode is not None or coordination.subagent_host_launch_prefix
    in_container = "container" in os.environ or any(map(os.path.exists, CONTAINER_MARKS))
    return "delegated" if in_container and outbox is not None and not has_sandbox else default
