"""What a project's settings, what was given beside them and the environment come to together."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from retinue.core.ports import Setup
from retinue.core.profiles import RuntimeName
from retinue.core.rules import Rules

if TYPE_CHECKING:
    from retinue.config.settings import Settings

OUTBOX_VARIABLE = "RETINUE_DELEGATION_DIRECTORY"


def merged(given: Rules | None, base: Rules) -> Rules:
    """Both sets of rules; the mode is that of the first which has one."""
    if given is None:
        return base
    return Rules(given.mode or base.mode, base.allow + given.allow, base.ask + given.ask, base.deny + given.deny)


def setup_of(settings: Settings) -> Setup | None:
    command = settings.workspace_setup
    return None if command is None else Setup(command, settings.workspace_setup_timeout)


def outbox_of(given: Path | None, settings: Settings, project: Path) -> Path | None:
    """The folder shared with the host: what was given, else the environment's, else the project's."""
    named = given or os.environ.get(OUTBOX_VARIABLE)
    if named:
        return Path(named).absolute()
    return (
        None
        if settings.coordination.subagent_delegation_directory is None
        else project / settings.coordination.subagent_delegation_directory
    )


def detected(settings: Settings, outbox: Path | None) -> RuntimeName | None:
    """Where nobody has said it: inside a container with a way to ask its host, the host."""
    inside = "container" in os.environ or any(map(os.path.exists, ("/.dockerenv", "/run/.containerenv")))
    said = (
        settings.coordination.subagent_runtime_fallback_mode is not None
        or settings.coordination.subagent_host_launch_prefix
    )
    return "delegated" if inside and outbox is not None and not said else None
