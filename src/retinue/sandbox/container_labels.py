"""The labels of our containers: whose they are, so that exactly those can be ended, also when their maker is gone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

TREE, RUN, MAKER = "retinue.tree", "retinue.run", "retinue.maker"


class Engine(Protocol):
    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]: ...

    def remove(self, names: Sequence[str]) -> None: ...


def of(tree: str, run: int) -> list[str]:
    return [f"--label={TREE}={tree}", f"--label={RUN}={tree}/{run}", f"--label={MAKER}={maker()}"]


def maker() -> str:
    """This process, as no other is called: where its number counts, the number, and when it began."""
    return f"{_numbering()}.{os.getpid()}.{_began(os.getpid())}"


def kill(engine: Engine, tree: str, run: int) -> None:
    """Ends what a run has, whatever state it is in."""
    engine.remove(_found(engine, f"{RUN}={tree}/{run}", f"{MAKER}={maker()}"))


def sweep(engine: Engine) -> None:
    """Ends what processes that are gone have left. Those of makers that are counted elsewhere are not ours to judge."""
    engine.remove([found for found in _found(engine, MAKER) if _is_orphan(_maker_of(engine, found))])


def _found(engine: Engine, *labels: str) -> list[str]:
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return engine.call("ps", "--all", "--quiet", "--no-trunc", *filters).stdout.split()


def _maker_of(engine: Engine, container: str) -> str:
    said = engine.call("inspect", "--format", f'{{{{index .Config.Labels "{MAKER}"}}}}', container)
    return said.stdout.strip()


def _is_orphan(maker: str) -> bool:
    numbering, _, rest = maker.partition(".")
    pid, _, began = rest.partition(".")
    return numbering == _numbering() and pid.isdigit() and _began(int(pid)) != began


def _numbering() -> str:
    """Return the pid namespace; empty on systems without one."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "host"


def _began(pid: int) -> str:
    """When a process began; nothing for one that is not there."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "" if not Path("/proc/self").exists() and _is_there(pid) else "gone"


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
