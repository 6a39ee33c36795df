"""The parts that a project's files ask for, merged with what the caller and the environment say."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retinue.build.logs import is_telemetry_wanted
from retinue.build.parts import Parts
from retinue.core.limits import Limits, Timeouts
from retinue.core.profiles import RuntimeName

if TYPE_CHECKING:
    from retinue.config.project import Project


def load_project_parts(
    start: Path, *, config: Path | None = None, default_runtime: RuntimeName = "inherited", **changes: Any
) -> tuple[Parts, Project]:
    """Read the project around `start` and return the parts it asks for, and the project.

    `changes` are fields of Parts that the caller sets; None means unset. They win over the files, except that limits
    and rules are merged."""
    from retinue.config.project import load_project
    from retinue.config.resolve import make_setup, merge_rules, resolve_model, resolve_outbox, resolve_runtime
    from retinue.config.skills import render_skill_prompt

    project = load_project(start, config=config)
    settings = project.settings
    given = {name: value for name, value in changes.items() if value is not None}
    limits: Limits = given.pop("limits", Limits())
    outbox = resolve_outbox(given.pop("outbox", None), settings, project.folder, os.environ)
    values: dict[str, Any] = {
        "state": project.folder / ".retinue",
        "profiles": project.profiles,
        "model": resolve_model(settings, os.environ),
        "limits": limits.over(settings.limits),
        "rules": merge_rules(given.pop("rules", None), settings),
        "rules_file": settings.file or project.folder / "retinue.yaml",
        "keeps_trust": config is None,
        "approval_timeout": settings.approval_timeout,
        "setup": make_setup(settings),
        "workspace_max_mib": settings.workspace_max_mib,
        "caps": settings.caps.to_caps(),
        "timeouts": Timeouts(
            settings.coordination.subagent_default_timeout,
            settings.coordination.subagent_min_timeout,
            settings.coordination.subagent_max_timeout,
        ),
        "runtime": resolve_runtime(settings, outbox, os.environ, default=default_runtime),
        "outbox": outbox,
        "best_effort": settings.coordination.subagent_reports == "best_effort",
        "fallback": settings.coordination.subagent_runtime_fallback_mode,
        "expose": settings.expose_paths,
        "launch_prefix": settings.coordination.subagent_host_launch_prefix,
        "image": settings.container_image,
        "container_flags": settings.container_flags,
        "skills": lambda profile: render_skill_prompt(profile.skills, project.skills),
        "telemetry": is_telemetry_wanted(settings.telemetry),
        "network": settings.network,
        "mcp_servers": settings.mcp_servers,
    }
    return Parts(project=project.folder, **{**values, **given}), project
