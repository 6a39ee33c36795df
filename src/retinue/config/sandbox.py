"""What runs behind walls may reach and use, as retinue.yaml says it: `network` and `caps`."""

from __future__ import annotations

from typing import Any

from retinue.config.located import Node
from retinue.config.location import shown
from retinue.config.schema import COUNT, Key, Kind, Shape, at_least, mapping, texts_like
from retinue.core.limits import MIB, Caps
from retinue.core.network import HOST_PATTERN, WORDS, parse_host


def _network(node: Node) -> tuple[str, ...] | str:
    """none, full, a list of hosts, or a section with that list; one that names none allows none."""
    if isinstance(node.value, str):
        if node.value not in WORDS:
            raise node.error(f"expected none, full or a list of hosts, got '{shown(node.value, 80)}'")
        return node.value
    if isinstance(node.value, dict):
        return NETWORK.read(node.section()).get("allow") or ()
    hosts: tuple[str, ...] = _HOSTS.read(node)
    return hosts


def _caps(found: dict[str, Any]) -> Caps:
    """What is not said, or null, is the default."""
    said = {key: value for key, value in found.items() if value is not None}
    sizes = {f"{key.removesuffix('_mib')}_bytes": value * MIB for key, value in said.items() if key.endswith("_mib")}
    counts = {key: value for key, value in said.items() if not key.endswith("_mib")}
    if "memory_bytes" in sizes:
        sizes["memory"] = sizes.pop("memory_bytes")
    return Caps(**sizes, **counts)


_HOSTS = texts_like(lambda node: str(node.checked(parse_host)), HOST_PATTERN, what="a list of hosts")
NETWORK = Shape(
    "What may be reached on the network",
    (Key("allow", _HOSTS, 'hosts; none unless named, "*" is all public ones', '[docs.python.org, "*.example.com"]'),),
)
REACH = Kind(
    _network,
    {
        **NETWORK.schema(),
        **_HOSTS.schema,
        "type": ["string", "array", "object"],
        "pattern": f"^({'|'.join(WORDS)})$(?!\\n)",
    },
)
CAPS = mapping(
    Shape(
        "What each run behind a wall may use of the machine",
        (
            Key(
                "memory_mib",
                at_least(128),
                "all its processes together; each, where the kernel cannot count that",
                "4096",
            ),
            Key("processes", at_least(16), "how many at once", "512"),
            Key("cpu_seconds", COUNT, "of each process", "14400"),
            Key("file_mib", COUNT, "how large a file may become", "2048"),
            Key("open_files", at_least(64), "how many each process may have open", "4096"),
            Key("workspace_mib", COUNT, "what it has written in all; over it the run ends", "8192"),
        ),
    ),
    _caps,
)
