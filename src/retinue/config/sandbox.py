"""Settings of sandboxes: the network and the paths they can reach, and the resource limits of each run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from retinue.config.located import Node
from retinue.config.location import show_text
from retinue.config.schema import (
    ABOVE_DEFAULT,
    COUNT,
    Kind,
    Loosening,
    Setting,
    TrustRule,
    list_of,
    read_section,
    section_schema,
    setting,
    text_for,
    whole_from,
)
from retinue.core.errors import ConfigError
from retinue.core.limits import MIB, ResourceLimits
from retinue.core.network import HOST_PATTERN, WORDS, parse_host

PATH_PATTERN = r"^(?:~|/[^/\0])[^\0]*$"
CONTEXT_PATTERN = r"^(?=[^\0]*[^\0/\s])[^\0]*$"
MISSING = "expose_paths: {path} does not exist here, so no run will see it"
_HOSTS = list_of(text_for(lambda text: str(parse_host(text)), HOST_PATTERN), what="a list of hosts")
_DEFAULTS = ResourceLimits()


@dataclass(frozen=True)
class NetworkSettings:
    """Hosts that may be reached on the network."""

    allow: tuple[str, ...] = setting(
        _HOSTS, 'hosts; none unless named, "*" is all public ones', default=(), example='[docs.python.org, "*.x.com"]'
    )


def _read_network(node: Node) -> tuple[str, ...] | str:
    """Read `none`, `full`, a list of hosts, or a section with such a list. An empty list allows nothing."""
    if isinstance(node.value, str):
        if node.value not in WORDS:
            raise node.error(f"expected none, full or a list of hosts, got '{show_text(node.value, 80)}'")
        return node.value
    if isinstance(node.value, dict):
        return read_section(NetworkSettings, node).allow
    hosts: tuple[str, ...] = _HOSTS.read(node)
    return hosts


def _close_network(value: tuple[str, ...] | str, _: Setting) -> tuple[tuple[str, ...] | str, list[Loosening]]:
    """Close the network: without trust, a project must not open it."""
    if value == "none":
        return value, []
    return (), [Loosening("", host) for host in ((value,) if isinstance(value, str) else value)]


OPEN_NETWORK = TrustRule("any host", _close_network)
NETWORK = Kind(
    _read_network,
    {
        **section_schema(NetworkSettings),
        **_HOSTS.schema,
        "type": ["string", "array", "object"],
        "pattern": f"^({'|'.join(WORDS)})$(?!\\n)",
    },
)


def parse_exposed_path(path: str) -> str:
    """Return an absolute path with `~` expanded. Raises ConfigError."""
    if path == "/":
        raise ConfigError("/ cannot be exposed to a sandbox: it has everything in it")
    if not re.fullmatch(PATH_PATTERN, path):
        raise ConfigError(f"must be an absolute path, got {path!r}")
    return _expand_home(path)


def parse_context_path(path: str) -> str:
    """Return a path, absolute or relative to the project, with `~` expanded. Raises ConfigError."""
    if not re.fullmatch(CONTEXT_PATTERN, path):
        raise ConfigError(f"must be a file or folder other than /, got {path!r}")
    return _expand_home(path)


def _expand_home(path: str) -> str:
    try:
        return str(Path(path).expanduser())
    except RuntimeError:  # ~NAME of a user who does not exist here
        return path


def warn_of_missing_paths(paths: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each path that does not exist on this machine. This is not an error, because other machines
    may use the same file."""
    yield from (MISSING.format(path=path) for path in paths if not Path(path).exists())


CONTEXT_PATHS = list_of(text_for(parse_context_path, CONTEXT_PATTERN), what="a list of paths")
PATHS = list_of(text_for(parse_exposed_path, PATH_PATTERN), what="a list of paths")


@dataclass(frozen=True)
class ResourceLimitsSettings:
    """Shares of the machine that each sandboxed run may use."""

    memory_mib: int = setting(
        whole_from(128),
        "memory of all its processes together; of each process, if the kernel cannot count them together",
        default=_DEFAULTS.memory // MIB,
        trust=ABOVE_DEFAULT,
    )
    processes: int = setting(whole_from(16), "processes at once", default=_DEFAULTS.processes, trust=ABOVE_DEFAULT)
    cpu_seconds: int = setting(COUNT, "CPU time of each process", default=_DEFAULTS.cpu_seconds, trust=ABOVE_DEFAULT)
    file_mib: int = setting(COUNT, "size of one file", default=_DEFAULTS.file_bytes // MIB, trust=ABOVE_DEFAULT)
    open_files: int = setting(
        whole_from(64), "open files of each process", default=_DEFAULTS.open_files, trust=ABOVE_DEFAULT
    )
    workspace_mib: int = setting(
        COUNT,
        "size of the whole workspace; above it the run ends",
        default=_DEFAULTS.workspace_bytes // MIB,
        trust=ABOVE_DEFAULT,
    )

    def to_resource_limits(self) -> ResourceLimits:
        return ResourceLimits(
            memory=self.memory_mib * MIB,
            processes=self.processes,
            cpu_seconds=self.cpu_seconds,
            file_bytes=self.file_mib * MIB,
            open_files=self.open_files,
            workspace_bytes=self.workspace_mib * MIB,
        )
