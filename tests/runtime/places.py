"""Where a scene can be played: runtimes of this process's user, and of an ordinary one. A new runtime is a new row."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tests.runtime.escapes  # noqa: F401 - adds to the falls
from retinue.runtime.walls.box import command
from tests.runtime.falls import FALLS
from tests.runtime.scenes import SCENES

REPO = Path(__file__).parents[2]
ORDINARY = 23_456
ROOT = os.geteuid() == 0
needs_bubblewrap = pytest.mark.skipif(command("bwrap") is None, reason="bubblewrap is not installed")


@dataclass(frozen=True)
class Place:
    runtime: str
    ordinary: bool = False

    async def play(self, scene: str) -> Any:
        if not self.ordinary or not ROOT:
            return await {**SCENES, **FALLS}[scene](self.runtime)
        return json.loads(run_as_user([sys.executable, "-m", "tests.runtime", scene, self.runtime]))


PLACES = [
    pytest.param(Place("isolated"), id="isolated", marks=needs_bubblewrap),
    pytest.param(
        Place("isolated", ordinary=True),
        id="isolated-by-ordinary-user",
        marks=[needs_bubblewrap, pytest.mark.skipif(not ROOT, reason="the same as the one above")],
    ),
]
# Runs of the host of a container, asked for through files; the host's wall is the first of those above.
ELSEWHERE = [
    pytest.param(Place("delegated"), id="delegated", marks=needs_bubblewrap),
    pytest.param(
        Place("delegated", ordinary=True),
        id="delegated-by-ordinary-user",
        marks=[needs_bubblewrap, pytest.mark.soak, pytest.mark.skipif(not ROOT, reason="the same as the one above")],
    ),
]


def run_as_user(argv: Sequence[str], *, seconds: float = 55) -> str:
    """Runs a command as an ordinary user who can reach Python and this repository, wherever they are."""
    folder = Path(tempfile.mkdtemp(prefix="retinue-user-"))
    folder.chmod(0o755)
    os.chown(folder, ORDINARY, ORDINARY)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(folder), "HOME": str(folder), "LANG": "C.UTF-8"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path.startswith("/"))
    try:
        done = subprocess.run(
            [*as_user(), *argv], cwd="/", env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_user() -> list[str]:
    """What to put before a command of root to have an ordinary user run it."""
    needed = {sys.prefix, sys.base_prefix, str(REPO)}
    closed = {str(next(p for p in reversed(Path(path).parents) if not p.stat().st_mode & 1))
              for path in needed if any(not p.stat().st_mode & 1 for p in Path(path).parents)}  # fmt: skip
    opened = [argument for folder in closed for argument in ("--perms", "0755", "--tmpfs", folder)]
    for path in sorted(needed):
        for folder in reversed(Path(path).parents):
            if any(Path(folder).is_relative_to(shut) for shut in closed):
                opened += ["--perms", "0755", "--dir", str(folder)]
        opened += ["--bind", path, path]
    kept = [word for name in ("SETUID", "SETGID", "KILL") for word in ("--cap-add", f"CAP_{name}")]
    leave = ["setpriv", "--reuid", str(ORDINARY), "--regid", str(ORDINARY), "--clear-groups"]
    return ["bwrap", "--dev-bind", "/", "/", *opened, "--chdir", str(REPO), *kept, "--", *leave]
