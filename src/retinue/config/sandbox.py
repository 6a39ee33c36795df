"""Settings of sandboxes: the network and the paths they can reach, and the resource limits of each run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from retinue.config.located import Node
from retinue.config.location import show_text
from retinue.config.schema import (
    ABOVE_DEFAULT,
    COUNT,
    Kind,
    Loosening,
    Restricted,
    Section,
    Setting,
    TrustRule,
    list_of,
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


_ALLOWED = Section(
    "Hosts that may be reached on the network",
    dict,
    {
        "allow": Setting(
            _HOSTS, 'hosts; none unless named, "*" is all public ones', example='[docs.python.org, "*.x.com"]'
        )
    },
)


def _read_network(node: Node) -> tuple[str, ...] | str:
    """Read `none`, `full`, a list of hosts, or a section with such a list. An empty list allows nothing."""
    if isinstance(node.value, str):
        if node.value not in WORDS:
            raise node.error(f"expected none, full or a list of hosts, got '{show_text(node.value, 80)}'")
        return node.value
    if isinstance(node.value, dict):
        return _ALLOWED.read(node).get("allow", ())  # type: ignore[no-any-return]
    return _HOSTS.read(node)  # type: ignore[no-any-return]


def _close_network(value: tuple[str, ...] | str, _: Setting) -> Restricted:
    """Close the network: without trust, a project must not open it."""
    if value == "none":
        return value, []
    return (), [Loosening("", host) for host in ((value,) if isinstance(value, str) else value)]


OPEN_NETWORK = TrustRule("any host", _close_network)
NETWORK = Kind(
    _read_network,
    lambda: {
        **_ALLOWED.make_schema(),
        **_HOSTS.make_schema(),
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


_IN_MIB = {"memory_mib": "memory", "file_mib": "file_bytes", "workspace_mib": "workspace_bytes"}


def _make_resource_limits(**given: int) -> ResourceLimits:
    return ResourceLimits(
        **{_IN_MIB.get(key, key): value * MIB if key in _IN_MIB else value for key, value in given.items()}
    )


RESOURCE_LIMITS = Section(
    "Shares of the machine that each sandboxed run may use",
    _make_resource_limits,
    {
        "memory_mib": Setting(
            whole_from(128),
            "memory of all its processes together; of each process, if the kernel cannot count them together",
            default=_DEFAULTS.memory // MIB,
            trust=ABOVE_DEFAULT,
        ),
        "processes": Setting(whole_from(16), "processes at once", default=_DEFAULTS.processes, trust=ABOVE_DEFAULT),
        "cpu_seconds": Setting(COUNT, "CPU time of each process", default=_DEFAULTS.cpu_seconds, trust=ABOVE_DEFAULT),
        "file_mib": Setting(COUNT, "size of one file", default=_DEFAULTS.file_bytes // MIB, trust=ABOVE_DEFAULT),
        "open_files": Setting(
            whole_from(64), "open files of each process", default=_DEFAULTS.open_files, trust=ABOVE_DEFAULT
        ),
        "workspace_mib": Setting(
            COUNT,
            "size of the whole workspace; above it the run ends",
            default=_DEFAULTS.workspace_bytes // MIB,
            trust=ABOVE_DEFAULT,
        ),
    },
)
