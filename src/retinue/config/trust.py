"""Whether what a project's retinue.yaml loosens is in force: only when the user has said so of exactly this text.

A retinue.yaml in a clone was written by somebody else. What it narrows (deny, ask, smaller limits) holds in any
case; what it loosens (mode yes, allow, hosts, a setup command, MCP servers, limits and sizes above the defaults, less
of a wall, logs that go sooner) waits for a yes.
The answer is kept outside the project, in `~/.config/retinue/trusted/`, one file for each retinue.yaml, with the hash
of the text it was given for. A file that somebody named (`--config`, `config=` in Python) is trusted by that. Asks
nobody: surfaces do.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from retinue.config.location import Place
from retinue.config.settings import Settings, parse_settings
from retinue.core.errors import ConfigError
from retinue.core.limits import (
    DEFAULT_CONCURRENT,
    DEFAULT_DEPTH,
    DEFAULT_TURNS,
    MIB,
    MODEL_ASKED_SECONDS,
    RETENTION_DAYS,
    SPAWNED_SECONDS,
    WORKSPACE_MIB,
    Caps,
    Limits,
)
from retinue.core.profiles import RUNTIMES
from retinue.core.secrets import is_named
from retinue.core.servers import McpServer, server_of
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file

LARGEST = 16 * 1024
LAX = RUNTIMES[0]
UNWALLED = (LAX, "delegated")  # as a mode: subagents are asked of a host, and the primary has no wall
_MAY: dict[str, float] = {"turns": DEFAULT_TURNS, "depth": DEFAULT_DEPTH, "concurrent": DEFAULT_CONCURRENT}
_RUN_MAY = _MAY | {"seconds": SPAWNED_SECONDS}
_TIMEOUTS = {
    "subagent_default_timeout": SPAWNED_SECONDS,
    "subagent_min_timeout": MODEL_ASKED_SECONDS[0],
    "subagent_max_timeout": MODEL_ASKED_SECONDS[1],
}


def held(settings: Settings) -> tuple[Settings, list[str]]:
    """The settings without what they loosen, and that in words, a line each."""
    rules, words = settings.rules, []
    if rules.mode not in (None, "ask", "strict"):
        words.append(f"approvals.mode: {rules.mode}")
    words += [f"approvals.allow: {rule}" for rule in rules.allow]
    mode = rules.mode if rules.mode in ("ask", "strict") else None
    limits = _bounded(settings.limits, _MAY, "max_", words)
    profiles = {
        key: replace(
            given,
            limits=_bounded(given.limits, _RUN_MAY, f"profiles.{given.name}.limits.", words),
            runtime=None if given.runtime == LAX else given.runtime,
            tools=None if given.tools is None else tuple(tool for tool in given.tools if not server_of(tool)),
        )
        for key, given in settings.profiles.items()
    }
    words += _reach(settings)
    if settings.workspace_setup is not None:
        words.append(f"workspace_setup: {settings.workspace_setup}")
    words += [f"mcp_servers.{server.name}: {server.words}{_given(server)}" for server in settings.mcp_servers]
    words += [f"expose_paths: {path}" for path in settings.expose_paths]
    if settings.subagent_host_launch_prefix:
        words.append(f"subagent_host_launch_prefix: {' '.join(settings.subagent_host_launch_prefix)}")
    if settings.container_image is not None:
        words.append(f"container_image: {settings.container_image}")
    words += [f"container_flags: {flag}" for flag in settings.container_flags]
    if settings.subagent_reports != "strict":
        words.append(f"subagent_reports: {settings.subagent_reports}")
    words += unwalled(settings)
    if settings.subagent_delegation_directory is not None:
        words.append(f"subagent_delegation_directory: {settings.subagent_delegation_directory}")
    caps = _capped(settings.caps, words)
    size = settings.workspace_max_mib
    if size is not None and size > WORKSPACE_MIB:
        words.append(f"workspace_max_mib: {size}")
        size = WORKSPACE_MIB
    timeouts = {name: min(getattr(settings, name), most) for name, most in _TIMEOUTS.items()}
    words += [f"{name}: {getattr(settings, name):g}" for name in _TIMEOUTS if getattr(settings, name) > timeouts[name]]
    narrow = msgspec.structs.replace(rules, mode=mode, allow=())
    network = None if settings.network is None else ()
    narrower: dict[str, Any] = {
        "mcp_servers": (),
        "network": network,
        "workspace_setup": None,
        "workspace_max_mib": size,
        "expose_paths": (),
    }
    narrower |= {"subagent_host_launch_prefix": (), "container_image": None, "container_flags": ()}
    narrower |= {"subagent_runtime_fallback_mode": None, "subagent_delegation_directory": None, "caps": caps}
    narrower["subagent_reports"] = "strict"
    if settings.subagent_runtime_mode in UNWALLED:
        narrower["subagent_runtime_mode"] = None
    if settings.retention_days < RETENTION_DAYS:
        words.append(f"retention_days: {settings.retention_days:g}")
        narrower["retention_days"] = RETENTION_DAYS
    return replace(settings, rules=narrow, limits=limits, profiles=profiles, **narrower, **timeouts), words


def _reach(settings: Settings) -> Iterator[str]:
    """What may be reached. What a profile says only narrows that."""
    if settings.network == "full":
        yield "network: full"
    elif settings.network not in (None, "none"):
        yield from (f"network: {host}" for host in settings.network or ())


def _given(server: McpServer) -> str:
    """What of the environment goes to it, in words; and what else decides which code runs: variables can, too."""
    told = [f"gets {', '.join(server.gets)}"] if server.gets else []
    told += [f"{name}={'...' if is_named(name) else value}" for name, value in server.env.items()]
    told += [] if server.cwd is None else [f"in {server.cwd}"]
    return f" ({'; '.join(told)})" if told else ""


def unwalled(settings: Settings) -> Iterator[str]:
    """What has runs without a wall, in words."""
    if settings.subagent_runtime_mode in UNWALLED:
        yield f"subagent_runtime_mode: {settings.subagent_runtime_mode}"
    if settings.subagent_runtime_fallback_mode is not None:
        yield f"subagent_runtime_fallback_mode: {settings.subagent_runtime_fallback_mode}"
    yield from (f"profiles.{given.name}.runtime: {LAX}" for given in settings.profiles.values() if given.runtime == LAX)


def _capped(caps: Caps, words: list[str]) -> Caps:
    """What a run may use of the machine, none of it more than by default; what was more is told."""
    default = {name: getattr(Caps(), name) for name in caps.__struct_fields__}
    more = {name: most for name, most in default.items() if getattr(caps, name) > most}
    for name in more:
        value = getattr(caps, name)
        mib = name.endswith("_bytes") or name == "memory"
        words.append(f"caps.{name.removesuffix('_bytes')}{'_mib' if mib else ''}: {value // MIB if mib else value}")
    return msgspec.structs.replace(caps, **more)


def _bounded(limits: Limits, may: Mapping[str, float], prefix: str, words: list[str]) -> Limits:
    """The limits, none above its default; what was above is told."""
    changes: dict[str, Any] = {}
    for name, most in may.items():
        value = getattr(limits, name)
        if value is None or (value is not msgspec.UNSET and value > most):
            words.append(f"{prefix}{name}: {'null' if value is None else str(value).removesuffix('.0')}")
            changes[name] = most
    return msgspec.structs.replace(limits, **changes) if changes else limits


def answered(file: Path, text: str) -> bool | None:
    """What the user said of this text in this file; None when nothing, or of another text."""
    kept = _read(_place(file))
    return kept.get("trusted") is True if kept.get("sha256") == _digest(text) else None


def remember(file: Path, text: str, *, trusted: bool = True) -> None:
    """Keeps the user's answer. ConfigError when it cannot be kept."""
    place = _place(file)
    if place is None:
        raise ConfigError("there is no home folder to keep it in: set XDG_CONFIG_HOME")
    about = {"file": os.path.realpath(file), "sha256": _digest(text), "trusted": trusted}
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(place, json.dumps(about).encode())
    except OSError as error:
        raise Place(str(place)).error(f"cannot be written: {error.strerror or error}") from None


def forget(file: Path) -> None:
    place = _place(file)
    try:
        if place is not None:
            place.unlink(missing_ok=True)
    except OSError as error:
        raise Place(str(place)).error(f"cannot be removed: {error.strerror or error}") from None


def follow(file: Path, before: str | None, after: str) -> None:
    """We changed the file as the user said: it is in force as it was before. A file that was not stays so."""
    in_force = before is None or answered(file, before) or not held(parse_settings(_plain(before), file))[1]
    if in_force:
        with suppress(ConfigError):  # then the next run asks
            remember(file, after)


def _place(file: Path) -> Path | None:
    """Where the answer for a file is kept."""
    given = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".config"
    except RuntimeError:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(file))).hexdigest()[:32]
    return base / "retinue" / "trusted" / f"{name}.json"


def _read(place: Path | None) -> Mapping[str, Any]:
    """What is kept there; nothing unless it is a file of ours that nobody else may write."""
    if place is None:
        return {}
    try:
        kept = msgspec.json.decode(read_small_file(place, LARGEST, owners=(os.geteuid(),), forbidden_mode=0o022))
    except (OSError, msgspec.MsgspecError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _plain(text: str) -> str:
    """As it is read: line ends are all the same."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _digest(text: str) -> str:
    return hashlib.sha256(_plain(text).encode()).hexdigest()
