"""The merge of a project's settings with the command line and the environment. Limits are merged by `Limits.over`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from retinue.config.models import find_default_model
from retinue.config.settings import Settings
from retinue.core.ports import Setup
from retinue.core.profiles import RuntimeName
from retinue.core.rules import Rules

OUTBOX_VARIABLE = "RETINUE_DELEGATION_DIRECTORY"
CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv")


def merge_rules(option: Rules | None, settings: Settings) -> Rules:
    """Return both sets of rules. The option's mode wins."""
    base = settings.rules
    if option is None:
        return base
    return Rules(option.mode or base.mode, base.allow + option.allow, base.ask + option.ask, base.deny + option.deny)


def make_setup(settings: Settings) -> Setup | None:
    """Return the command that prepares each copied workspace."""
    command = settings.workspace_setup
    return None if command is None else Setup(command, settings.workspace_setup_timeout)


def resolve_model(settings: Settings, environ: Mapping[str, str]) -> str | None:
    """Return the model where the command line names none: that of retinue.yaml, else of the environment."""
    return settings.model or find_default_model(environ)


def resolve_outbox(option: Path | None, settings: Settings, project: Path, environ: Mapping[str, str]) -> Path | None:
    """Return the folder shared with the host: the option, else the environment, else retinue.yaml."""
    named = option or environ.get(OUTBOX_VARIABLE)
    if named:
        return Path(named).absolute()
    setting = settings.coordination.subagent_delegation_directory
    return None if setting is None else project / setting


def resolve_runtime(
    settings: Settings, outbox: Path | None, environ: Mapping[str, str], *, default: RuntimeName
) -> RuntimeName:
    """Return the runtime where the command line names none: that of retinue.yaml, else `delegated` in a container with
    an outbox, else the default."""
    coordination = settings.coordination
    if coordination.subagent_runtime_mode is not None:
        return coordination.subagent_runtime_mode
    has_sandbox = coordination.subagent_runtime_fallback_mode is not None or coordination.subagent_host_launch_prefix
    in_container = "container" in environ or any(map(os.path.exists, CONTAINER_MARKS))
    return "delegated" if in_container and outbox is not None and not has_sandbox else default
